"""Guards skip steps, roll back or stop the run, alike on all ranks and after a resume."""

import itertools
import json
import math
import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, small_trainer, start_small, titanlite
from small_runs import read_jsonl, read_metrics
from torch import Tensor

from titanlite import Trainer, load_checkpoint
from titanlite.checkpoint.live_state import LiveState, to_local
from titanlite.config.errors import GuardError
from titanlite.hooks.guards import SpikeGuard
from titanlite.hooks.hook import Hook
from titanlite.hooks.hook_state import hook_tensors
from titanlite.train.step import StepResult

pytestmark = pytest.mark.slow
FLOAT8 = (
    "--float8.enable --float8.emulate --float8.min-features 0 "
    "--float8.enable-fsdp-float8-all-gather"
)
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
    """Writes values into one gradient element of rank 1, and records which steps change nothing.

    Attributes:
        unchanged: Whether weights and optimizer state are bitwise unchanged by each step.
    """

    def __init__(self, faults: dict[int, float]) -> None:
        self._faults = faults
        self.unchanged = dict[int, bool]()

    def built(self, trainer: Trainer) -> None:
        self._live = LiveState(trainer.model, trainer.optimizer)
        self._model = trainer.model

    def _state(self) -> dict[str, Tensor]:
        tensors = self._live.tensors()
        return {name: to_local(tensor).clone() for name, tensor in tensors.items()}

    def before_step(self, step: int) -> None:
        self._before = self._state()

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        if step in self._faults and dist.get_rank() == 1:
            gradient = list(self._model.parameters())[1].grad
            assert gradient is not None
            to_local(gradient).view(-1)[0] = self._faults[step]

    def after_step(self, step: int, result: StepResult) -> None:
        is_unchanged = True
        for name, value in self._state().items():
            # The optimizer creates its state, zeros, in the first step.
            old = self._before.get(name, torch.zeros_like(value))
            is_unchanged &= torch.equal(old, value)
        self.unchanged[step] = is_unchanged


def train_with_bad_gradients(
    folder: str,
    layouts: list[str],
) -> dict[str, dict[int, bool]]:
    """Return which steps changed nothing, by layout."""
    unchanged = {}
    for name in layouts:
        fault = Fault({1: math.nan, 3: math.inf, 4: -math.inf})
        options = f"{LAYOUTS[name]} --training.steps 5 --metrics.log_freq 3"
        with small_trainer(f"{folder}/{name}", fault, *options.split()) as trainer:
            trainer.train()
        unchanged[name] = fault.unchanged
    return unchanged


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["fsdp", "hsdp", "tp", "bfloat16"], id="sample"),
        pytest.param(list(LAYOUTS), id="all", marks=pytest.mark.long),
    ],
)
def test_a_step_with_a_non_finite_gradient_changes_nothing_on_any_layout(tmp_path, layouts):
    ranks = run_ranks(2, train_with_bad_gradients, str(tmp_path), layouts)

    unchanged = {1: True, 2: False, 3: True, 4: True, 5: False}
    assert ranks == [dict.fromkeys(layouts, unchanged)] * 2

    for name in layouts:
        out = tmp_path / name / "out"
        skipped = {step: line["skipped_steps"] for step, line in read_metrics(out).items()}
        assert skipped == {1: 1, 3: 2, 5: 3}

        message = r"Skipped step (\d) .*the gradient of (\S+) on rank (\d) "
        reports = re.findall(message, (out / "train.log").read_text())
        steps_and_ranks = [(step, rank) for step, _, rank in reports]
        assert steps_and_ranks == [("1", "1"), ("3", "1"), ("4", "1")]
        assert all("weight" in parameter for _, parameter, _ in reports)


class Freeze(Hook):
    """Freezes the first parameter."""

    def built(self, trainer: Trainer) -> None:
        next(trainer.model.parameters()).requires_grad_(False)


def train_with_frozen_parameter(folder: str) -> str:
    """Skip a step because of the first gradient, and return the name of its parameter."""
    hooks: list[Hook] = [Freeze(), Fault({2: math.nan})]
    with small_trainer(folder, hooks, "--training.steps", "2") as trainer:
        trainer.train()
    return list(dict(trainer.model.named_parameters()))[1]


def test_a_skipped_step_names_the_right_parameter_if_a_hook_has_frozen_others(tmp_path):
    name, _ = run_ranks(2, train_with_frozen_parameter, str(tmp_path))

    log = (tmp_path / "out/train.log").read_text()
    assert re.findall(r"the gradient of (\S+) on rank 1 ", log) == [name]


