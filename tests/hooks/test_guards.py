"""Guards skip steps, roll back or stop the run, alike on all ranks and after a resume."""

import itertools
import math
import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_small, small_trainer, titanlite, train_small
from small_runs import list_saved_steps, read_events, read_log, read_metrics, read_printed_json
from torch import Tensor

from titanlite import Trainer, load_checkpoint
from titanlite.checkpoint.live_state import LiveState, to_local
from titanlite.config.errors import GuardError
from titanlite.hooks.guards import SpikeGuard
from titanlite.hooks.hook import Hook
from titanlite.hooks.hook_state import hook_tensors
from titanlite.train.step import StepResult

pytestmark = pytest.mark.slow
NO_DECAY = "--lr_scheduler.decay_ratio 0"  # learning rates do not depend on the last step
ROLL_BACK = f"{NO_DECAY} --guards.on_spike roll_back --guards.spike_history 3"
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
    """Writes values into one gradient element of rank 1, and records the state of the run.

    Attributes:
        unchanged: Whether weights and optimizer state are bitwise unchanged by each step.
        saved_numbers: All numbers of weights and optimizer at each save.
    """

    def __init__(self, faults: dict[int, float]) -> None:
        self._faults = faults
        self.unchanged = dict[int, bool]()
        self.saved_numbers = dict[int, Tensor]()

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

    def saved(self, step: int) -> None:
        numbers = [value.flatten() for value in self._state().values()]
        self.saved_numbers[step] = torch.cat(numbers)


def train_with_bad_gradients(folder: Path, layouts: list[str]) -> None:
    for name in layouts:
        fault = Fault({1: math.nan, 3: math.inf, 4: -math.inf})
        options = f"{LAYOUTS[name]} --training.steps 5 --metrics.log_freq 3"
        train_small(folder / name, fault, options)
        assert fault.unchanged == {1: True, 2: False, 3: True, 4: True, 5: False}, name


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["fsdp", "hsdp", "tp", "bfloat16"], id="sample"),
        pytest.param(list(LAYOUTS), id="all", marks=pytest.mark.long),
    ],
)
def test_a_step_with_a_non_finite_gradient_changes_nothing_on_any_layout(tmp_path, layouts):
    run_ranks(2, train_with_bad_gradients, tmp_path, layouts)

    for name in layouts:
        out = tmp_path / name / "out"
        skipped = {step: line["skipped_steps"] for step, line in read_metrics(out).items()}
        assert skipped == {1: 1, 3: 2, 5: 3}

        message = r"Skipped step (\d) .*the gradient of (\S+) on rank (\d) "
        reports = re.findall(message, read_log(out))
        steps_and_ranks = [(step, rank) for step, _, rank in reports]
        assert steps_and_ranks == [("1", "1"), ("3", "1"), ("4", "1")]
        assert all("weight" in parameter for _, parameter, _ in reports)


class Freeze(Hook):
    """Freezes the first parameter."""

    def built(self, trainer: Trainer) -> None:
        next(trainer.model.parameters()).requires_grad_(False)


def train_with_frozen_parameter(folder: Path) -> str:
    """Skip a step because of the first gradient, and return the name of its parameter."""
    hooks: list[Hook] = [Freeze(), Fault({2: math.nan})]
    trainer = train_small(folder, hooks, "--training.steps 2")
    return list(dict(trainer.model.named_parameters()))[1]


def test_a_skipped_step_names_the_right_parameter_if_a_hook_has_frozen_others(tmp_path):
    name, _ = run_ranks(2, train_with_frozen_parameter, tmp_path)

    log = read_log(tmp_path / "out")
    assert re.findall(r"the gradient of (\S+) on rank 1 ", log) == [name]


def resume_before_spike(folder: Path, policy: str, saved_name: str, length: int) -> None:
    """Save a run with a history of 5 steps, and resume it with another length before a spike."""
    options = f"--guards.on_spike {policy} {NO_DECAY} --guards.spike_history"
    with patch.object(SpikeGuard, "name", saved_name):
        train_small(folder, Hook(), options, "5 --training.steps 6")
    fault = Fault({7: 1e6})
    train_small(folder, fault, options, length, "--training.steps 8")
    assert fault.unchanged == {7: policy == "skip", 8: False}


