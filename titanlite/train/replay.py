"""Recompute steps of a run from an earlier checkpoint, for `titanlite replay`.

Invariant: State, data and computation are the same as in the run, so on the same layout the metrics
are bitwise equal. Steps that cannot be reproduced are rejected. A replay changes no file of the
run, which may continue in the meantime.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from titanlite.config.errors import UserError
from titanlite.config.job_diff import COMPATIBLE, compare_jobs
from titanlite.config.registry import HOOKS
from titanlite.config.run import Run, with_keys
from titanlite.config.schema import JobConfig
from titanlite.data.loader import OutOfData
from titanlite.hooks.checkpoints import create_checkpoint_context, create_resumer
from titanlite.hooks.guards import build_guards
from titanlite.observe.logged_step import LoggedStep
from titanlite.optim.schedule import learning_rate_at
from titanlite.report.run_files import JsonObject, read_json_lines
from titanlite.runtime.logging import EVENTS_FILE, Event, note
from titanlite.train.trainer import Trainer

# Keys of a job, by section. True means all keys of the section.
LEARNING_RATE_KEYS = {"optimizer": {"lr"}, "lr_scheduler": True, "training": {"steps"}}
KEYS_WITHOUT_EFFECT = {
    "job": {"hooks"},
    "guards": {"max_skipped", "max_roll_backs", "compare_every"},
}
NO_LAST_STEP = 10**9


class Start(NamedTuple):
    """A start of a run, and the range of its steps that no later start has trained again.

    A run that is interrupted and resumed has several starts.

    Attributes:
        first_step: First step that was trained after this start.
        last_step: Step from which the next start resumed, or `NO_LAST_STEP` for the newest start.
        job: Job of the run at this start.
        hooks: Names of the plugin hooks that may have changed weights or gradients.
    """

    first_step: int
    last_step: int
    job: JobConfig
    hooks: list[str]


class History(NamedTuple):
    """The starts and rollbacks of a run that led to its current weights.

    Events that later training replaced are left out. For example, if a run resumed from step 80, an
    earlier rollback at step 90 is left out.

    Attributes:
        starts: Starts in order.
        roll_backs: Steps after which the spike guard restored the weights of an earlier checkpoint.
    """

    starts: list[Start]
    roll_backs: list[int]


def read_history(folder: Path) -> History:
    """Read from events.jsonl the starts and rollbacks that led to the current weights of a run.

    Args:
        folder: Output folder of the run.
    """
    start_events, roll_backs = _read_events(folder)
    starts = []
    for event, next_event in zip_longest(start_events, start_events[1:]):
        # A start trains up to the step from which the next start resumes.
        last_step = NO_LAST_STEP if next_event is None else next_event["step"]
        environment = event["record"]
        job, _ = JobConfig.read(environment["job"])
        hooks = environment.get("hooks", list(job.job.hooks))
        starts.append(Start(event["step"] + 1, last_step, job, hooks))
    return History(starts, roll_backs)


def _read_events(folder: Path) -> tuple[list[JsonObject], list[int]]:
    """Read the start events of a run and the steps of its rollbacks from events.jsonl.

    Omit events of steps that the run later trained again. For example, if it trains 100 steps and
    then resumes from step 80, a rollback at step 90 is omitted.

    Returns:
        The events of the starts, and the steps after which the run rolled back.
    """
    start_events: list[JsonObject] = []
    rollback_steps: list[int] = []
    for event in read_json_lines(folder / EVENTS_FILE, []):
        kind = event.get("event")
        step = event.get("step")
        if not isinstance(step, int):
            continue

        if kind == "roll back":
            rollback_steps.append(step)
        elif kind == "start" and "record" in event:
            # The run resumed from `step`, so drop everything that happened after this step. A
            # rollback after exactly this step counts, because the resumed weights contain it.
            rollback_steps = [rollback for rollback in rollback_steps if rollback <= step]
            # Also drop an earlier start from this step, because all its steps are trained again.
            start_events = [start for start in start_events if start["step"] < step]
            start_events.append(event)
    return start_events, rollback_steps


def check_history(history: History, job: JobConfig, loaded_step: int, step: int) -> None:
    """Check that a replay from a checkpoint up to `step` can reproduce the steps of the run.

    Args:
        history: Starts and rollbacks of the run.
        job: Job of the replay.
        loaded_step: Step of the loaded checkpoint, or 0 for the initial weights.
        step: Last step to replay.

    Raises:
        UserError: If, between `loaded_step` and `step`, the run rolled back, used other options, or
            had plugin hooks that may have changed weights or gradients.
    """
    prefix = f"--step {step}: the newest earlier checkpoint is from step {loaded_step}, and"
    if loaded_step == 0:
        prefix = f"--step {step}: no earlier checkpoint is left, and"

    for roll_back in history.roll_backs:
        if loaded_step < roll_back < step:
            raise UserError(
                f"{prefix} the run rolled back after step {roll_back} to a checkpoint "
                f"that no longer exists. Replay a step up to {roll_back}, or after a later "
                "checkpoint."
            )

    # Check the starts that trained any of the replayed steps.
    replayed_starts = [
        start
        for start in history.starts
        if start.first_step <= step and start.last_step > loaded_step
    ]
    for start in replayed_starts:
        first = max(start.first_step, loaded_step + 1)
        last = min(start.last_step, step)
        steps = f"steps {first} to {last}"
        # Ignore the learning rate of `step`, because the step computes its loss before the update.
        changes = compare_computations(start.job, job, first, min(last, step - 1))
        if changes:
            remedy = "Pass the original options to the command."
            if len(replayed_starts) > 1:
                last_unchanged = replayed_starts[0].last_step
                remedy = f"Replay a step before the job changed, such as {last_unchanged}."
            changed = "\n  ".join(changes)
            raise UserError(
                f"{prefix} {steps} were trained with other options:\n  {changed}\n{remedy}"
            )

        hooks = [name for name in start.hooks if not _observes_only(name)]
        if hooks:
            raise UserError(
                f"{prefix} hooks may have changed {steps}: {', '.join(hooks)}. "
                "A replay runs without hooks. If a hook never changes weights, optimizer state or "
                "gradients, set observes_only = True in its class."
            )


def compare_computations(before: JobConfig, now: JobConfig, first: int, last: int) -> list[str]:
    """List the differences between two jobs that affect the results of a range of steps.

    Learning rate options are ignored if both jobs have the same learning rate at each step of the
    range.

    Args:
        before: Job that trained the steps.
        now: Job of the replay.
        first: First step of the range.
        last: Last step of the range.

    Returns:
        One line of text for each option that differs.
    """
    ignored_keys = KEYS_WITHOUT_EFFECT
    steps = range(first, last + 1)
    if all(learning_rate_at(before, step) == learning_rate_at(now, step) for step in steps):
        ignored_keys = KEYS_WITHOUT_EFFECT | LEARNING_RATE_KEYS

    old_values = before.model_dump(mode="json", exclude=ignored_keys)
    new_values = now.model_dump(mode="json", exclude=ignored_keys)
    return [line for effect, line in compare_jobs(old_values, new_values) if effect != COMPATIBLE]


def _observes_only(hook: str) -> bool:
    """Return whether a registered hook declares that it never changes the training state.

    The training state consists of weights, optimizer state and gradients. For a hook that is not
    registered, return False.

    Args:
        hook: Name under which the hook is registered.
    """
    return hook in HOOKS and getattr(HOOKS[hook], "observes_only", False)


class ReplayTrainer(Trainer):
    """Recomputes steps of a run, starting from its newest valid checkpoint before a given step.

    Unlike `Trainer`, it writes no file, logs to standard error, and uses the guards as its only
    hooks.
    """

    def __init__(self, run: Run, saved_job: JobConfig, step: int) -> None:
        """Build the trainer, and load the checkpoint.

        Args:
            run: Run with the options of the replay, such as `log_freq = 1`.
            saved_job: Original job of the run, without the options of the replay. It is compared
                with the jobs of the checkpoints.
            step: Last step to replay. The checkpoint is from an earlier step.
        """
        self._saved_job = saved_job
        self._last_step = step
        super().__init__(run, hooks=build_guards(), standard=False)

    def load_checkpoint(self) -> None:
        """Load the newest valid checkpoint before the last step to replay, or the initial weights.

        Raises:
            UserError: If the steps since the checkpoint cannot be reproduced: the run rolled back
                in between, had other options, or used hooks that may have changed the weights.
        """
        # The checkpoint must fit the original job, not the options of the replay.
        context = create_checkpoint_context(self, self._saved_job)
        resumer = create_resumer(self, context)
        self._resources.callback(context.ranks.close)  # called when the trainer is closed

        state = resumer.load_before(self._last_step)  # loads the tensors
        if state is None:
            resumer.load_initial_weights()
        else:
            self.load_state_dict(state)  # everything else, such as the step and the data position

        # Check that all steps from here on can be reproduced. The first of them is known only now,
        # because invalid checkpoints are skipped.
        history = context.ranks.run_on_rank0(lambda: read_history(self.run.dump_folder))
        check_history(history, self._saved_job, self.steps_done, self._last_step)

    def log(self, line: str | Event) -> None:
        """Print a line on standard error, on rank 0."""
        if self.rank == 0:
            note(str(line))

    def warn(self, line: str) -> None:
        """Discard warnings. They only concern saved states of hooks that a replay does not run."""


def replay(run: Run, step: int) -> list[LoggedStep]:
    """Recompute the steps of a run up to `step`, from the newest valid checkpoint before `step`.

    Use this to reproduce a loss spike, for example. All ranks must call it together.

    Args:
        run: Run to replay, with the number of ranks of the original run.
        step: Last step to recompute.

    Returns:
        The metrics of each computed step.

    Raises:
        UserError: If the run has no step `step`, the steps cannot be reproduced, or the data cannot
            be read.
    """
    num_steps = run.job.training.steps
    if step > num_steps:
        raise UserError(f"--step {step}: the run has only {num_steps} steps (training.steps)")

    # Log every step. A guard may have ended the run because too many steps were skipped, but the
    # replay must reach `step` even if it skips all steps.
    replay_run = with_keys(run, {"metrics.log_freq": 1, "guards.max_skipped": step})
    entries: list[LoggedStep] = []
    with ReplayTrainer(replay_run, run.job, step) as trainer:
        while trainer.steps_done < step:
            try:
                entry = trainer.step()
            except OutOfData as end:
                raise UserError(f"The data ends before step {step}: {end}.") from None
            assert entry is not None  # because each step is logged
            entries.append(entry)
    return entries
