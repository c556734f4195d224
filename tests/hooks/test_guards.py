"""Guards: what goes wrong on one rank is skipped or ends the run, named, on all ranks and after a resume alike."""

import itertools
import json
import math
import re
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, small_trainer, start_small, titanlite
from small_runs import logged
from torch import Tensor

from titanlite import Trainer, load_checkpoint
from titanlite.checkpoint.dcp import LiveState, local
from titanlite.config.errors import GuardError
from titanlite.hooks.guards import SpikeGuard
from titanlite.hooks.hook import Hook
from titanlite.hooks.hook_state import hook_tensors
from titanlite.train.step import StepResult

pytestmark = pytest.mark.slow
FLOAT8 = "--float8.enable --float8.emulate --float8.min-features 0 --float8.enable-fsdp-float8-all-gather"
LAYOUTS = {
    "fsdp": "--parallelism.fsdp_min_num_params 0",
    "hsdp": "--parallelism.data_parallel_replicate_degree 2 --optimizer.implementation foreach",
    "tp": "--parallelism.tensor_parallel_degree 2 --model.n_kv_heads 2",
    "pp": "--parallelism.pipeline_parallel_degree 2 --compile.enable --compile.components clip",
    "fp8": f"{FLOAT8} --float8.precompute-float8-dynamic-scale-for-fsdp",
    "bfloat16": "--training.dtype bfloat16 --optimizer.stochastic_rounding",
    "muon": "--optimizer.name Muon --optimizer.state_dtype bfloat16",
    "8 bits": "--optimizer.name AdamW8bit --model.dim 256",
}


class Fault(Hook):
    """Puts a value into one element of rank 1's gradients at a step, and looks at what the step leaves."""

    def __init__(self, faults: dict[int, float]) -> None:
        self._faults, self.unchanged = faults, dict[int, bool]()

    def built(self, trainer: Trainer) -> None:
        self._live, self._model = LiveState(trainer.model, trainer.optimizer), trainer.model

    def _state(self) -> dict[str, Tensor]:
        return {name: local(tensor).clone() for name, tensor in self._live.tensors().items()}

    def before_step(self, step: int) -> None:
        self._before = self._state()

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        if step in self._faults and dist.get_rank() == 1:
            gradient = list(self._model.parameters())[1].grad
            assert gradient is not None
            local(gradient).view(-1)[0] = self._faults[step]

    def after_step(self, step: int, result: StepResult) -> None:
        now = self._state()
        old = {
            name: self._before.get(name, torch.zeros_like(value)) for name, value in now.items()
        }  # Adam begins at 0
        self.unchanged[step] = all(torch.equal(old[name], now[name]) for name in now)


def skipping(folder: str, layouts: list[str]) -> dict[str, dict[int, bool]]:
    """Layout -> step -> whether it has left weights and optimizer bit for bit as they were."""
    found = {}
    for name in layouts:
        fault = Fault({1: math.nan, 3: math.inf, 4: -math.inf})
        words = f"{LAYOUTS[name]} --training.steps 5 --metrics.log_freq 3"
        with small_trainer(f"{folder}/{name}", fault, *words.split()) as trainer:
            trainer.train()
        found[name] = fault.unchanged
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["fsdp", "hsdp", "tp", "bfloat16"], id="sample"),
        pytest.param(list(LAYOUTS), id="all", marks=pytest.mark.long),
    ],
)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_on_any_layout(tmp_path, layouts):
    ranks = run_ranks(2, skipping, str(tmp_path), layouts)
    unchanged = {1: True, 2: False, 3: True, 4: True, 5: False}

    assert ranks == [dict.fromkeys(layouts, unchanged)] * 2

    for name in layouts:
        out = tmp_path / name / "out"
        assert {step: line["skipped_steps"] for step, line in logged(out).items()} == {
            1: 1,
            3: 2,
            5: 3,
        }
        said = re.findall(
            r"Skipped step (\d) .*the gradient of (\S+) on rank (\d) ",
            (out / "train.log").read_text(),
        )
        assert [(step, rank) for step, _, rank in said] == [("1", "1"), ("3", "1"), ("4", "1")]
        assert all("weight" in parameter for _, parameter, _ in said)


def stopped(folder: str) -> list[str]:
    """What ends a run that skips step 4, is saved, goes on, and skips step 5."""
    errors = []
    for until in ("4", "6"):
        words = f"--guards.max_skipped 1 --checkpoint.interval 2 --training.max_norm 0 --training.steps {until}".split()
        fault = Fault({4: math.nan, 5: math.nan})
        with small_trainer(folder, fault, *words, "--lr_scheduler.decay_ratio", "0") as trainer:
            try:
                trainer.train()
            except GuardError as error:
                errors.append(str(error))
    return errors