def train_until_guard_error(folder: str) -> list[str]:
    """Skip step 4, resume, skip step 5, and return the messages of all guard errors."""
    options = "--guards.max_skipped 1 --checkpoint.interval 2 --training.max_norm 0".split()
    options += ["--lr_scheduler.decay_ratio", "0", "--training.steps"]
    errors = []
    for until in ("4", "6"):
        fault = Fault({4: math.nan, 5: math.nan})
        with small_trainer(folder, fault, *options, until) as trainer:
            try:
                trainer.train()
            except GuardError as error:
                errors.append(str(error))
    return errors


def train_with_spike(folder: str) -> dict[str, dict[int, bool]]:
    """Return which steps after a resume changed nothing, by policy.

    Each run resumes before its spike, with another length of history and, with the first policy,
    from a checkpoint with the hook names of an earlier version.
    """
    unchanged = {}
    cases = [("warn", "SpikeGuard", 9), ("skip", "spike_guard", 4)]
    for policy, saved_name, length in cases:
        options = ["--guards.on_spike", policy, "--lr_scheduler.decay_ratio", "0"]
        with patch.object(SpikeGuard, "name", saved_name):
            first = [*options, "--guards.spike_history", "5", "--training.steps", "6"]
            with small_trainer(f"{folder}/{policy}", Hook(), *first) as trainer:
                trainer.train()
        fault = Fault({7: 1e6})
        second = [*options, "--guards.spike_history", str(length), "--training.steps", "8"]
        with small_trainer(f"{folder}/{policy}", fault, *second) as trainer:
            trainer.train()
        unchanged[policy] = fault.unchanged
    return unchanged


def test_a_spike_after_a_resume_is_detected_with_the_history_of_the_first_start(tmp_path):
    ranks = run_ranks(2, train_with_spike, str(tmp_path))

    unchanged = {
        "warn": {7: False, 8: False},
        "skip": {7: True, 8: False},
    }
    assert ranks == [unchanged] * 2

    for policy in ranks[0]:
        out = tmp_path / policy / "out"
        last = list(read_metrics(out).values())[-1]
        assert (last["spikes"], last["skipped_steps"]) == (1, int(policy == "skip"))

        log = (out / "train.log").read_text()
        assert re.findall(r"Step (\d) is a spike: gradient norm", log) == ["7"]


class RecordSaves(Fault):
    """Records all numbers of weights and optimizer at each save."""

    def __init__(self, faults: dict[int, float]) -> None:
        super().__init__(faults)
        self.states = dict[int, Tensor]()

    def saved(self, step: int) -> None:
        numbers = [value.flatten() for value in self._state().values()]
        self.states[step] = torch.cat(numbers)


def train_with_rollbacks(folder: str) -> tuple[list[list[int]], list[bool], str]:
    """Train several runs with a spike in step 7.

    Returns:
        The saved steps of each start, comparisons between saved states, and the error of a run
        with a second spike.
    """
    common = (
        "--guards.on_spike roll_back --guards.spike_history 3 --guards.max_roll_backs 1 "
        f"{LAYOUTS['fp8']} --lr_scheduler.decay_ratio 0 --metrics.log_freq 3"
    )
    options = common.split()
    states = []
    starts = [("whole", "12"), ("parts", "9"), ("parts", "12")]
    for start, until in starts:
        saves = RecordSaves({7: 1e6})
        steps = ("--training.steps", until)
        with small_trainer(f"{folder}/{start}", saves, *options, *steps) as trainer:
            trainer.train()
        states.append(saves.states)

    # The checkpoint of the rollback has no averages.
    for until, decay in (("6", "0"), ("9", "0.5")):
        average = ("--ema.decay", decay, "--training.steps", until)
        with small_trainer(f"{folder}/late", Fault({7: 1e6}), *options, *average) as trainer:
            trainer.train()

    with pytest.raises(GuardError) as caught:
        small_trainer(f"{folder}/2", Fault({7: 1e6, 11: 1e6}), *options).train()

    # A resumed run may lower the limit below the number of earlier rollbacks.
    lowered = ("--guards.max_roll_backs", "0", "--training.steps", "16")
    with pytest.raises(GuardError):
        small_trainer(f"{folder}/parts", Fault({14: 1e6}), *options, *lowered).train()

    whole, parts, resumed = states
    comparisons = [
        torch.equal(whole[5], whole[9]),
        torch.equal(whole[9], parts[9]),
        torch.equal(whole[12], resumed[12]),
        not torch.equal(whole[5], whole[10]),
    ]
    return [sorted(saved) for saved in states], comparisons, str(caught.value)


