"""Guards against bad steps: non-finite numbers, spikes and silent data corruption.

Invariant: Guards never make the CPU wait for the GPU, except at log steps, at saves, when they
compare replicas and, with rollbacks, at validations. All ranks make the same decisions, because
they first sum or gather the values of all ranks. The state of the guards is part of each
checkpoint, so a resumed run makes the same decisions as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.live_state import is_finite, model_tensors
from titanlite.checkpoint.manifest import NON_FINITE_GUARD, SPIKE_GUARD
from titanlite.config.errors import GuardError, format_count
from titanlite.hooks.hook import Hook, Request
from titanlite.optim.clip import StepSums, count_replicas, local_shard
from titanlite.runtime.logging import Event
from titanlite.runtime.world import gathered

if TYPE_CHECKING:
    from titanlite.train.step import StepResult
    from titanlite.train.trainer import Trainer

MAX_REPORTED_STEPS = 10
MAX_REPORTED_SEQUENCES = 8
MIN_RELATIVE_DEVIATION = 0.01
"""Smallest deviation that spike detection uses, relative to the median. Without it, tiny changes in
a nearly constant loss would count as spikes."""
NORMAL_SCALE = 1.4826
"""Ratio of the standard deviation of normal samples to their median absolute deviation."""


def build_guards() -> list[Hook]:
    """Create the guards against bad steps, in the order in which they check a step."""
    return [SpikeGuard(), NonFiniteGuard(), ReplicaGuard()]


class NonFiniteValue(NamedTuple):
    """Description of a non-finite loss or gradient of one rank, for the log."""

    subject: str
    """For example "the loss"."""
    location: str
    """Rank, node and sequences, for example "rank 3 (node-0, sequences 3, 11)"."""
    state: str
    """For example "is nan"."""


class NonFiniteGuard(Hook):
    """Logs and counts skipped steps, and stops the run after too many in a row.

    The training step itself skips the weight update if the loss or a gradient is not finite. To
    avoid a host sync in each step, the guard leaves the results on the GPU. It reads them at the
    next log step or save, where the CPU waits for the GPU anyway.
    """

    name = NON_FINITE_GUARD

    def built(self, trainer: Trainer) -> None:
        """Read the limit on consecutive skipped steps (guards.max_skipped) and reset counters."""
        self._trainer = trainer
        self._max_skipped = trainer.job.guards.max_skipped
        self._unread_results: list[tuple[int, StepResult]] = []
        self._unlogged_lines: list[str] = []
        self._num_skipped = 0
        self._num_consecutive = 0
        self._max_consecutive = 0

    def after_step(self, step: int, result: StepResult) -> None:
        """Store the result of the step on the GPU, to read it at the next log step or save."""
        self._unread_results.append((step, result))

    def numbers(self, step: int) -> Mapping[str, Any]:
        """Return the metric `skipped_steps`, the number of steps skipped since step 1."""
        self._read_results()
        return {"skipped_steps": self._num_skipped}

    def logged(self, entry: object) -> None:
        """Log the skipped steps that have not been logged yet.

        Raises:
            GuardError: If more than guards.max_skipped consecutive steps were skipped.
        """
        self._report()

    def saving(self, step: int) -> None:
        """Log the skipped steps, and prevent a save of unusable weights.

        Raises:
            GuardError: If more than guards.max_skipped consecutive steps were skipped, or if
                weights are not finite, for example because a hook has changed them.
        """
        self._read_results()
        self._report()
        weights = model_tensors(self._trainer.model).values()
        has_finite_shards = all(is_finite(local_shard(weight)) for weight in weights)
        if not all(gathered(has_finite_shards)):
            raise GuardError(
                f"Step {step} was not saved: weights are NaN or infinite. Lower optimizer.lr, or "
                "fix the hook or optimizer that changed them. Then restart to resume from the "
                "newest checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped steps since step 1, to store in a checkpoint.

        Returns:
            A dictionary with the keys "skipped" (total number of skipped steps) and "in_row"
            (number of consecutive skipped steps up to now), or {} if no step was skipped.
        """
        self._read_results()  # does nothing during a save, because `saving` already did this
        if not self._num_skipped:
            return {}
        return {"skipped": self._num_skipped, "in_row": self._num_consecutive}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers of skipped steps."""
        self._num_skipped = state["skipped"]
        self._num_consecutive = state["in_row"]

    def _read_results(self) -> None:
        """Read the results of recent steps from the GPU, and count the skipped steps.

        Also prepare one log line for each skipped step. All ranks must call this together, because
        they exchange the reasons why steps were skipped.
        """
        results = self._unread_results
        self._unread_results = []
        if not results:
            return

        skip_flags = torch.stack([result.skipped for _, result in results]).tolist()
        skipped_results = []
        for step_and_result, is_skipped in zip(results, skip_flags, strict=True):
            self._update_skip_counters(is_skipped)
            if is_skipped:
                skipped_results.append(step_and_result)
        if skipped_results:
            self._unlogged_lines += self._describe_skipped_steps(skipped_results)

    def _update_skip_counters(self, is_skipped: bool) -> None:
        """Update the total number of skipped steps, the current streak and the longest streak.

        Call this once for each step, in order.
        """
        if not is_skipped:
            self._num_consecutive = 0
            return
        self._num_skipped += 1
        self._num_consecutive += 1
        self._max_consecutive = max(self._max_consecutive, self._num_consecutive)

    def _describe_skipped_steps(self, results: Sequence[tuple[int, StepResult]]) -> list[str]:
        """Gather the causes of skipped steps from all ranks and return one log line per step.

        Args:
            results: Number and result of each skipped step. All ranks skip the same steps.
        """
        # A loss or gradient can be non-finite on a single rank, so ask all ranks.
        problems = [self._find_problems(step, result) for step, result in results]
        problems_by_rank = gathered(problems)  # one list per rank, with one entry per step
        problems_by_step = zip(*problems_by_rank, strict=True)
        return [
            _describe_skipped_step(step, problems_of_ranks)
            for (step, _), problems_of_ranks in zip(results, problems_by_step, strict=True)
        ]

    def _find_problems(self, step: int, result: StepResult) -> dict[str, NonFiniteValue]:
        """Describe this rank's non-finite loss and first non-finite gradient in a skipped step.

        This waits for the GPU.

        Returns:
            A dictionary with the key "loss" if the loss is not finite, and the key "gradient" if a
            gradient is not finite and the name of its parameter is known.
        """
        rank = self._trainer.rank
        host = self._trainer.hosts[rank]
        location = f"rank {rank} ({host}, sequences {self._list_sequences(step)})"

        problems = {}
        loss = result.loss.item()
        if not math.isfinite(loss):
            problems["loss"] = NonFiniteValue("the loss", location, f"is {loss}")
        parameter = self._find_non_finite_gradient(result.squares)
        if parameter is not None:
            subject = f"the gradient of {parameter}"
            problems["gradient"] = NonFiniteValue(subject, location, "is not finite")
        return problems

    def _find_non_finite_gradient(self, gradient_squares: Tensor) -> str | None:
        """Return the name of the first parameter whose gradient on this rank is not finite.

        Return None if all gradients are finite. Also return None if a plugin has frozen parameters
        since the step, because the gradients then cannot be matched with parameter names.

        Args:
            gradient_squares: Sum of squares of this rank's shard of each gradient, shape (number of
                gradients,).
        """
        finite_flags = gradient_squares.isfinite().tolist()
        if all(finite_flags):
            return None
        parameters = self._trainer.model.named_parameters()
        trainable = [name for name, parameter in parameters if parameter.requires_grad]
        if len(trainable) != len(finite_flags):
            return None
        return trainable[finite_flags.index(False)]

    def _list_sequences(self, step: int) -> str:
        """List the sequences of the global batch that this rank trained on, such as "3, 7, 11".

        List only the first 8 (`MAX_REPORTED_SEQUENCES`).
        """
        # Data-parallel ranks take turns. For example, rank 3 of 4 trains on sequences 3, 7, 11, ...
        mesh = self._trainer.mesh
        batch_size = self._trainer.run.batch_size(step - 1)
        sequences = range(mesh.data_rank, batch_size, mesh.degrees.data)
        listed = [str(sequence) for sequence in sequences[:MAX_REPORTED_SEQUENCES]]
        if len(sequences) > MAX_REPORTED_SEQUENCES:
            listed.append("...")
        return ", ".join(listed)

    def _report(self) -> None:
        """Log the skipped steps that have not been logged yet.

        Raises:
            GuardError: If more than guards.max_skipped consecutive steps were skipped. The message
                describes at most the last 10 (`MAX_REPORTED_STEPS`) unreported skipped steps.
        """
        lines = self._unlogged_lines
        self._unlogged_lines = []
        if self._max_consecutive > self._max_skipped:
            raise GuardError(self._explain_many_skips(lines[-MAX_REPORTED_STEPS:]))
        for line in lines:  # each contains the number of the skipped step
            self._trainer.log(Event(line, "skip", self._trainer.steps_done))

    def _explain_many_skips(self, lines: list[str]) -> str:
        """Return the error message that ends a run after too many consecutive skipped steps.

        Args:
            lines: Descriptions of the last skipped steps, one line each.
        """
        problem = (
            f"Step {self._trainer.steps_done}: {self._max_consecutive} consecutive steps were "
            f"skipped, more than guards.max_skipped = {self._max_skipped}:"
        )
        verb = "lower" if self._trainer.job.training.max_norm else "set"
        remedy = (
            f"Before you restart, lower optimizer.lr, {verb} training.max_norm, "
            "or raise lr_scheduler.warmup_steps.\n"
            "If the same step fails with any settings, inspect its sequences."
        )
        return "\n".join([problem, *lines, remedy])


def _describe_skipped_step(
    step: int, problems_of_ranks: Sequence[dict[str, NonFiniteValue]]
) -> str:
    """Return the log line for a skipped step, with the cause and the first affected rank.

    Args:
        step: Number of the step.
        problems_of_ranks: Non-finite values of each rank by kind, in rank order.
    """
    causes = _list_causes(problems_of_ranks)
    if not causes:
        causes = ["the loss or the gradient norm is a spike, or a hook skipped the step"]
    hint = f"Run `titanlite data show --step {step}` to see its sequences."
    return f"Skipped step {step} without changing the weights: {'; '.join(causes)}. {hint}"


def _list_causes(problems_of_ranks: Sequence[dict[str, NonFiniteValue]]) -> list[str]:
    """List the reasons why a step was skipped: a non-finite loss, a non-finite gradient, or both.

    Each text names only the first affected rank, for example "the loss on rank 3 (node-0, sequences
    3, 11) and 2 more ranks is nan". Return [] if the loss and all gradients are finite.

    Args:
        problems_of_ranks: For each rank, its non-finite values, by "loss" or "gradient".
    """
    causes = []
    for kind in ("loss", "gradient"):
        affected = [problems[kind] for problems in problems_of_ranks if kind in problems]
        if not affected:
            continue

        first, *others = affected
        location = first.location
        if others:
            location += f" and {format_count(len(others), 'more rank')}"
        causes.append(f"{first.subject} on {location} {first.state}")
    return causes


class SpikeGuard(Hook):
    """Detects spikes in the loss or the gradient norm, and logs, skips or rolls back the step.

    A value is a spike if it exceeds the median of the previous steps by more than
    `guards.spike_deviations` deviations. A deviation is 1.4826 times the median absolute deviation
    (Hampel, 1974), but at least 1% of the median. For normal samples, it equals the standard
    deviation, and a few spikes hardly change it.

    `guards.on_spike` selects the reaction:

    - "skip": The GPU compares the values before the weight update and skips the update of a spike.
    - "roll_back": The guard restores weights, optimizer and hook tensors from the newest checkpoint
      and saves them immediately. The step count continues, so the data and the learning rate of a
      step do not depend on rollbacks.
    - "warn": Spikes are only logged.

    Without "skip", the CPU looks for spikes later, when it reads the metrics.
    """

    name = SPIKE_GUARD

    def built(self, trainer: Trainer) -> None:
        """Create an empty history of recent steps, with which later steps are compared.

        With guards.on_spike = "skip", spikes are detected before the weight update, so the history
        is on the GPU. Otherwise, the CPU detects spikes later, so the history is on the CPU.
        """
        self._trainer = trainer
        self._config = trainer.job.guards
        self._should_skip = self._config.on_spike == "skip"
        self._should_roll_back = self._config.on_spike == "roll_back"
        self._num_spikes = 0
        self._num_roll_backs = 0
        self._needs_roll_back = False

        # Results that the CPU has not read from the GPU yet, by step number.
        self._unread_comparisons: dict[int, Tensor] = {}  # only with on_spike = "skip"
        self._unread_values: dict[int, Tensor] = {}  # otherwise: loss, gradient norm, skip flag

        device = torch.device("cpu")
        if self._should_skip:
            first_parameter = next(trainer.model.parameters())
            device = local_shard(first_parameter).device
        self._history = SpikeHistory(self._config.spike_history, device)

    def resize_tensors(self, sizes: Mapping[str, torch.Size]) -> None:
        """Resize the history to its length in the checkpoint, so that it can be loaded."""
        if "history" in sizes:
            # When it is loaded, `started` or `_roll_back` resizes it to guards.spike_history.
            self._history.values = self._history.values.new_full(sizes["history"], torch.nan)

    def started(self, step: int) -> None:
        """Convert a loaded history to the length in this job (guards.spike_history)."""
        self._history.resize(self._config.spike_history, last_step=step)

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Skip the step if it is a spike, or store its loss and gradient norm to check them later.

        With guards.on_spike = "skip", compare both values with the history on the GPU, without a
        host sync, and set `skip` to 1 in place if one is a spike. Otherwise, only store them.
        """
        values = torch.stack([sums.loss, sums.grad_norm.double()])
        if not self._should_skip:
            self._unread_values[step] = torch.stack([*values, skip.double()])
            return

        comparison = self._compare(values, skip)
        is_spike = comparison[0]
        skip.copy_(torch.maximum(skip, is_spike.max()))
        self._history.add(step, values, skip)
        self._unread_comparisons[step] = comparison

    def _compare(self, values: Tensor, skip: Tensor) -> Tensor:
        """Compare the loss and the gradient norm of a step with the history.

        Args:
            values: Loss and gradient norm, shape (2,).
            skip: Scalar: 1 if the step is already skipped and thus does not count as a spike, else
                0.

        Returns:
            Matrix, shape (3, 2). The columns are the loss and the gradient norm. The rows are
            whether the value is a spike (0 or 1), the value, and the limit above which it is a
            spike.
        """
        limits = self._history.compute_limits(self._config.spike_deviations)
        is_spike = (values > limits) & (skip == 0)
        return torch.stack([is_spike.double(), values, limits])

    def numbers(self, step: int) -> Mapping[str, Any]:
        """Return the metrics `spikes` and `roll_backs`: the number of each since step 1."""
        self._read_values()
        return {"spikes": self._num_spikes, "roll_backs": self._num_roll_backs}

    def saving(self, step: int) -> None:
        """Update the history and the number of spikes, which the checkpoint stores."""
        self._read_values()

    def check(self, step: int, request: Request) -> None:
        """With guards.on_spike = "roll_back", roll back if a recent step was a spike.

        Before a save or a validation, first look for spikes in all steps up to now.
        """
        # A rollback must precede the save or the validation. Without rollbacks, the values are only
        # logged and stored, so it is early enough if `numbers` and `saving` read them.
        if self._should_roll_back and (request.save or request.validate):
            self._read_values()
        if self._needs_roll_back:
            self._roll_back(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of spikes and rollbacks since step 1, or {} if there was no spike."""
        if not self._num_spikes:
            return {}
        return {"spikes": self._num_spikes, "roll_backs": self._num_roll_backs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers of spikes and rollbacks."""
        self._num_spikes = state["spikes"]
        self._num_roll_backs = state.get("roll_backs", 0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the recent losses and gradient norms, shape (2, guards.spike_history)."""
        return {"history": self._history.values}

    def _read_values(self) -> None:
        """Read the losses and gradient norms of recent steps from the GPU and report each spike.

        This waits for the GPU, so call it only at log steps, saves and validations.
        """
        for step, comparison in _move_to_cpu(self._unread_comparisons).items():
            self._report_spike(step, comparison)

        for step, values_and_skip in _move_to_cpu(self._unread_values).items():
            values, skip = values_and_skip[:2], values_and_skip[2]
            comparison = self._compare(values, skip)
            self._history.add(step, values, skip)
            self._report_spike(step, comparison)

    def _report_spike(self, step: int, comparison: Tensor) -> None:
        """If a step is a spike, log and count it. With on_spike = "roll_back", request a rollback.

        Args:
            step: Number of the step.
            comparison: Loss and gradient norm of the step and their limits, from `_compare`.
        """
        problems = _describe_spikes(comparison)
        if not problems:
            return

        self._num_spikes += 1
        if self._should_roll_back:
            self._needs_roll_back = True  # `check` then rolls back
        text = f"Step {step} is a spike: {', '.join(problems)} (guards.spike_deviations)."
        self._trainer.log(Event(text, "spike", step))

    def _roll_back(self, step: int) -> None:
        """Restore weights, optimizer and hook tensors from the newest checkpoint.

        The step count does not change: training continues with step `step` + 1. If there is no
        earlier checkpoint, log this and keep the current weights.

        Raises:
            GuardError: If the run has already rolled back guards.max_roll_backs times.
        """
        self._needs_roll_back = False
        self._check_max_roll_backs(step)

        checkpointer = self._trainer.checkpointer
        restored_step = None if checkpointer is None else checkpointer.roll_back(step)
        if restored_step is None:
            self._trainer.log(f"Step {step}: no checkpoint to roll back to. Training continues.")
            return

        # The rollback has also loaded the history, with the length that it had in the checkpoint.
        self._history.resize(self._config.spike_history, last_step=restored_step)
        self._num_roll_backs += 1
        text = (
            f"Step {step}: rolled back to the weights of step {restored_step} "
            f"({self._num_roll_backs} of {self._config.max_roll_backs} rollbacks). "
            "Training continues with the next data; the steps in between count as done."
        )
        self._trainer.log(Event(text, "roll back", step))

    def _check_max_roll_backs(self, step: int) -> None:
        """Raise a GuardError if the run has already rolled back guards.max_roll_backs times."""
        max_roll_backs = self._config.max_roll_backs
        if self._num_roll_backs >= max_roll_backs:
            verb = "lower" if self._trainer.job.training.max_norm else "set"
            raise GuardError(
                f"Step {step}: a spike after {max_roll_backs} rollbacks (guards.max_roll_backs). "
                f"The step was not saved. Before you restart, lower optimizer.lr, or {verb} "
                "training.max_norm."
            )


class SpikeHistory:
    """Losses and gradient norms of recent steps, with which `SpikeGuard` compares a new step.

    Attributes:
        values: Losses (row 0) and gradient norms (row 1), float64. In a history of n steps, the
            values of step s are in column s % n. NaN means that there is no value yet.
    """

    def __init__(self, num_steps: int, device: torch.device) -> None:
        """Create an empty history of `num_steps` steps."""
        self.values = torch.full((2, num_steps), torch.nan, dtype=torch.float64, device=device)

    def resize(self, num_steps: int, last_step: int) -> None:
        """Change the number of steps of a history that ends with `last_step`.

        If the history is too long, drop its oldest values. If it is too short, repeat it, which
        hardly changes its median and deviation.
        """
        old_values = self.values
        old_num_steps = old_values.shape[1]
        steps = torch.arange(last_step - num_steps + 1, last_step + 1, device=old_values.device)
        self.values = old_values.new_empty(2, num_steps)
        self.values[:, steps % num_steps] = old_values[:, steps % old_num_steps]

    def add(self, step: int, step_values: Tensor, skip: Tensor) -> None:
        """Add a step and drop the oldest one. If `skip` is 1, leave the history unchanged.

        Args:
            step: Number of the step.
            step_values: Loss and gradient norm, shape (2,).
            skip: Scalar: 1 if the step was skipped, else 0.
        """
        column = self.values[:, step % self.values.shape[1]]
        column.copy_(torch.where(skip > 0, column, step_values))

    def compute_limits(self, max_deviations: float) -> Tensor:
        """Return the limits above which a loss and a gradient norm are spikes, shape (2,).

        Until the history is full, the limits are NaN, so that no value is a spike.

        Args:
            max_deviations: Distance between the limit and the median, in deviations.
        """
        median = _row_medians(self.values)
        distances = (self.values - median[:, None]).abs()
        deviation = NORMAL_SCALE * _row_medians(distances)
        min_deviation = MIN_RELATIVE_DEVIATION * median.abs()
        deviation = torch.maximum(deviation, min_deviation)
        return median + max_deviations * deviation


def _move_to_cpu(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """Copy tensors to the CPU with a single host sync, and remove them from the dictionary.

    Args:
        tensors: Tensors of the same shape, by step number.
    """
    if not tensors:
        return {}
    copies = torch.stack(list(tensors.values())).cpu()
    copies_by_step = dict(zip(tensors, copies, strict=True))
    tensors.clear()
    return copies_by_step


def _describe_spikes(comparison: Tensor) -> list[str]:
    """Describe the values of a step that are spikes, for example "loss 9.1 is above 4.25".

    Args:
        comparison: Result of `SpikeGuard._compare`, shape (3, 2). The columns are the loss and the
            gradient norm. The rows are whether the value is a spike (0 or 1), the value, and its
            limit.
    """
    names = ("loss", "gradient norm")
    are_spikes, values, limits = comparison.tolist()
    return [
        f"{name} {value:.4g} is above {limit:.4g}"
        for name, is_spike, value, limit in zip(names, are_spikes, values, limits, strict=True)
        if is_spike
    ]


def _row_medians(values: Tensor) -> Tensor:
    """Return the median of each row of a matrix, or NaN for rows that contain NaN.

    For an even number of columns, the median is the larger of the two middle values.
    """
    # `torch.median` is not deterministic on a GPU, so sort the rows instead.
    ordered = values.sort(dim=1).values
    middle = ordered[:, values.shape[1] // 2]
    last = ordered[:, -1]  # NaN if the row contains NaN, because NaN is sorted last
    return middle + 0 * last  # 0 * NaN is NaN


class Shard(NamedTuple):
    """Identifies the part of a parameter that a rank holds.

    Ranks with equal `Shard` tuples hold replicas of the same part.

    Attributes:
        parameter: Name of the parameter.
        coordinates: Index of the part in each mesh dimension along which the parameter is sharded.
    """

    parameter: str
    coordinates: tuple[int, ...]


class ReplicaGuard(Hook):
    """Detects silent data corruption by comparing replicas of the same weight between ranks.

    The ranks compare checksums every `guards.compare_every` steps. With HSDP, all weights have
    replicas. With tensor parallelism, only the norm weights have replicas. In other layouts, the
    guard does nothing.
    """

    def built(self, trainer: Trainer) -> None:
        """Find the parameters on this rank that other ranks replicate."""
        self._trainer = trainer
        self._interval = trainer.job.guards.compare_every
        self._replicated: dict[Shard, nn.Parameter] = {}
        for name, parameter in trainer.model.named_parameters():
            if count_replicas(parameter) > 1:
                self._replicated[Shard(name, _shard_coordinates(parameter))] = parameter

    def check(self, step: int, request: Request) -> None:
        """Compare the replicated weights every `guards.compare_every` steps.

        Raises:
            GuardError: If replicas differ. The message lists the ranks that differ from the
                majority and their nodes.
        """
        # If this rank has no replicated weights, no rank has any, so all ranks return.
        if step % self._interval != 0 or not self._replicated:
            return

        checksums_by_rank = gathered(self._compute_checksums())
        for shard, checksum_of_rank in _group_by_shard(checksums_by_rank).items():
            suspects = _differing_ranks(checksum_of_rank)
            if suspects:
                ranks = list(checksum_of_rank)
                raise GuardError(self._describe(step, shard.parameter, ranks, suspects))

    @torch.no_grad()
    def _compute_checksums(self) -> dict[Shard, int]:
        """Compute the checksum of each replicated shard on this rank with one host sync."""
        sums = [_sum_bits(local_shard(weight)) for weight in self._replicated.values()]
        return dict(zip(self._replicated, torch.stack(sums).tolist(), strict=True))

    def _describe(self, step: int, name: str, ranks: list[int], suspects: list[int]) -> str:
        """Return the error message for a parameter whose replicas differ.

        Args:
            step: Number of the step.
            name: Name of the parameter.
            ranks: All ranks that hold a replica.
            suspects: Ranks whose replica differs from the majority.
        """
        named = ", ".join(f"rank {rank} ({self._trainer.hosts[rank]})" for rank in suspects)
        return (
            f"Step {step}: silent data corruption: {name} should be identical on the ranks "
            f"{', '.join(map(str, ranks))}, but differs on {named}. The step was not saved. "
            "Check the memory, GPU and network of that node before you restart the run."
        )


def _group_by_shard(checksums_by_rank: Sequence[dict[Shard, int]]) -> dict[Shard, dict[int, int]]:
    """Group checksums by shard, so that the replicas of a shard can be compared.

    Args:
        checksums_by_rank: For each rank, the checksums of its replicated shards.

    Returns:
        For each shard, a mapping from ranks to the checksums of their replicas.
    """
    checksums_by_shard: dict[Shard, dict[int, int]] = {}
    for rank, checksums in enumerate(checksums_by_rank):
        for shard, checksum in checksums.items():
            checksums_by_shard.setdefault(shard, {})[rank] = checksum
    return checksums_by_shard


def _differing_ranks(replicas: dict[int, int]) -> list[int]:
    """Return the ranks whose checksum differs from the majority.

    If there is no majority, return all ranks, because any of them may be wrong. If all checksums
    are equal, return [].

    Args:
        replicas: Checksum of the replica on each rank, by rank.
    """
    most_common, count = Counter(replicas.values()).most_common(1)[0]
    if 2 * count <= len(replicas):
        return list(replicas)
    return [rank for rank, checksum in replicas.items() if checksum != most_common]


def _shard_coordinates(parameter: Tensor) -> tuple[int, ...]:
    """Return this rank's index in each mesh dimension along which `parameter` is sharded."""
    assert isinstance(parameter, DTensor)
    coordinates = parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    return tuple(
        coordinate
        for coordinate, placement in zip(coordinates, parameter.placements, strict=True)
        if not placement.is_replicate()
    )


def _sum_bits(shard: Tensor) -> Tensor:
    """Return a checksum of a tensor with 4-byte or 2-byte elements, as an int64 scalar tensor.

    The checksum is the sum of all elements, with their bits interpreted as integers. It changes if
    any single element changes.
    """
    bits = shard.view(torch.int32 if shard.itemsize == 4 else torch.int16)
    return bits.sum(dtype=torch.int64)
