"""Run a small job in its layout, run the reference, and compare them at every step.

Each step is compared separately. The reference starts every step from the weights and the optimizer
state that the tested run had before this step. It computes the gradient at these weights, and the
update that follows from the gradient of the tested run. The errors of several steps therefore never
add up, and the first failed comparison shows where the mistake is: data, loss, gradient, norm,
update or state. Because the initial weights are bitwise equal, all steps together prove the run.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from titanlite.checkpoint.find import load_newest
from titanlite.checkpoint.huggingface import checkpoint_weights, export_hf, hf_weights
from titanlite.checkpoint.live_state import AVERAGES, to_plain
from titanlite.config.certificate import Certificate, hash_job, read_versions
from titanlite.config.run import Run, with_keys
from titanlite.config.schema import JobConfig
from titanlite.hooks.records import describe_code
from titanlite.load_run import check_run
from titanlite.model.formats import has_hf_family
from titanlite.parallel.init_weights import keep_shard
from titanlite.prove.checks import (
    EPS32,
    FLOOR_ROUNDINGS,
    UPDATE_ROUNDINGS,
    Check,
    compare_bitwise,
    compare_gradients,
    fraction_of_different,
    loss_tolerance,
    relative_error,
    total_norm,
)
from titanlite.prove.explain import (
    coordinates,
    explain_factor,
    explain_gradient,
    explain_ratio,
)
from titanlite.prove.record import (
    NamedTensors,
    Recorder,
    ShardKey,
    Snapshot,
    StepRecord,
    StepRecords,
    find_save_step,
    has_random_numbers,
    train_and_resume,
    turn_dropout_off,
)
from titanlite.prove.reference import (
    FORMULAS,
    ReferenceStep,
    ReferenceTrainer,
    expected_update,
)
from titanlite.prove.report import describe_first_difference, summarize_checks
from titanlite.prove.shrink import SmallJob
from titanlite.runtime.logging import LOGGER_NAME
from titanlite.runtime.process import STORE
from titanlite.runtime.world import gathered, process_group
from titanlite.train.build import settle_compute_dtype
from titanlite.train.trainer import Trainer

MODEL = "model."
OPTIMIZER = "optimizer."
LOG_FILE = "prove.log"
EXPORTED_WEIGHTS = "exported weights"  # name of a check


class RecordedRun(NamedTuple):
    """The tested run, after all ranks have trained it and recorded each step in files.

    Attributes:
        run: The run, in which each option "auto" is replaced by the value that was used.
        folder: Temporary folder with the record files of all ranks.
        device_name: Name of the GPU of rank 0, such as "NVIDIA H100", or "CPU".
    """

    run: Run
    folder: Path
    device_name: str


@dataclass
class TestedStep:
    """Records of all ranks for one training step, and the unsharded tensors of this step.

    Attributes:
        ranks: Record of each rank, indexed by rank.
        gradients: Unsharded gradients before clipping, by parameter name.
        state: Unsharded weights, optimizer state and hook tensors after the step, by their names in
            a checkpoint.
    """

    ranks: list[StepRecord]
    gradients: NamedTensors
    state: NamedTensors

    @property
    def weights(self) -> NamedTensors:
        """Return the weights after the step, by parameter name."""
        return select(self.state, MODEL)

    @property
    def state_snapshots(self) -> list[Snapshot]:
        """Return the snapshot of each rank after the step, with the digests of its shards."""
        return [record.state for record in self.ranks]


TestedSteps = dict[int, TestedStep]
"""Records of all steps of a run, by step number."""


def select(tensors: NamedTensors, prefix: str) -> NamedTensors:
    """Return the tensors whose names start with `prefix`, without the prefix.

    For example, with the prefix "model.", the name "model.norm.weight" becomes "norm.weight".
    """
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def load_steps(folder: Path, name: str, num_ranks: int) -> TestedSteps:
    """Load the record files of all ranks, and combine the records of each step.

    Args:
        folder: Folder with files such as "first-0.pt".
        name: Run to load: "first", or "resumed" for the run that resumed from a checkpoint.
        num_ranks: Number of ranks that wrote a file.

    Returns:
        Combined records by step number. The lowest number is the state before the first step.
    """
    paths = [folder / f"{name}-{rank}.pt" for rank in range(num_ranks)]
    steps_of_ranks = [torch.load(path, weights_only=False) for path in paths]
    return {
        number: _combine_records([steps[number] for steps in steps_of_ranks])
        for number in steps_of_ranks[0]
    }


def _combine_records(records: list[StepRecord]) -> TestedStep:
    """Combine the records of all ranks for one step.

    Only the first rank of each pipeline stage has recorded unsharded tensors. Together, these ranks
    have recorded all tensors of the model.
    """
    gradients: NamedTensors = {}
    state: NamedTensors = {}
    for record in records:
        gradients |= record.gradients.unsharded
        state |= record.state.unsharded
    return TestedStep(records, gradients, state)


class StepRepeater(Recorder):
    """Hook that repeats and records each step of the tested run on one rank.

    Before each step, the hook copies the weights of the tested run into the model. After the
    backward pass, it records the gradients and replaces them with the gradients of the tested run.
    Both runs should therefore compute the same optimizer update.

    Args:
        tested_steps: Records of the tested run, by step number.
    """

    def __init__(self, tested_steps: TestedSteps) -> None:
        super().__init__()
        self._tested_steps = tested_steps

    def before_step(self, step: int) -> None:
        """Copy the weights that the tested run had before this step into the model."""
        super().before_step(step)
        weights = self._tested_steps[step - 1].weights
        with torch.no_grad():
            for name, parameter in self.trainer.model.named_parameters():
                keep_shard(to_plain(parameter), weights[name].to(self.trainer.device))
        self.trainer.train_step.precompute_scales()

    def gradients(self, step: int) -> None:
        """Record the gradients, then replace them with the gradients of the tested run."""
        super().gradients(step)
        gradients = self._tested_steps[step].gradients
        for name, parameter in self.trainer.model.named_parameters():
            if parameter.grad is not None and name in gradients:
                keep_shard(parameter.grad, gradients[name].to(self.trainer.device))


def make_one_rank_run(run: Run, dump_folder: Path, recompute: bool = False) -> Run:
    """Return a copy of a run that trains on one rank, without parallelism or compilation.

    Args:
        run: The tested run on several ranks.
        dump_folder: Output folder of the returned run.
        recompute: Whether to keep activation checkpointing. By default, it is disabled.
    """
    settings: dict[str, object] = {
        "parallelism.pipeline_parallel_schedule": "1F1B",
        "parallelism.enable_async_tensor_parallel": False,
        "compile.enable": False,
        "job.dump_folder": str(dump_folder),
    }
    for name, _ in run.job.parallelism:
        if name.endswith("_degree"):
            settings[f"parallelism.{name}"] = 1
    if not recompute:
        settings["activation_checkpoint.mode"] = "none"
    return check_run(with_keys(run, settings).job, world_size=1)


def prove(job: JobConfig, small_job: SmallJob, out: Path) -> Certificate | None:
    """Train a small job on several ranks, and compare every step with a reference on one rank.

    The small job is also resumed from its checkpoint. All ranks must call this together, before
    they have a process group.

    Args:
        job: The original job.
        small_job: The small version of the job, and how it differs.
        out: Existing folder for temporary files and the log, which all ranks share.

    Returns:
        The certificate on rank 0, and None on all other ranks.
    """
    log_file = (out / LOG_FILE).open("a", encoding="utf-8")
    with (
        log_file,
        redirect_stdout(log_file),
        redirect_stderr(log_file),
        _train_on_all_ranks(small_job.run, out) as recorded,
    ):
        if recorded is None:  # only rank 0 makes the comparisons
            return None
        checks = compare_with_one_rank(recorded.run, recorded.folder)
    return _make_certificate(job, small_job, recorded.run, checks, recorded.device_name)


@contextmanager
def _train_on_all_ranks(run: Run, out: Path) -> Iterator[RecordedRun | None]:
    """Train a run, resume it from its checkpoint, and record each step in temporary files.

    Yield the recorded run on rank 0, and None on all other ranks. At the end of the `with` block,
    rank 0 deletes the files. All ranks must call this together, before they have a process group.

    Args:
        run: The run to train.
        out: Existing folder for the files, which all ranks share.
    """
    with ExitStack() as cleanup:
        with process_group(run.job) as device:
            device_name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
            folder = _create_shared_folder(out, cleanup)  # `cleanup` deletes it
            resolved_run = _resolve_auto_options(run, device)
            tested_run = with_keys(resolved_run, {"job.dump_folder": str(folder / "layout")})
            train_and_resume(tested_run, device, folder)
            is_first_rank = dist.get_rank() == 0

        # The process group has ended here, because rank 0 creates another one for the comparisons.
        recorded = RecordedRun(tested_run, folder, device_name)
        yield recorded if is_first_rank else None


def _resolve_auto_options(run: Run, device: torch.device) -> Run:
    """Replace "auto" in the compute dtype and the attention backend with concrete values.

    The later run on one rank then uses the same values. All ranks must call this together.
    """
    run_with_dtype = settle_compute_dtype(run, device)
    return run_with_dtype.resolve_attention_backend(on_gpu=device.type == "cuda")


def _create_shared_folder(parent: Path, cleanup: ExitStack) -> Path:
    """Create a temporary folder on rank 0 and return its path on all ranks.

    Rank 0 deletes the folder when `cleanup` is closed, even after Ctrl-C or SIGTERM.

    Args:
        parent: Existing folder that all ranks share.
        cleanup: Exit stack that will delete the folder.
    """
    folder = ""
    if dist.get_rank() == 0:
        _exit_on_signals()  # so that a signal closes `cleanup`
        folder = tempfile.mkdtemp(prefix="run-", dir=parent)
        cleanup.callback(shutil.rmtree, folder)
        # Callbacks run in reverse order, so this stops logging to the folder before it is deleted.
        cleanup.callback(logging.getLogger(LOGGER_NAME).handlers.clear)
    return Path(gathered(folder)[0])


def _exit_on_signals() -> None:
    """Raise SystemExit on Ctrl-C and SIGTERM, instead of ending the process at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def _make_certificate(
    job: JobConfig, small_job: SmallJob, run: Run, checks: list[Check], device_name: str
) -> Certificate:
    """Create the certificate of a job, which states whether its layout computes correct results.

    Args:
        job: The original job.
        small_job: The small version of the job, and how it differs.
        run: The small run that was trained, with its compute dtype.
        checks: All comparisons with the expected results, in the order of the computation.
        device_name: Name of the GPU of rank 0, such as "NVIDIA H100", or "CPU".
    """
    precision = run.job.training.mixed_precision_param
    if run.job.float8.enable:
        precision = "float8"
    optimizer_reference = "the same optimizer on one rank"
    if run.job.optimizer.name in FORMULAS:
        optimizer_reference = "plain formulas in float64"
    return Certificate(
        proven=all(check.has_passed for check in checks),
        first_difference=describe_first_difference(checks),
        job_hash=hash_job(job),
        job=job.job.config_file or "",  # "" for a job without a file
        time=time.time(),
        layout=asdict(run.degrees),
        precision=precision,
        device=device_name,
        optimizer_reference=optimizer_reference,
        versions=read_versions(),
        commit=describe_code().get("commit", ""),
        changes=small_job.changes,
        not_kept=[*small_job.not_kept, *_list_untested(run, checks)],
        rows=summarize_checks(checks),
    )