def test_a_rollback_restores_the_weights_and_skips_the_data_up_to_the_spike(tmp_path):
    ranks = run_ranks(2, train_with_rollbacks, str(tmp_path))

    for saved_steps, comparisons, error in ranks:
        assert saved_steps == [[5, 9, 10, 12], [5, 9], [10, 12]]
        assert comparisons == [True] * 4
        assert error.startswith("Step 12:")
    checkpoints = (tmp_path / "2/out/checkpoint").iterdir()
    kept = sorted(path.name[-2:] for path in checkpoints)
    assert kept == ["05", "09", "10"]

    whole = read_metrics(tmp_path / "whole/out")[12]
    parts = read_metrics(tmp_path / "parts/out")[12]
    for key in ("loss", "grad_norm", "tokens", "roll_backs", "spikes"):
        assert whole[key] == parts[key]
    assert whole["tokens"] == 12 * 4 * 64
    assert (whole["roll_backs"], whole["spikes"]) == (1, 1)
    log = (tmp_path / "whole/out/train.log").read_text()
    assert "rolled back to the weights of step 5" in log
    assert "Resumed" not in log

    # The averages start from the weights of the rollback.
    checkpoint = tmp_path / "late/out/checkpoint/step-00000007"
    averages = load_checkpoint(checkpoint, ema=True).model.state_dict()
    weights = load_checkpoint(checkpoint, ema=False).model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(averages[name], weight)


class RecordStates(Hook):
    """Records all numbers of weights, optimizer and hooks at the start and at each save."""

    def __init__(self) -> None:
        self.states = dict[str | int, dict[str, Tensor]]()

    def built(self, trainer: Trainer) -> None:
        self._live = LiveState(
            trainer.model, trainer.optimizer, hook_tensors=partial(hook_tensors, trainer.hooks)
        )

    def _record(self, key: str | int) -> None:
        parts: dict[str, list[Tensor]] = {
            "model": [],
            "optimizer": [torch.zeros(1)],
            "hooks": [],
        }
        for name, tensor in self._live.tensors().items():
            part = name.partition(".")[0]
            parts[part].append(to_local(tensor).flatten().double())
        self.states[key] = {part: torch.cat(tensors) for part, tensors in parts.items()}

    def started(self, step: int) -> None:
        self._record("start")

    def saved(self, step: int) -> None:
        self._record(step)


def train_with_excluded_state(folder: str, layout: str) -> None:
    """Start without the saved optimizer state, roll back, and start without hook state."""
    common = (
        f"--ema.decay 0.5 --guards.on_spike roll_back --guards.spike_history 3 {LAYOUTS[layout]}"
    )
    options = [*common.split(), "--lr_scheduler.decay_ratio", "0", "--training.steps"]
    exclude = "--checkpoint.exclude_from_loading"

    first = RecordStates()
    with small_trainer(folder, first, *options, "4") as trainer:
        trainer.train()
    second = RecordStates()
    hooks: list[Hook] = [Fault({5: 1e6}), second]
    with small_trainer(folder, hooks, *options, "5", exclude, "optimizer") as trainer:
        trainer.train()
    third = RecordStates()
    with small_trainer(folder, third, *options, "5", exclude, "hooks"):
        pass

    saved = first.states[4]
    assert saved["optimizer"].any()
    for state in (second.states["start"], second.states[5]):
        assert torch.equal(state["model"], saved["model"])
        assert not state["optimizer"].any()
        assert torch.equal(state["hooks"], saved["hooks"])
    assert torch.equal(third.states["start"]["model"], saved["model"])
    assert third.states["start"]["hooks"].isnan().any()


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp",
        pytest.param("8 bits", marks=pytest.mark.long),
        pytest.param("muon", marks=pytest.mark.long),
    ],
)
def test_exclude_from_loading_drops_only_the_named_state_also_in_a_rollback(tmp_path, layout):
    run_ranks(2, train_with_excluded_state, str(tmp_path), layout)

    log = (tmp_path / "out" / "train.log").read_text()
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


def count_with_excluded_hooks(folder: str) -> list[list[float]]:
    """Return the counts at the start, after a rollback in step 9, and after step 10."""
    common = "--guards.on_spike roll_back --guards.spike_history 3 --checkpoint.interval 99"
    options = [*common.split(), "--lr_scheduler.decay_ratio", "0", "--training.steps"]
    with small_trainer(folder, Counter(), *options, "4") as trainer:
        trainer.train()

    counter = Counter()
    hooks: list[Hook] = [counter, Fault({9: 1e6})]
    exclude = ("--checkpoint.exclude_from_loading", "hooks")
    with small_trainer(folder, hooks, *options, "10", *exclude) as trainer:
        trainer.train()
    return counter.counts


def test_a_rollback_without_saved_hook_state_restores_its_initial_values(tmp_path):
    counts = run_ranks(2, count_with_excluded_hooks, str(tmp_path))

    assert counts == [[[100.0] * 2, [100.0] * 2, [101.0] * 2]] * 2


class FlippedBit(Hook):
    """Flips a bit in the last norm of rank 3 after step 3."""

    def built(self, trainer: Trainer) -> None:
        self._weight = trainer.model.get_parameter("layers.1.ffn_norm.weight")

    @torch.no_grad()
    def after_step(self, step: int, result: StepResult) -> None:
        if step == 3 and dist.get_rank() == 3:
            to_local(self._weight).view(torch.int32)[0] ^= 1