def spiking(folder: str) -> dict[str, dict[int, bool]]:
    """Policy -> step -> whether it has changed nothing.

    Each run resumes before its spike, with another length of history and, with the first policy,
    from a checkpoint with the hook names of an earlier version.
    """
    found = {}
    for policy, saved_name, length in (("warn", "SpikeGuard", 9), ("skip", "spike_guard", 4)):
        words = ["--guards.on_spike", policy, "--lr_scheduler.decay_ratio", "0"]
        with patch.object(SpikeGuard, "name", saved_name):
            first = [*words, "--guards.spike_history", "5", "--training.steps", "6"]
            with small_trainer(f"{folder}/{policy}", Hook(), *first) as trainer:
                trainer.train()
        fault = Fault({7: 1e6})
        second = [*words, "--guards.spike_history", str(length), "--training.steps", "8"]
        with small_trainer(f"{folder}/{policy}", fault, *second) as trainer:
            trainer.train()
        found[policy] = fault.unchanged
    return found


def test_a_spike_is_named_or_skipped_by_a_history_that_a_resume_continues(tmp_path):
    ranks = run_ranks(2, spiking, str(tmp_path))
    assert ranks == [{"warn": {7: False, 8: False}, "skip": {7: True, 8: False}}] * 2

    for policy in ranks[0]:
        lines = logged(tmp_path / policy / "out")
        assert [(line["spikes"], line["skipped_steps"]) for line in lines.values()][-1] == (
            1,
            int(policy == "skip"),
        )
        log = (tmp_path / policy / "out" / "train.log").read_text()
        assert re.findall(r"Step (\d) is a spike: gradient norm", log) == ["7"]


class Saved(Fault):
    """Keeps all numbers of weights and optimizer that each checkpoint holds."""

    def __init__(self, faults: dict[int, float]) -> None:
        super().__init__(faults)
        self.states = dict[int, Tensor]()

    def saved(self, step: int) -> None:
        self.states[step] = torch.cat([each.flatten() for each in self._state().values()])


def rolled_back(folder: str) -> tuple[list[list[int]], list[bool], str]:
    """What a spike of step 7 leaves, that the line of step 9 tells; and what ends a run with another one."""
    words = f"--guards.on_spike roll_back --guards.spike_history 3 --guards.max_roll_backs 1 {LAYOUTS['fp8']}"
    options = f"{words} --lr_scheduler.decay_ratio 0 --metrics.log_freq 3".split()
    states = []
    for start, until in (("whole", "12"), ("parts", "9"), ("parts", "12")):
        saved = Saved({7: 1e6})
        with small_trainer(
            f"{folder}/{start}", saved, *options, "--training.steps", until
        ) as trainer:
            trainer.train()
        states.append(saved.states)
    # The checkpoint to go back to has no averages.
    for until, decay in (("6", "0"), ("9", "0.5")):
        more = "--ema.decay", decay, "--training.steps", until
        with small_trainer(f"{folder}/late", Fault({7: 1e6}), *options, *more) as trainer:
            trainer.train()
    with pytest.raises(GuardError) as caught:
        small_trainer(f"{folder}/2", Fault({7: 1e6, 11: 1e6}), *options).train()
    (whole, parts, resumed), equal = states, torch.equal
    same = [equal(whole[5], whole[9]), equal(whole[9], parts[9]), equal(whole[12], resumed[12])]
    return (
        [sorted(of_run) for of_run in states],
        [*same, not equal(whole[5], whole[10])],
        str(caught.value),
    )


def test_a_spike_takes_the_weights_back_and_the_data_between_is_passed_over(tmp_path):
    ranks = run_ranks(2, rolled_back, str(tmp_path))
    assert [each[:2] for each in ranks] == [([[5, 9, 10, 12], [5, 9], [10, 12]], [True] * 4)] * 2
    assert all(each[2].startswith("Step 12:") for each in ranks)
    assert sorted(path.name[-2:] for path in (tmp_path / "2/out/checkpoint").iterdir()) == [
        "05",
        "09",
        "10",
    ]

    whole, parts = (logged(tmp_path / start / "out")[12] for start in ("whole", "parts"))
    numbers = ("loss", "grad_norm", "tokens", "roll_backs", "spikes")

    assert [whole[key] for key in numbers] == [parts[key] for key in numbers]
    assert [whole[key] for key in numbers[2:]] == [12 * 4 * 64, 1, 1]

    late = [
        load_checkpoint(tmp_path / "late/out/checkpoint/step-00000007", ema=ema)
        for ema in (True, False)
    ]

    assert all(map(torch.equal, *(each.model.state_dict().values() for each in late)))