def _list_untested(run: Run, checks: list[Check]) -> list[str]:
    """List the parts of the training that no comparison covers, one sentence each."""
    untested = []
    if has_random_numbers(run):
        untested.append("Dropout, if any: it is on only to check activation checkpointing.")
    is_exported = any(check.name == EXPORTED_WEIGHTS for check in checks)
    if not is_exported:
        untested.append("Export: transformers has no model with this architecture.")
    return untested


def compare_with_one_rank(run: Run, folder: Path) -> list[Check]:
    """Compare a run on several ranks with the same training on one rank, and return all checks.

    Each step is compared with two other computations of the same step on one rank: in float64, for
    the expected values, and in the precision of the run, which shows how large rounding errors are.
    Further checks cover resumed runs, the export and activation checkpointing.

    Args:
        run: The tested run on several ranks.
        folder: Folder with the record files of all ranks. New runs create their output folders in
            it.
    """
    tested_steps = load_steps(folder, "first", run.world_size)
    one_rank_run = make_one_rank_run(run, folder / "single")
    # The other ranks are done, so a process group of all ranks would wait for them forever.
    _restrict_process_groups_to_this_rank()
    with process_group(one_rank_run.job) as device:
        with closing(ReferenceTrainer(one_rank_run, device)) as float64_reference:
            one_rank_steps = repeat_on_one_rank(one_rank_run, device, tested_steps)
            checks = list(_compare_steps(run, tested_steps, one_rank_steps, float64_reference))
        return [
            *checks,
            *compare_resumed(run, folder, tested_steps),
            *compare_resumed_on_one_rank(run, device, tested_steps, one_rank_steps),
            *compare_export(run, folder / "exported", tested_steps),
            *compare_activation_checkpointing(run, device, folder),
        ]