@pytest.mark.parametrize(
    ("policy", "saved_name", "length"),
    [
        # The first checkpoint has the hook name of an earlier version.
        ("warn", "SpikeGuard", 9),
        ("skip", "spike_guard", 4),
    ],
)
def test_a_spike_after_a_resume_is_detected_with_the_history_of_the_first_start(
    tmp_path, policy, saved_name, length
):
    run_ranks(2, resume_before_spike, tmp_path, policy, saved_name, length)

    last = read_metrics(tmp_path / "out")[8]
    assert (last["spikes"], last["skipped_steps"]) == (1, int(policy == "skip"))
    log = read_log(tmp_path / "out")
    assert re.findall(r"Step (\d) is a spike: gradient norm", log) == ["7"]


def train_with_rollbacks(folder: Path) -> None:
    """Train several runs with a spike in step 7."""
    options = f"{ROLL_BACK} --guards.max_roll_backs 1 {LAYOUTS['fp8']} --metrics.log_freq 3"

    def train_until(step: int, name: str) -> dict[int, Tensor]:
        fault = Fault({7: 1e6})
        train_small(folder / name, fault, options, "--training.steps", step)
        return fault.saved_numbers

    whole = train_until(12, "whole")
    parts = train_until(9, "parts")
    resumed = train_until(12, "parts")
    saved_steps = [list(states) for states in (whole, parts, resumed)]
    assert saved_steps == [[5, 9, 10, 12], [5, 9], [10, 12]]
    assert torch.equal(whole[5], whole[9])
    assert torch.equal(whole[9], parts[9])
    assert torch.equal(whole[12], resumed[12])
    assert not torch.equal(whole[5], whole[10])

    # The checkpoint of the rollback has no averages.
    train_small(folder / "late", Fault({7: 1e6}), options, "--ema.decay 0 --training.steps 6")
    train_small(folder / "late", Fault({7: 1e6}), options, "--ema.decay 0.5 --training.steps 9")

    with pytest.raises(GuardError, match=r"^Step 12:"):
        train_small(folder / "2", Fault({7: 1e6, 11: 1e6}), options)

    # A resumed run may lower the limit below the number of earlier rollbacks.
    lowered = "--guards.max_roll_backs 0 --training.steps 16"
    with pytest.raises(GuardError):
        train_small(folder / "parts", Fault({14: 1e6}), options, lowered)


def test_a_rollback_restores_the_weights_and_skips_the_data_up_to_the_spike(tmp_path):
    run_ranks(2, train_with_rollbacks, tmp_path)

    assert list_saved_steps(tmp_path / "2/out") == [5, 9, 10]
    whole = read_metrics(tmp_path / "whole/out")[12]
    parts = read_metrics(tmp_path / "parts/out")[12]
    for key in ("loss", "grad_norm", "tokens", "roll_backs", "spikes"):
        assert whole[key] == parts[key]
    assert whole["tokens"] == 12 * 4 * 64
    assert (whole["roll_backs"], whole["spikes"]) == (1, 1)
    log = read_log(tmp_path / "whole/out")
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


def train_with_excluded_state(folder: Path, layout: str) -> None:
    """Start without the saved optimizer state, roll back, and start without hook state."""
    options = f"--ema.decay 0.5 {ROLL_BACK} {LAYOUTS[layout]} --training.steps"
    exclude = "--checkpoint.exclude_from_loading"

    first = RecordStates()
    train_small(folder, first, options, 4)
    second = RecordStates()
    train_small(folder, [Fault({5: 1e6}), second], options, 5, exclude, "optimizer")
    third = RecordStates()
    small_trainer(folder, third, options, 5, exclude, "hooks").close()

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
    run_ranks(2, train_with_excluded_state, tmp_path, layout)

    assert re.findall("Not loaded from (.*) \\(", read_log(tmp_path / "out")) == [
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


def count_with_excluded_hooks(folder: Path) -> None:
    options = f"{ROLL_BACK} --checkpoint.interval 99 --training.steps"
    train_small(folder, Counter(), options, 4)

    counter = Counter()
    exclude = "--checkpoint.exclude_from_loading hooks"
    train_small(folder, [counter, Fault({9: 1e6})], options, 10, exclude)
    # At the start, after the rollback in step 9, and after step 10.
    assert counter.counts == [[100.0] * 2, [100.0] * 2, [101.0] * 2]


def test_a_rollback_without_saved_hook_state_restores_its_initial_values(tmp_path):
    run_ranks(2, count_with_excluded_hooks, tmp_path)


class FlippedBit(Hook):
    """Flips a bit in the last norm of rank 3 after step 3."""

    def built(self, trainer: Trainer) -> None:
        self._weight = trainer.model.get_parameter("layers.1.ffn_norm.weight")

    @torch.no_grad()
    def after_step(self, step: int, result: StepResult) -> None:
        if step == 3 and dist.get_rank() == 3:
            to_local(self._weight).view(torch.int32)[0] ^= 1


def train_until_guard_error(folder: Path, hook: Hook, options: str) -> str:
    """Return the error of a run that saves every second step."""
    with pytest.raises(GuardError) as caught:
        train_small(folder, hook, options, "--checkpoint.interval 2 --training.steps 6")
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "ranks_in_error"),
    [
        ("data_parallel_replicate_degree 4", r"rank 3 \("),
        # Two replicas have no majority, so both ranks are named.
        ("tensor_parallel_degree 2", r"rank 2 \(.*, rank 3 \("),
    ],
)
def test_a_flipped_bit_stops_the_run_without_a_save_and_the_error_names_the_rank(
    tmp_path, layout, ranks_in_error
):
    options = "--model.n_kv_heads 2 --guards.compare_every 2 --training.local_batch_size 1"
    options += f" --parallelism.{layout}"

    errors = run_ranks(4, train_until_guard_error, tmp_path, FlippedBit(), options)

    assert len(set(errors)) == 1
    assert re.match(rf"Step 4:.*ffn_norm.* differs on {ranks_in_error}", errors[0])
    assert list_saved_steps(tmp_path / "out") == [2]