class Remember(Hook):
    """Keeps all numbers of weights, optimizer and hooks at the start and in each checkpoint."""

    def __init__(self) -> None:
        self.states = dict[str | int, dict[str, Tensor]]()

    def built(self, trainer: Trainer) -> None:
        self._live = LiveState(
            trainer.model, trainer.optimizer, hook_tensors=partial(hook_tensors, trainer.hooks)
        )

    def _remember(self, key: str | int) -> None:
        parts: dict[str, list[Tensor]] = {"model": [], "optimizer": [torch.zeros(1)], "hooks": []}
        for name, tensor in self._live.tensors().items():
            parts[name.partition(".")[0]].append(local(tensor).flatten().double())
        self.states[key] = {part: torch.cat(tensors) for part, tensors in parts.items()}

    def started(self, step: int) -> None:
        self._remember("start")

    def saved(self, step: int) -> None:
        self._remember(step)


def excluding(folder: str) -> None:
    """Start without the saved optimizer state, go back to that checkpoint, and start without hook state."""
    for layout in ("fsdp", "muon", "8 bits"):
        words = f"--ema.decay 0.5 --guards.on_spike roll_back --guards.spike_history 3 {LAYOUTS[layout]}".split()
        words += ["--lr_scheduler.decay_ratio", "0", "--training.steps"]
        out, exclude = f"{folder}/{layout}", "--checkpoint.exclude_from_loading"
        with small_trainer(out, first := Remember(), *words, "4") as trainer:
            trainer.train()
        with small_trainer(
            out, [Fault({5: 1e6}), second := Remember()], *words, "5", exclude, "optimizer"
        ) as trainer:
            trainer.train()
        with small_trainer(out, third := Remember(), *words, "5", exclude, "hooks"):
            pass

        saved = first.states[4]
        assert saved["optimizer"].any()
        for state in (second.states["start"], second.states[5]):
            assert torch.equal(state["model"], saved["model"])
            assert not state["optimizer"].any()
            assert torch.equal(state["hooks"], saved["hooks"])
        assert torch.equal(third.states["start"]["model"], saved["model"])
        assert third.states["start"]["hooks"].isnan().any()


def test_exclude_from_loading_drops_only_what_it_names_also_when_a_run_goes_back(
    tmp_path,
):
    run_ranks(2, excluding, str(tmp_path))
    log = (tmp_path / "fsdp" / "out" / "train.log").read_text()

    assert re.findall("Not loaded from (.*) \\(", log) == [
        *["step-00000004: optimizer"] * 2,
        "step-00000005: hooks",
    ]


class Counter(Hook):
    """Counts steps from 100, in a tensor that is never NaN."""

    name = "counter"

    def built(self, trainer: Trainer) -> None:
        self._count = torch.full((2,), 100.0)
        self.counts: list[list[float]] = []

    def started(self, step: int) -> None:
        self.counts.append(self._count.tolist())

    def saved(self, step: int) -> None:
        self.counts.append(self._count.tolist())

    def updated(self, step: int) -> None:
        self._count += 1

    def tensors(self) -> dict[str, Tensor]:
        return {"count": self._count}


def excluding_hooks(folder: str) -> list[list[float]]:
    """Return the counts at the start, after a rollback in step 9, and after step 10."""
    options = "--guards.on_spike roll_back --guards.spike_history 3 --checkpoint.interval 99"
    words = [*options.split(), "--lr_scheduler.decay_ratio", "0", "--training.steps"]
    with small_trainer(folder, Counter(), *words, "4") as trainer:
        trainer.train()
    counter = Counter()
    exclude = ("--checkpoint.exclude_from_loading", "hooks")
    with small_trainer(folder, [counter, Fault({9: 1e6})], *words, "10", *exclude) as trainer:
        trainer.train()
    return counter.counts


def test_a_rollback_without_saved_hook_state_restores_its_initial_values(tmp_path):
    assert (
        run_ranks(2, excluding_hooks, str(tmp_path))
        == [[[100.0] * 2, [100.0] * 2, [101.0] * 2]] * 2
    )


