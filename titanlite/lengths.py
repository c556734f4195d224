"""Convert lengths in tokens, such as `training.tokens = "10B"`, to optimizer steps.

Invariant: `titanlite.load_run` converts all lengths when it builds a run. All other code, the
checkpoints and config.toml measure lengths only in steps.
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
# Lengths are converted in this order, because each may depend on earlier ones.
KEYS = ("lr_scheduler.total_steps", WARMUP, DECAY, *INTERVALS)


class TokenCounter(NamedTuple):
    """Counts the tokens in the steps of a run, including padding.

    Attributes:
        run: The run, which determines the batch size of each step.
        progress: Number of steps and sequences that the run trained before it was resumed. These
            steps may have used other batch sizes.
    """

    run: Run
    progress: Progress

    @property
    def extra_sequences(self) -> int:
        """Number of sequences trained so far in excess of what the current batch sizes give.

        A run can resume with other batch sizes. For example, if it trained 10 steps of 8 sequences
        and resumes with 6 per step, it has trained 80 - 60 = 20 extra sequences. The number is 0 if
        the batch sizes have not changed, and negative if they have increased.
        """
        sequences_now = sum(count for _, count in self.run.count_sequences(self.progress.steps))
        return self.progress.sequences - sequences_now

    def count(self, key: str, steps: int) -> int:
        """Return the number of tokens in one part of a run, such as the warmup or the decay.

        Args:
            key: Key that sets the length of the part, such as "lr_scheduler.decay_steps".
            steps: Number of steps in the part.
        """
        if key in INTERVALS:  # can be anywhere in the run, so assume the largest batch size
            return steps * self.run.largest_batch_size * self.run.job.training.seq_len
        if key == DECAY:  # ends with the schedule
            return self._count_last(steps)
        return self._count_first(steps)  # starts with the run

    def _count_last(self, steps: int) -> int:
        """Return the number of tokens in the last `steps` steps of the learning rate schedule."""
        job = self.run.job
        total = job.lr_scheduler.total_steps or job.training.steps
        # The decay can be longer than the schedule: a preview allows that, and `titanlite.rules`
        # reports it in any other job. Count the excess steps like the first steps of the run, so
        # that more steps always have more tokens, as the search in `_count_steps` requires.
        excess_steps = max(0, steps - total)
        steps_before = max(0, total - steps)
        num_tokens = self._count_first(total) - self._count_first(steps_before)
        return num_tokens + self._count_first(excess_steps)

    def _count_first(self, steps: int) -> int:
        """Return the number of tokens in the first `steps` steps of the run."""
        num_sequences = sum(count for _, count in self.run.count_sequences(steps))
        # Distribute the extra sequences evenly over the steps before the resume.
        steps_done = min(steps, self.progress.steps)
        num_sequences += self.extra_sequences * steps_done // max(self.progress.steps, 1)
        return num_sequences * self.run.job.training.seq_len


def resolve_lengths(run: Run) -> tuple[Run, list[Problem]]:
    """Convert all lengths that a job sets in tokens, such as the warmup, to optimizer steps.

    Lengths are rounded down.

    Returns:
        The run with all lengths in steps, and a list of problems, such as a length of less than one
        step. An invalid length is replaced with one step, so that the other lengths can be
        converted.
    """
    token_lengths = list(_list_token_lengths(run))
    if not token_lengths:
        return run, []

    problems = _find_repeated_length(run)
    progress = read_progress(run)  # the steps before the resume

    # Convert the lengths one by one, because each can depend on previous ones. For example, the
    # decay ends with the schedule, so its batch sizes depend on the length of the schedule.
    resolved_run = run
    for key, num_tokens in token_lengths:
        counter = TokenCounter(resolved_run, progress)
        steps = _count_steps(counter, key, num_tokens)
        is_valid = 1 <= steps <= MAX_STEPS
        if not is_valid:
            problems.append(_describe_bad_length(counter, key, steps))
            steps = 1
        resolved_run = _set_length(resolved_run, key, steps)
    return resolved_run, problems


def _count_steps(counter: TokenCounter, key: str, num_tokens: int) -> int:
    """Convert a length from tokens to steps, rounded down.

    Args:
        counter: Counts the tokens of steps.
        key: Key that sets the length, such as "lr_scheduler.warmup_steps".
        num_tokens: The length in tokens.
    """
    # Find the smallest number of steps with more than `num_tokens` tokens. Each step has at least
    # one token, so MAX_TOKENS limits the search.
    too_many_steps = bisect_right(range(MAX_TOKENS), num_tokens, key=partial(counter.count, key))
    steps = too_many_steps - 1
    return _keep_completed_warmup(counter, steps) if key == WARMUP else steps


def _keep_completed_warmup(counter: TokenCounter, steps: int) -> int:
    """Return the number of warmup steps, which must not change after the warmup has ended.

    If a run resumes with other batch sizes, the warmup tokens can correspond to a different number
    of steps, which would make the learning rate jump. If the warmup is over, return the number of
    warmup steps in the checkpoint instead of `steps`.

    Args:
        counter: Counts the tokens of steps.
        steps: Number of warmup steps according to the current batch sizes.
    """
    progress = counter.progress
    has_other_batch_sizes = counter.extra_sequences != 0
    is_warmup_over = steps <= progress.steps
    if has_other_batch_sizes and is_warmup_over:
        return progress.warmup_steps or steps
    return steps


def _describe_bad_length(counter: TokenCounter, key: str, steps: int) -> Problem:
    """Create the error for a token count that gives fewer than 1 or over `MAX_STEPS` steps."""
    tokens_per_step = counter.count(key, 1)
    limits = f"Lengths must have 1 to {MAX_STEPS:,} steps."
    return Problem(key, f"makes {steps:,} steps of {tokens_per_step:,} tokens. {limits}")


def _set_length(run: Run, key: str, steps: int) -> Run:
    """Replace a length in tokens with a length in steps, and return the new run.

    Args:
        run: The run.
        key: Key that sets the length in tokens, such as "training.tokens".
        steps: The length in steps.
    """
    if key in KEYS:
        return with_keys(run, {key: steps})
    # The other keys, `training.tokens` and `training.tokens_per_parameter`, cannot be in steps.
    return with_keys(run, {"training.steps": steps, key: None})


def _list_token_lengths(run: Run) -> Iterator[tuple[str, int]]:
    """Yield a (key, number of tokens) pair for each length that the job sets in tokens.

    For example, yield ("training.tokens", 10_000_000_000). The length of the run comes first, then
    the others in the order of `KEYS`, because their conversion to steps can depend on earlier ones.
    """
    training = run.job.training
    tokens = training.tokens
    if tokens is not None:
        num_tokens = parse_tokens(tokens) if isinstance(tokens, str) else tokens
        yield "training.tokens", num_tokens
    if training.tokens_per_parameter is not None:
        num_tokens = int(training.tokens_per_parameter * num_params(run.arch))
        yield "training.tokens_per_parameter", num_tokens

    for key in KEYS:
        length = attrgetter(key)(run.job)
        if isinstance(length, str):  # in tokens, such as "500M"; a number would be in steps
            yield key, parse_tokens(length)


def _find_repeated_length(run: Run) -> list[Problem]:
    """Check that only one key, such as `training.steps`, sets the length of the run.

    Returns:
        A list with one problem if several keys are set, otherwise [].
    """
    training = run.job.training
    set_keys = training.model_dump(exclude_unset=True, exclude_none=True)
    names = [name for name in LENGTH_KEYS if name in set_keys]
    if len(names) < 2:
        return []
    text = f"is not used with training.{names[1]}. Remove training.{names[0]}."
    return [Problem(f"training.{names[0]}", text)]