def _restrict_process_groups_to_this_rank() -> None:
    """Make all further process groups contain only this process.

    Overwrite the environment variables that the launcher set for the process group of all ranks.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.pop(STORE, None)  # path of the file through which the launched ranks meet


def repeat_on_one_rank(run: Run, device: torch.device, tested_steps: TestedSteps) -> StepRecords:
    """Repeat each step of the tested run on one rank, in the same precision.

    Args:
        run: The job on one rank.
        device: Device of this rank.
        tested_steps: Records of the tested run, by step number.

    Returns:
        Records of the repeated steps, by step number.
    """
    repeater = StepRepeater(tested_steps)
    with Trainer(run, device, [repeater]) as trainer:
        turn_dropout_off(trainer)
        repeater.train_and_record_until(run.job.training.steps)
    return repeater.steps


def _compare_steps(
    run: Run,
    tested_steps: TestedSteps,
    one_rank_steps: StepRecords,
    reference: ReferenceTrainer,
) -> Iterator[Check]:
    """Yield the comparisons of the initial weights and of each step with the expected values.

    Args:
        run: The tested run on several ranks.
        tested_steps: Records of the run, by step number. 0 is the state before the first step.
        one_rank_steps: Records of the same steps on one rank, in the precision of the run.
        reference: Model that computes the expected values in float64. It reads the next global
            batch in each step.
    """
    initial = tested_steps[0]
    yield from compare_bitwise("initial weights", 0, initial.weights, reference.initial)
    yield from compare_replicas(run, 0, "replicas of weights", initial.state_snapshots)

    for step in range(1, run.job.training.steps + 1):
        yield from compare_step(
            run,
            step,
            before=tested_steps[step - 1],
            after=tested_steps[step],
            one_rank=one_rank_steps[step],
            reference=reference,
        )


def compare_step(
    run: Run,
    step: int,
    before: TestedStep,
    after: TestedStep,
    one_rank: StepRecord,
    reference: ReferenceTrainer,
) -> Iterator[Check]:
    """Yield the comparisons of one training step.

    They cover sequences, loss, gradients, gradient norm, weights and optimizer state, in the order
    in which a step computes these values. The first failure therefore shows where the error starts.

    Args:
        run: The tested run on several ranks.
        step: Number of the step.
        before: State of the run before the step.
        after: Records of the run after the step.
        one_rank: Record of the same step on one rank, in the precision of the run.
        reference: Model that computes the expected loss and gradients in float64.
    """
    sequences = reference.read_sequences()
    yield from compare_sequences(run, step, after, sequences)

    # Compare the gradients now, because the hints for the loss use the result. Yield the
    # comparisons of the loss first, because a step computes it first.
    reference_step = ReferenceStep(reference, before.weights, sequences)
    loss, gradients = reference_step.compute_gradients()
    checks = compare_gradients(step, run, after.gradients, gradients, one_rank.gradients.unsharded)
    failed_names = [check.subject for check in checks if not check.has_passed]
    gradient_hint = ""
    if failed_names:
        gradient_hint = explain_gradient(
            run, failed_names, after.gradients, gradients, reference_step
        )

    # Yield the comparisons of the loss.
    tolerance = loss_tolerance(run, abs(one_rank.loss - loss) / abs(loss))
    for rank, record in enumerate(after.ranks):
        hints = filter(None, (explain_ratio(record.loss / loss, run), gradient_hint))
        error = abs(record.loss - loss) / abs(loss)
        yield Check("loss", step, f"rank {rank}", error, tolerance, "; ".join(hints))

    # Yield the comparisons of the gradients.
    gradients_of_ranks = [record.gradients for record in after.ranks]
    yield from compare_replicas(run, step, "replicas of gradients", gradients_of_ranks)
    for check in checks:
        yield check if check.has_passed else check._replace(hint=gradient_hint)
    for name in reference.trainable:
        if name not in gradients:
            hint = "the model computes no gradient for it, for example after detach()"
            yield Check("gradient", step, name, math.inf, 0.0, hint)

    norm = max(total_norm(after.gradients.values()), sys.float_info.min)
    yield from _compare_norms(run, step, after, norm)
    yield from compare_replicas(run, step, "replicas of weights", after.state_snapshots)
    yield from compare_update(run, step, before, after, one_rank.state, norm)
    yield from compare_scales(step, after)


def _compare_norms(run: Run, step: int, after: TestedStep, expected: float) -> Iterator[Check]:
    """Compare the gradient norm that each rank has logged with the expected norm."""
    tolerance = FLOOR_ROUNDINGS * EPS32
    for rank, record in enumerate(after.ranks):
        error = abs(record.grad_norm - expected) / expected
        hint = explain_ratio(record.grad_norm / expected, run)
        yield Check("gradient norm", step, f"rank {rank}", error, tolerance, hint)


def compare_sequences(
    run: Run, step: int, tested_step: TestedStep, sequences: NamedTensors
) -> Iterator[Check]:
    """Check that each rank read exactly its part of the global batch.

    Args:
        run: The tested run on several ranks.
        step: Number of the step.
        tested_step: Records of the step, with the sequences that each rank read.
        sequences: Fields of the global batch, such as "input_ids", each of shape (sequences, T).
    """
    parts = _split_batch(sequences, run.degrees.data)
    for rank, record in enumerate(tested_step.ranks):
        data_rank = _find_data_rank(run, rank)
        errors = [
            fraction_of_different(values, parts[data_rank][name])
            for name, values in record.sequences.items()
        ]
        hint = _describe_wrong_part(record.sequences, parts, data_rank)
        yield Check("sequences", step, f"rank {rank}", error=max(errors), tolerance=0.0, hint=hint)


def _split_batch(sequences: NamedTensors, num_parts: int) -> list[NamedTensors]:
    """Split a global batch into the parts of the data-parallel ranks.

    With n data-parallel ranks, rank r reads the sequences r, r + n, r + 2n, ...
    """
    return [
        {name: values[first::num_parts] for name, values in sequences.items()}
        for first in range(num_parts)
    ]


def _find_data_rank(run: Run, rank: int) -> int:
    """Return the index of a rank among the data-parallel ranks, which read different sequences."""
    indices = coordinates(run, rank)
    return indices["replicate"] * run.degrees.shard + indices["shard"]


def _describe_wrong_part(sequences: NamedTensors, parts: list[NamedTensors], data_rank: int) -> str:
    """Describe which part of the global batch a rank has read by mistake.

    For example, "it read the data of data-parallel rank 1 instead of 0". If the rank has not read
    the part of another rank, return "".

    Args:
        sequences: Sequences that the rank has read.
        parts: Expected sequences of each data-parallel rank.
        data_rank: Index of the part that the rank should read.
    """
    hint = ""
    for other, part in enumerate(parts):
        if other != data_rank and torch.equal(sequences["input_ids"], part["input_ids"]):
            hint = f"it read the data of data-parallel rank {other} instead of {data_rank}"
    return hint


def compare_replicas(
    run: Run, step: int, name: str, snapshots: Sequence[Snapshot]
) -> Iterator[Check]:
    """Check that all replicas of a shard are bitwise equal.

    Yield a failed check for each tensor that differs, or a single passed check if all replicas are
    equal. If no shard has replicas, yield nothing.

    Args:
        run: The tested run on several ranks.
        step: Number of the step.
        name: Name of the yielded checks, such as "replicas of gradients".
        snapshots: Recorded tensors of each rank, in rank order.
    """
    comparisons = list(_compare_with_first_replicas(snapshots))
    if not comparisons:
        return

    # Keep the first difference of each tensor.
    differences: dict[str, ReplicaComparison] = {}
    for comparison in comparisons:
        if not comparison.is_equal:
            differences.setdefault(comparison.tensor, comparison)
    if not differences:
        yield Check(name, step, f"{len(comparisons)} shards", error=0.0, tolerance=0.0)

    for tensor, difference in differences.items():
        hint = _describe_ranks(run, difference.first_rank, difference.rank)
        # Only digests are compared, so the size of the error is unknown. Report 1, which fails.
        yield Check(name, step, tensor, error=1.0, tolerance=0.0, hint=hint)


class ReplicaComparison(NamedTuple):
    """Comparison of a shard with the same shard on an earlier rank.

    Attributes:
        tensor: Name of the tensor.
        first_rank: First rank that has the shard.
        rank: The other rank.
        is_equal: Whether the shards on both ranks are bitwise equal.
    """

    tensor: str
    first_rank: int
    rank: int
    is_equal: bool


def _compare_with_first_replicas(snapshots: Sequence[Snapshot]) -> Iterator[ReplicaComparison]:
    """Compare each shard with the same shard on the first rank that has it.

    Args:
        snapshots: Recorded tensors of each rank, in rank order.
    """
    first_replicas: dict[ShardKey, tuple[int, str]] = {}  # rank and digest of the first replica
    for rank, snapshot in enumerate(snapshots):
        for shard, digest in snapshot.digests.items():
            first_rank, first_digest = first_replicas.setdefault(shard, (rank, digest))
            if rank != first_rank:
                is_equal = digest == first_digest
                yield ReplicaComparison(shard.tensor, first_rank, rank, is_equal)


def _describe_ranks(run: Run, first: int, second: int) -> str:
    """Describe two ranks with different values, such as "ranks 0 and 2 differ (replicate)".

    The parentheses list the parallel dimensions along which the ranks have different indices.
    """
    first_indices = coordinates(run, first)
    second_indices = coordinates(run, second)
    dims = [dim for dim, index in first_indices.items() if index != second_indices[dim]]
    return f"ranks {first} and {second} differ ({', '.join(dims)})"


def compare_update(
    run: Run,
    step: int,
    before: TestedStep,
    after: TestedStep,
    one_rank: Snapshot,
    norm: float,
) -> Iterator[Check]:
    """Compare the weights and optimizer state after a step with the expected optimizer update.

    Args:
        run: The tested run on several ranks.
        step: Number of the step.
        before: State of the run before the step.
        after: Gradients of the run, and its state after the step.
        one_rank: State after the step on one rank that applied the same gradients.
        norm: Total gradient norm, from which the clipping factor follows.
    """
    max_norm = run.job.training.max_norm
    # The same formula as in `torch.nn.utils.clip_grad_norm_`.
    clip_factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    eps_of_weights = torch.finfo(getattr(torch, run.job.training.dtype)).eps
    has_formula = run.job.optimizer.name in FORMULAS
    for name, weight in before.weights.items():
        if name not in after.gradients:
            continue  # it is frozen, or the comparison of gradients has already failed

        # Compute the expected weight and moments.
        new_weight = after.weights[name].double()
        moments = select(before.state, f"{OPTIMIZER}{name}.")
        if has_formula:
            gradient = after.gradients[name].double() * clip_factor
            expected_weight, update = expected_update(run, step, name, weight, gradient, moments)
            # Do not compare elements of the update that depend on rounding errors.
            if update.is_sure is not None:
                expected_weight = torch.where(update.is_sure, expected_weight, new_weight)
            expected_moments = update.moments
        else:
            expected_weight = one_rank.unsharded[MODEL + name].double()
            expected_moments = select(one_rank.unsharded, f"{OPTIMIZER}{name}.")

        # Compare the moments.
        new_moments = select(after.state, f"{OPTIMIZER}{name}.")
        for key, expected_moment in expected_moments.items():
            yield _compare_moment(run, step, f"{name}.{key}", new_moments[key], expected_moment)

        # Compare the change of the weight.
        change = new_weight - weight.double()
        expected_change = expected_weight - weight.double()
        error = relative_error(change, expected_change)
        # Allow for rounding the new weights to their dtype. This error is relative to the change.
        change_norm = expected_change.norm().item()
        weight_norm = weight.double().norm().item()
        rounding = eps_of_weights * weight_norm / change_norm if change_norm else 0.0
        tolerance = UPDATE_ROUNDINGS * EPS32 + rounding
        hint = explain_factor(change, expected_change, run)
        yield Check("weight update", step, name, error, tolerance, hint)

    # Compare the averaged weights (EMA).
    averages = select(after.state, AVERAGES)
    for name, expected in select(one_rank.unsharded, AVERAGES).items():
        error = relative_error(averages[name], expected)
        yield Check("weight average", step, name, error, UPDATE_ROUNDINGS * EPS32)


def _compare_moment(
    run: Run, step: int, name: str, value: torch.Tensor, expected: torch.Tensor
) -> Check:
    """Compare one tensor of the optimizer state with its expected value.

    Args:
        run: The tested run, whose parallel degrees may explain a difference.
        step: Number of the step.
        name: Name of the tensor, such as "norm.weight.exp_avg".
        value: Tensor of the tested run.
        expected: Expected tensor.
    """
    if not value.is_floating_point():
        # The tensor holds 8-bit codes. Rounding can change a few of them by one, so allow 0.1%.
        error = fraction_of_different(value, expected)
        return Check("optimizer state", step, name, error, tolerance=1e-3)

    error = relative_error(value, expected)
    tolerance = UPDATE_ROUNDINGS * EPS32  # for the rounding errors of an update in fp32
    eps_of_state = torch.finfo(value.dtype).eps
    if eps_of_state > EPS32:  # state of a less precise dtype is rounded once more
        tolerance += eps_of_state
    hint = explain_factor(value, expected, run)
    return Check("optimizer state", step, name, error, tolerance, hint)


def compare_scales(step: int, after: TestedStep) -> Iterator[Check]:
    """Check the FP8 scales that FSDP uses to all-gather the weights.

    The expected scale of a weight is the largest FP8 value divided by the largest absolute element
    of the weight.

    Args:
        step: Number of the step.
        after: Records of all ranks after the step.
    """
    largest_float8 = torch.finfo(torch.float8_e4m3fn).max
    for rank, record in enumerate(after.ranks):
        for name, scale in record.scales.items():
            expected = largest_float8 / after.weights[name].double().abs().max()
            error = relative_error(scale, expected)
            hint = f"rank {rank} has {scale.item():.6g} instead of {expected.item():.6g}"
            yield Check("FP8 scale", step, name, error, FLOOR_ROUNDINGS * EPS32, hint)


def compare_resumed(run: Run, folder: Path, uninterrupted_steps: TestedSteps) -> Iterator[Check]:
    """Check that a resumed run is bitwise equal to the uninterrupted run.

    Args:
        run: The tested run on several ranks.
        folder: Folder with the record files of the run that resumed in the same layout.
        uninterrupted_steps: Records of the uninterrupted run, which has saved the checkpoint.
    """
    resumed_steps = load_steps(folder, "resumed", run.world_size)
    save_step = find_save_step(run)
    loaded = resumed_steps[save_step]  # recorded after loading, before the next step
    saved = uninterrupted_steps[save_step]
    yield from compare_bitwise("resume: loaded state", save_step, loaded.state, saved.state)
    yield from compare_replicas(run, save_step, "resume: replicas", loaded.state_snapshots)

    for step in range(save_step + 1, run.job.training.steps + 1):
        yield from _compare_resumed_step(step, resumed_steps[step], uninterrupted_steps[step])


def _compare_resumed_step(step: int, resumed: TestedStep, expected: TestedStep) -> Iterator[Check]:
    """Check that a step after a resume is bitwise equal to the same step without interruption.

    Args:
        step: Number of the step.
        resumed: Records of the step in the run that has resumed from a checkpoint.
        expected: Records of the step in the uninterrupted run.
    """
    for rank, record in enumerate(resumed.ranks):
        sequences = expected.ranks[rank].sequences
        yield from compare_bitwise(
            "resume: sequences", step, record.sequences, sequences, subject=f"rank {rank}"
        )
    yield from compare_bitwise("resume: gradient", step, resumed.gradients, expected.gradients)
    yield from compare_bitwise("resume: state", step, resumed.state, expected.state)


def compare_resumed_on_one_rank(
    run: Run,
    device: torch.device,
    tested_steps: TestedSteps,
    one_rank_steps: StepRecords,
) -> Iterator[Check]:
    """Check that one rank can resume from the checkpoint of several ranks.

    The loaded state must be bitwise equal to the saved state, and the sequences and gradients of
    the next step to those in `one_rank_steps`.

    Args:
        run: The tested run on several ranks, which has saved the checkpoint.
        device: Device of this rank.
        tested_steps: Records of the tested run, with the saved state.
        one_rank_steps: Records of the same steps on one rank.
    """
    resumed = _resume_and_train_one_step(run, device)
    save_step = find_save_step(run)
    saved_state = tested_steps[save_step].state
    # This comparison also fails if the run has loaded a checkpoint of another step.
    yield from compare_bitwise(
        "resume on one rank: loaded state", resumed.loaded_step, resumed.loaded_state, saved_state
    )

    step = resumed.trained_step
    trained = resumed.record
    expected = one_rank_steps[save_step + 1]
    yield from compare_bitwise(
        "resume on one rank: sequences", step, trained.sequences, expected.sequences
    )
    yield from compare_bitwise(
        "resume on one rank: gradient",
        step,
        trained.gradients.unsharded,
        expected.gradients.unsharded,
    )


class ResumedStep(NamedTuple):
    """First step of a resumed run, and the state before it.

    Attributes:
        loaded_step: Number of steps of the loaded checkpoint.
        loaded_state: Unsharded tensors of the loaded checkpoint, by their names in it.
        trained_step: Number of the step that was trained.
        record: Record of this step, with its sequences and gradients.
    """

    loaded_step: int
    loaded_state: NamedTensors
    trained_step: int
    record: StepRecord


def _resume_and_train_one_step(run: Run, device: torch.device) -> ResumedStep:
    """Resume a run on one rank from its checkpoint, and train one step."""
    # A run with the same output folder resumes from the checkpoint there.
    resumed_run = make_one_rank_run(run, run.dump_folder)
    recorder = Recorder()
    with Trainer(resumed_run, device, [recorder]) as trainer:
        turn_dropout_off(trainer)
        loaded_step = trainer.steps_done
        recorder.train_and_record()
    loaded_state = recorder.steps[loaded_step].state.unsharded
    return ResumedStep(loaded_step, loaded_state, trainer.steps_done, recorder.record)


def compare_export(run: Run, export_folder: Path, tested_steps: TestedSteps) -> Iterator[Check]:
    """Export the checkpoint to Hugging Face transformers, and compare the exported weights bitwise.

    Skip models that transformers does not support.

    Args:
        run: The tested run on several ranks, which has saved the checkpoint.
        export_folder: New folder for the export.
        tested_steps: Records of the tested run, with the saved weights.
    """
    saved = load_newest(run.dump_folder, load=checkpoint_weights)
    if not has_hf_family(saved.arch):
        return
    export_hf(saved, export_folder, "float32")
    exported = hf_weights(export_folder)
    values = {name: exported.read(name) for name in exported.dtypes}

    save_step = find_save_step(run)
    weights = tested_steps[save_step].weights
    expected = {name: weight.float() for name, weight in weights.items()}
    yield from compare_bitwise(EXPORTED_WEIGHTS, save_step, values, expected)


def compare_activation_checkpointing(
    run: Run, device: torch.device, folder: Path
) -> Iterator[Check]:
    """Compare gradients with and without activation checkpointing, with dropout enabled.

    A difference can mean that the recomputation uses a different dropout mask. Yield nothing if the
    run would recompute no activations on one rank, or if the model draws no random numbers.

    Args:
        run: The tested run on several ranks.
        device: Device of this rank.
        folder: Folder for the output folders of both runs.
    """
    if not _recomputes_on_one_rank(run) or not has_random_numbers(run):
        return

    run_without_checkpointing = make_one_rank_run(run, folder / "saved")
    run_with_checkpointing = make_one_rank_run(run, folder / "recomputed", recompute=True)
    expected = _train_first_step(run_without_checkpointing, device)
    gradients = _train_first_step(run_with_checkpointing, device)
    for name, gradient in gradients.items():
        yield Check(
            "activation checkpointing",
            step=1,
            subject=name,
            error=relative_error(gradient, expected[name]),
            tolerance=FLOOR_ROUNDINGS * EPS32,  # only for rounding in fp32
            hint="the backward pass recomputes other activations, for example with another dropout",
        )


def _recomputes_on_one_rank(run: Run) -> bool:
    """Return whether a run recomputes activations when it trains on one rank, without compilation.

    With the mode "memory_budget", only compiled models recompute activations.
    """
    return run.job.activation_checkpoint.mode not in ("none", "memory_budget")


def _train_first_step(run: Run, device: torch.device) -> NamedTensors:
    """Train one step on one rank with dropout, and return its gradients by parameter name."""
    recorder = Recorder()
    with Trainer(run, device, [recorder]):
        recorder.amplify_weights()
        torch.manual_seed(0)  # for equal dropout masks in all runs
        recorder.train_and_record()
    return recorder.steps[1].gradients.unsharded