class FlippedBit(Hook):
    """In the last norm of rank 3, after step 3."""

    def built(self, trainer: Trainer) -> None:
        self._weight = trainer.model.get_parameter("layers.1.ffn_norm.weight")

    @torch.no_grad()
    def after_step(self, step: int, result: StepResult) -> None:
        if step == 3 and dist.get_rank() == 3:
            local(self._weight).view(torch.int32)[0] ^= 1


def corrupted(folder: str) -> list[str]:
    errors = []
    for name in (
        "parallelism.data_parallel_replicate_degree 4",
        "parallelism.tensor_parallel_degree 2",
    ):
        words = f"--{name} --model.n_kv_heads 2 --guards.compare_every 2 --checkpoint.interval 2 --training.steps 6"
        words += " --training.local_batch_size 1"
        trainer = small_trainer(f"{folder}/{name[-1]}", FlippedBit(), *words.split())
        with pytest.raises(GuardError) as caught, trainer:
            trainer.train()
        errors.append(str(caught.value))
    return errors


def test_a_flipped_bit_ends_the_run_unsaved_and_the_rank_is_named(tmp_path):
    ranks = run_ranks(4, corrupted, str(tmp_path))
    assert ranks == [ranks[0]] * 4

    hybrid, tensor = ranks[0]
    assert re.search(r"ffn_norm.* differs on rank 3 \(", hybrid)
    # Nobody knows which of two is right.
    assert re.search(r"ffn_norm.* differs on rank 2 \(.*, rank 3 \(", tensor)
    assert all(error.startswith("Step 4:") for error in ranks[0])
    assert [path.name for path in tmp_path.glob("*/out/checkpoint/step-*")] == ["step-00000002"] * 2


def test_too_many_skipped_steps_in_a_row_end_the_run_also_across_a_resume(tmp_path):
    [said], second = run_ranks(2, stopped, str(tmp_path))

    assert [said] == second
    assert "2 consecutive steps" in said
    assert "lower optimizer.lr, set training.max_norm, or raise" in said
    assert {path.name for path in (tmp_path / "out/checkpoint").iterdir()} == {
        "step-00000002",
        "step-00000004",
    }


@pytest.mark.parametrize(
    "lr",
    [2e-3, 1e30],
    # With the second, the weights after step 1 give no number.
)
def test_a_replayed_step_has_the_bits_of_the_logged_one_also_if_it_was_skipped(tmp_path, lr: float):
    out = tmp_path / "out"
    words = f"--training.steps 4 --checkpoint.interval 2 --optimizer.lr {lr} --training.max_norm 0".split()
    words += ["--optimizer.name", "SGD"]
    start_small(out, *words, ranks=2).ends_with(0)
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}

    assert logged(out)[4]["skipped_steps"] == (0 if lr < 1 else 3)

    for step in (1, 4):
        said = titanlite("replay", out, "--step", step, "--json", ranks=2)
        found = json.loads(said.splitlines()[-1])
        assert found["now"] == found["logged"]
        assert found["now"]["loss"] == logged(out)[step]["loss"] or found["now"]["loss"] == "nan"
        assert "changed since" not in said
        assert (f"Skipped step {step} " in said) == (step == 4 and lr > 1)

    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == files


class Slow(Hook):
    """Rank 1 waits 1,000 seconds for each batch, by its clock, and computes each product of the guard 30 times."""

    def built(self, trainer: Trainer) -> None:
        self._meter = trainer.meter

    def before_step(self, step: int) -> None:
        clock = itertools.count(0.0, 1000.0 * dist.get_rank()).__next__
        with patch("titanlite.observe.meter.time.perf_counter", clock), self._meter.timing("data"):
            pass


def wait_for_slow_rank(folder: str) -> None:
    def product(a: Tensor, b: Tensor, mm: Callable[..., Tensor] = torch.mm, **how: Tensor) -> None:
        for _ in range(1 + 29 * dist.get_rank()):
            mm(a, b, **how)

    with (
        patch("torch.mm", product),
        small_trainer(folder, Slow(), "--metrics.log_freq", "3") as trainer,
    ):
        trainer.train()


def test_a_slow_rank_is_named_once_and_by_a_collective_that_is_read_a_line_later(
    tmp_path,
):
    run_ranks(2, wait_for_slow_rank, str(tmp_path))
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").open()]
    for words in (r"data 1e\+03 s a step", r"product"):
        (found,) = [event for event in events if re.match(rf"Rank 1 \(.*{words}", event["text"])]
        # Lines of the steps 1, 3 and 6.
        assert (found["event"], found["step"]) == ("straggler", 9)