class BrokenWeight(Hook):
    """Sets a weight of rank 1 to NaN in step 3."""

    def built(self, trainer: Trainer) -> None:
        self._weight = trainer.model.get_parameter("layers.1.ffn_norm.weight")

    @torch.no_grad()
    def updated(self, step: int) -> None:
        if step == 3 and dist.get_rank() == 1:
            to_local(self._weight)[0] = math.nan


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    options = "--parallelism.fsdp_min_num_params 0"

    run_ranks(2, train_until_guard_error, tmp_path, BrokenWeight(), options)

    assert list_saved_steps(tmp_path / "out") == [2]


def skip_steps_across_a_resume(folder: Path) -> str:
    """Skip step 4, resume, skip step 5, and return the error."""
    options = f"--guards.max_skipped 1 --training.max_norm 0 {NO_DECAY}"
    first = f"{options} --checkpoint.interval 2 --training.steps 4"
    train_small(folder, Fault({4: math.nan}), first)
    return train_until_guard_error(folder, Fault({5: math.nan}), options)


def test_too_many_consecutive_skipped_steps_stop_the_run_also_across_a_resume(tmp_path):
    errors = run_ranks(2, skip_steps_across_a_resume, tmp_path)

    assert len(set(errors)) == 1
    assert "2 consecutive steps" in errors[0]
    assert "lower optimizer.lr, set training.max_norm, or raise" in errors[0]
    assert list_saved_steps(tmp_path / "out") == [2, 4]


# With the higher learning rate, the weights after step 1 make every gradient non-finite.
@pytest.mark.parametrize("lr", [2e-3, 1e30])
def test_a_replayed_step_is_bitwise_equal_to_the_logged_one_also_if_skipped(tmp_path, lr):
    def list_modification_times() -> dict[Path, int]:
        files = [path for path in out.rglob("*") if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in files}

    out = tmp_path / "out"
    options = "--training.steps 4 --checkpoint.interval 2 --training.max_norm 0"
    optimizer = f"--optimizer.name SGD --optimizer.lr {lr}"
    run_small(out, options, optimizer, ranks=2)
    before = list_modification_times()
    logged = read_metrics(out)
    assert logged[4]["skipped_steps"] == (0 if lr < 1 else 3)

    for step in (1, 4):
        output = titanlite("replay", out, "--step", step, "--json", ranks=2)
        result = read_printed_json(output)
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


def train_with_slow_rank(folder: Path) -> None:
    matmul = torch.mm

    def slow_matmul(a: Tensor, b: Tensor, **options: Tensor) -> None:
        """Compute a product once on rank 0, and 30 times on rank 1."""
        for _ in range(1 + 29 * dist.get_rank()):
            matmul(a, b, **options)

    with patch("torch.mm", slow_matmul):
        train_small(folder, SlowRank(), "--metrics.log_freq 3")


def test_a_slow_rank_is_reported_once_for_its_data_and_once_for_its_matmuls(tmp_path):
    run_ranks(2, train_with_slow_rank, tmp_path)

    events = read_events(tmp_path / "out", "straggler")
    for cause in (r"data 1e\+03 s a step", r"product"):
        (event,) = [event for event in events if re.match(rf"Rank 1 \(.*{cause}", event["text"])]
        # The timings of steps 1, 3 and 6 are compared, and their results read at step 9.
        assert event["step"] == 9
