"""Convert lengths in tokens, such as `training.tokens = "10B"`, to optimizer steps.

Invariant: `titanlite.load_run` converts all lengths when it builds a run. All other code, the
checkpoints and config.toml only have steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from titanlite.checkpoint.find import Progress, read_progress
from titanlite.config.run import Run, with_keys
from titanlite.config.schema import LENGTH_KEYS, MAX_STEPS, MAX_TOKENS, parse_tokens
from titanlite.observe.flops import num_params
from titanlite.rules import Problem

WARMUP = "lr_scheduler.warmup_steps"
DECAY = "lr_scheduler.decay_steps"
INTERVALS = ("checkpoint.interval", "validation.freq")
# Each length depends only on those before it.
KEYS = ("lr_scheduler.total_steps", WARMUP, DECAY, *INTERVALS)


class TokenCounter(NamedTuple):
    """Counts the tokens of the steps of a run. All tokens of a sequence count, also padding.

    Attributes:
        run: The run, which determines the batch size of each step.
        progress: Steps before the run resumes, whose batch sizes may have been different.
    """

    run: Run
    progress: Progress

    @property
    def extra_sequences(self) -> int:
        """Number of sequences by which the earlier steps exceed the batch sizes of the run."""
        planned = sum(count for _, count in self.run.count_sequences(self.progress.steps))
        return self.progress.sequences - planned

    def count(self, key: str, steps: int) -> int:
        """Return the number of tokens in `steps` steps of the length `key`.

        They are the last steps of the schedule for a decay, the largest steps for an interval, and
        otherwise the first steps.
        """
        if key in INTERVALS:
            return steps * self.run.largest_batch_size * self.run.job.training.seq_len
        if key == DECAY:
            return self._count_last(steps)
        return self._count_first(steps)

    def _count_last(self, steps: int) -> int:
        job = self.run.job
        total = job.lr_scheduler.total_steps or job.training.steps
        missing = max(0, steps - total)  # `titanlite.rules` reports a decay that is too long
        last = self._count_first(total) - self._count_first(total - steps + missing)
        return last + self._count_first(missing)

    def _count_first(self, steps: int) -> int:
        num_sequences = sum(count for _, count in self.run.count_sequences(steps))
        steps_done = min(steps, self.progress.steps)
        num_sequences += self.extra_sequences * steps_done // max(self.progress.steps, 1)
        return num_sequences * self.run.job.training.seq_len


def resolve_lengths(run: Run) -> tuple[Run, list[Problem]]:
    """Convert all lengths in tokens to steps, rounded down.

    Data stages count with their own batch sizes. If the run resumes, its earlier steps count with
    the batch sizes that they had.

    Returns:
        The run without lengths in tokens, and problems such as a length of less than one step.
    """
    lengths = list(_list_lengths(run))
    if not lengths:
        return run, []

    problems = _find_repeated_length(run)
    progress = read_progress(run)
    for key, num_tokens in lengths:
        counter = TokenCounter(run, progress)  # the run has the lengths converted so far
        steps = _count_steps(counter, key, num_tokens)
        if not 1 <= steps <= MAX_STEPS:
            problems.append(_describe_bad_length(counter, key, steps))
            steps = 1
        run = _set_length(run, key, steps)
    return run, problems


def _count_steps(counter: TokenCounter, key: str, num_tokens: int) -> int:
    """Convert the length `key` from tokens to steps, rounded down."""
    # Binary search for the first number of steps that takes more tokens. A step takes at least one.
    too_many_steps = bisect_right(range(MAX_TOKENS), num_tokens, key=partial(counter.count, key))
    steps = too_many_steps - 1
    return _keep_completed_warmup(counter, steps) if key == WARMUP else steps


def _keep_completed_warmup(counter: TokenCounter, steps: int) -> int:
    """Return the length of the warmup in steps: `steps`, or the recorded length if it is over.

    If the batch sizes have changed since then, another length would make the learning rate jump.
    """
    progress = counter.progress
    if counter.extra_sequences and steps <= progress.steps:
        return progress.warmup_steps or steps
    return steps


def _describe_bad_length(counter: TokenCounter, key: str, steps: int) -> Problem:
    """Return the problem of a length with no steps or too many steps."""
    tokens_per_step = counter.count(key, 1)
    limits = f"Lengths must have 1 to {MAX_STEPS:,} steps."
    return Problem(key, f"makes {steps:,} steps of {tokens_per_step:,} tokens. {limits}")


def _set_length(run: Run, key: str, steps: int) -> Run:
    """Return a run in which the length `key` has `steps` steps instead of tokens."""
    if key in KEYS:
        return with_keys(run, {key: steps})
    # `training.tokens` and `training.tokens_per_parameter` accept only tokens.
    return with_keys(run, {"training.steps": steps, key: None})


def _list_lengths(run: Run) -> Iterator[tuple[str, int]]:
    """Yield the lengths in tokens that a job sets: key and number of tokens."""
    training = run.job.training
    if training.tokens is not None:
        yield "training.tokens", training.tokens
    if training.tokens_per_parameter is not None:
        num_tokens = int(training.tokens_per_parameter * num_params(run.arch))
        yield "training.tokens_per_parameter", num_tokens
    for key in KEYS:
        value = attrgetter(key)(run.job)
        if isinstance(value, str):
            yield key, parse_tokens(value)


def _find_repeated_length(run: Run) -> list[Problem]:
    """Return a problem if a job sets the length of the run more than once."""
    training = run.job.training
    names = [name for name in LENGTH_KEYS if name in training.model_fields_set]
    names = [name for name in names if getattr(training, name) is not None]
    if len(names) < 2:
        return []
    text = f"is not used with training.{names[1]}. Remove training.{names[0]}."
    return [Problem(f"training.{names[0]}", text)]