def train_with_flipped_bit(folder: str) -> list[str]:
    """Return the errors of a run with four replicas and of a run with two."""
    common = (
        "--model.n_kv_heads 2 --guards.compare_every 2 --checkpoint.interval 2 --training.steps 6"
    )
    errors = []
    for layout in ("data_parallel_replicate_degree 4", "tensor_parallel_degree 2"):
        options = f"--parallelism.{layout} {common} --training.local_batch_size 1"
        trainer = small_trainer(f"{folder}/{layout[-1]}", FlippedBit(), *options.split())
        with pytest.raises(GuardError) as caught, trainer:
            trainer.train()
        errors.append(str(caught.value))
    return errors


def test_a_flipped_bit_stops_the_run_without_a_save_and_the_error_names_the_rank(tmp_path):
    ranks = run_ranks(4, train_with_flipped_bit, str(tmp_path))

    four_replicas, two_replicas = ranks[0]
    assert ranks == [ranks[0]] * 4
    assert re.search(r"ffn_norm.* differs on rank 3 \(", four_replicas)
    # Two replicas have no majority, so both ranks are named.
    assert re.search(r"ffn_norm.* differs on rank 2 \(.*, rank 3 \(", two_replicas)
    assert all(error.startswith("Step 4:") for error in ranks[0])
    assert [path.name for path in tmp_path.glob("*/out/checkpoint/step-*")] == ["step-00000002"] * 2


def test_too_many_consecutive_skipped_steps_stop_the_run_also_across_a_resume(tmp_path):
    ranks = run_ranks(2, train_until_guard_error, str(tmp_path))

    (error,) = ranks[0]
    assert ranks == [[error]] * 2
    assert "2 consecutive steps" in error
    assert "lower optimizer.lr, set training.max_norm, or raise" in error
    saved = {path.name for path in (tmp_path / "out/checkpoint").iterdir()}
    assert saved == {"step-00000002", "step-00000004"}


# With the higher learning rate, the weights after step 1 make every gradient non-finite.
@pytest.mark.parametrize("lr", [2e-3, 1e30])
def test_a_replayed_step_is_bitwise_equal_to_the_logged_one_also_if_skipped(tmp_path, lr: float):
    def list_modification_times() -> dict[Path, int]:
        files = [path for path in out.rglob("*") if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in files}

    out = tmp_path / "out"
    options = "--training.steps 4 --checkpoint.interval 2 --training.max_norm 0"
    optimizer = f"--optimizer.name SGD --optimizer.lr {lr}"
    start_small(out, options, optimizer, ranks=2).wait_for_exit(0)
    before = list_modification_times()
    logged = read_metrics(out)
    assert logged[4]["skipped_steps"] == (0 if lr < 1 else 3)

    for step in (1, 4):
        output = titanlite("replay", out, "--step", step, "--json", ranks=2)
        result = json.loads(output.splitlines()[-1])
        assert result["now"] == result["logged"]
        assert result["now"]["loss"] in (logged[step]["loss"], "nan")
        assert "changed since" not in output
        assert (f"Skipped step {step} " in output) == (step == 4 and lr > 1)

    assert list_modification_times() == before


class SlowRank(Hook):
    """Makes the data of rank 1 take 1,000 seconds a step by its clock."""

    def built(self, trainer: Trainer) -> None:
        self._meter = trainer.meter

    def before_step(self, step: int) -> None:
        clock = itertools.count(0.0, 1000.0 * dist.get_rank())
        with (
            patch("titanlite.observe.meter.time.perf_counter", clock.__next__),
            self._meter.timing("data"),
        ):
            pass


def train_with_slow_rank(folder: str) -> None:
    matmul = torch.mm

    def slow_matmul(a: Tensor, b: Tensor, **options: Tensor) -> None:
        """Compute a product once on rank 0, and 30 times on rank 1."""
        for _ in range(1 + 29 * dist.get_rank()):
            matmul(a, b, **options)

    options = ("--metrics.log_freq", "3")
    with (
        patch("torch.mm", slow_matmul),
        small_trainer(folder, SlowRank(), *options) as trainer,
    ):
        trainer.train()


def test_a_slow_rank_is_reported_once_for_its_data_and_once_for_its_matmuls(tmp_path):
    run_ranks(2, train_with_slow_rank, str(tmp_path))

    events = read_jsonl(tmp_path / "out" / "events.jsonl")
    for cause in (r"data 1e\+03 s a step", r"product"):
        (event,) = [event for event in events if re.match(rf"Rank 1 \(.*{cause}", event["text"])]
        # The timings of steps 1, 3 and 6 are compared, and their results read at step 9.
        assert (event["event"], event["step"]) == ("straggler", 9)
