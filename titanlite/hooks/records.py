"""Write the output files of a run on rank 0: locks, log, metrics and a description of each start.

Invariant: At most one run uses a folder at a time. Describing a start needs no collective and reads
no training data. It works without git: a hash of the package files shows whether the code changed.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from titanlite import __version__
from titanlite.config.errors import ERROR_FOLDER, UserError
from titanlite.config.job_diff import flatten
from titanlite.config.load import PACKAGE
from titanlite.config.run import Run
from titanlite.hooks.hook import Hook
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.metrics_loggers import MetricsLogger, RunStart, open_metrics_loggers
from titanlite.observe.outputs import OutputFolder, read_environment
from titanlite.runtime.folder_lock import LOCK_TIMEOUT, lock_folder
from titanlite.runtime.logging import LOG_FILE, LOGGER_NAME, Event, failed_writes, setup_logging
from titanlite.runtime.rank_group import RankGroup

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer

PACKAGES = ("torch", "torchao", "numpy", "tokenizers", "tiktoken")
GIT_SECONDS = 5.0


def lock_folders(run: Run, log: Callable[[str], None], resources: ExitStack) -> str:
    """Lock the output folder and the checkpoint folder, and return a new random ID for the run.

    While they are locked, no other run can write to them. All ranks must call this together, before
    anything is written. Only rank 0 takes the locks and chooses the ID, which all ranks return.

    Args:
        run: The run that will write to the folders.
        log: Function that logs a line, for example while waiting for a lock.
        resources: Stack that releases the locks when it closes.

    Raises:
        UserError: If another run uses one of the folders, or if one is not writable.
    """
    ranks_timeout = run.job.comm.init_timeout_seconds
    # Rank 0 gives up before the other ranks, which wait for it, reach their timeout.
    lock_timeout = min(LOCK_TIMEOUT, ranks_timeout / 2)

    def lock_and_choose_id() -> str:
        for folder in _list_folders_to_lock(run):
            descriptor = lock_folder(folder, lock_timeout, log)
            if descriptor is not None:  # None: the file system does not support locks
                resources.callback(os.close, descriptor)  # closing the file releases the lock
        return secrets.token_hex(8)

    ranks = RankGroup(ranks_timeout)
    run_id = ranks.run_on_rank0(lock_and_choose_id)
    # Not in a `finally` block: after an error, this would wait for ranks that may have failed.
    ranks.close()
    return run_id


def _list_folders_to_lock(run: Run) -> list[Path]:
    """Return the paths to pass to `lock_folder` to lock the output and checkpoint folders.

    `lock_folder` creates a lock file beside each path. For the output folder "out", return
    "out/run", which need not exist, so that the lock file, "out/.run.lock", is inside the folder.
    """
    folders = [run.dump_folder / "run"]
    if run.job.checkpoint.enable:
        folders.append(run.checkpoint_folder)  # may be outside the output folder
    return folders


class Records(Hook):
    """Writes the log, the metrics and environment.json of a run. Only rank 0 writes files."""

    def __init__(self, trainer: Trainer) -> None:
        """Open the log in the output folder. The run must already hold the lock on this folder."""
        self._trainer = trainer
        self._metrics_loggers: list[MetricsLogger] = []
        self._failed: Counter[str] = Counter()  # number of failed calls by metrics logger
        if trainer.rank != 0:
            return
        folder = trainer.run.dump_folder
        self._outputs = OutputFolder(folder)
        setup_logging(0, folder / LOG_FILE)
        error_folder = os.environ.get(ERROR_FOLDER)
        if error_folder:
            # Store the path of train.log, so that the launcher can log hangs and failures there.
            path = (folder / LOG_FILE).absolute()
            Path(error_folder, LOG_FILE).write_text(str(path), encoding="utf-8")

    def started(self, step: int) -> None:
        """Prepare the output files for a run that starts or resumes, and log the start.

        If the run resumes, append to the existing files and log how the environment has changed
        since the previous start. If it starts from scratch, archive existing files.

        Args:
            step: Step of the checkpoint that was loaded, or 0.

        Raises:
            UserError: If the files cannot be written, or if a metrics logger cannot start.
        """
        trainer = self._trainer
        run = trainer.run
        if trainer.rank != 0:
            return

        # Read the environment of the previous start now, because `prepare` overwrites the file.
        previous_environment = read_environment(run.dump_folder)
        environment = describe_environment(trainer)
        resumed_step = step if trainer.resumed else None
        try:
            archive_note = self._outputs.prepare(run.job, environment, resumed_step)
            if archive_note:
                trainer.log(archive_note)
            self._metrics_loggers = open_metrics_loggers(RunStart(run, step, environment))
        except OSError as error:
            raise UserError(f"{run.dump_folder}: cannot write the output files: {error}") from None

        # Log the start last, because the run ends if a metrics logger cannot start.
        trainer.log(self._describe_start(step, previous_environment, environment))

    def _describe_start(
        self, step: int, previous: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> Event:
        """Create the event that is logged when training starts or resumes.

        If the run resumes, the text of the event lists how code, packages and hardware have changed
        since the previous start.

        Args:
            step: Step of the checkpoint that was loaded, or 0.
            previous: Content of environment.json at the previous start, or {}.
            environment: Content of environment.json at this start.
        """
        text = f"Training starts after step {step}" if step else "Training starts from scratch"
        details: dict[str, Any] = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "record": environment,
        }

        is_same_run = previous.get("run") == self._trainer.run_id
        if is_same_run:
            changes = find_differences(previous, environment)
            details["changed"] = changes
            # Omit changes to the job and the data, which were logged when the checkpoint was
            # loaded. Each line starts with a key, such as "job.training.steps".
            new_changes = [line for line in changes if not line.startswith(("job.", "data."))]
            if new_changes:
                text = "\n".join([f"{text}; changed since the previous start:", *new_changes])
        return Event(text, "start", step, details)

    def numbers(self, step: int) -> dict[str, Any]:
        """Return the metric `failed_writes`: the number of failed writes of metrics and logs."""
        return {"failed_writes": self._failed.total() + failed_writes()}

    def logged(self, entry: LoggedStep) -> None:
        """Send the metrics of a step to all metrics loggers and log a line with the main ones."""
        self._call_loggers(lambda metrics_logger: metrics_logger.logged(entry))
        total_steps = str(self._trainer.run.job.training.steps)
        parts = [
            f"step {entry.step:>{len(total_steps)}}/{total_steps}",
            f"loss {entry.loss:.4f}",
            f"grad_norm {entry.grad_norm:.3f}",
            f"lr {entry.lr:.2e}",
            f"{entry.tps:,.0f} tokens/s",
            f"{entry.memory:.2f} GiB",
            f"eta {timedelta(seconds=round(entry.eta))}",
        ]
        if entry.mfu is not None:
            parts.insert(-2, f"mfu (causal) {entry.mfu:.1%}")
        # Log the line last. When a reader sees it, the step is already in all files.
        self._trainer.log("  ".join(parts))

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """Send the validation score of the weights after `step` to all metrics loggers."""
        self._call_loggers(lambda metrics_logger: metrics_logger.validated(step, score))

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send the texts that the model generated after `step` to all metrics loggers."""
        self._call_loggers(lambda metrics_logger: metrics_logger.sampled(step, samples))

    def close(self) -> None:
        """Close the metrics loggers."""
        self._call_loggers(lambda metrics_logger: metrics_logger.close())

    def _call_loggers(self, call: Callable[[MetricsLogger], None]) -> None:
        """Apply `call` to every metrics logger, and continue if one of them raises OSError.

        Each failure is counted in the metric `failed_writes`. Only the first failure of a logger
        also logs a warning.
        """
        for metrics_logger in self._metrics_loggers:
            try:
                call(metrics_logger)
            except OSError as error:
                name = type(metrics_logger).__name__
                if name not in self._failed:
                    text = f"{name} cannot write its metrics; training continues: {error}"
                    logging.getLogger(LOGGER_NAME).warning(text)
                self._failed[name] += 1


def describe_environment(trainer: Trainer) -> dict[str, Any]:
    """Describe how the run was launched: code, hardware, data, hooks and options.

    The result is written to environment.json. A resumed run logs how it differs from the previous
    launch.
    """
    return {
        "run": trainer.run_id,
        "code": describe_code(),
        "python": platform.python_version(),
        "packages": {"titanlite": __version__} | {name: version(name) for name in PACKAGES},
        "device": _get_device_name(trainer.device),
        "world_size": trainer.run.world_size,
        "layout": asdict(trainer.run.degrees),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "hosts": sorted(set(trainer.hosts)),
        "data": _list_fingerprints(trainer),
        "hooks": _list_plugins(trainer.hooks),
        "job": trainer.run.job.model_dump(mode="json", exclude_defaults=True),
    }


def _list_fingerprints(trainer: Trainer) -> dict[str, str]:
    """Return the fingerprints of the tokenizer and of all data sources of the run.

    The keys are "tokenizer" and the names of the sources. If several sources have the same name,
    concatenate their fingerprints.
    """
    fingerprints = {"tokenizer": trainer.tokenizer.fingerprint}
    for source in trainer.loader.sources:
        fingerprints[source.name] = fingerprints.get(source.name, "") + source.fingerprint
    return fingerprints


def _get_device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _list_plugins(hooks: Sequence[Hook]) -> list[str]:
    """Return the names of plugin hooks that may change weights, optimizer state or gradients.

    `titanlite replay` runs without plugin hooks, so it cannot reproduce steps trained with them.
    """
    names = []
    for hook in hooks:
        is_builtin = type(hook).__module__.startswith("titanlite.")
        if not is_builtin and not hook.observes_only:
            names.append(hook.name or type(hook).__name__)
    return names


def find_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the changes between two versions of environment.json, for the log.

    Each change is a line such as "packages.torch: 2.12.0 -> 2.13.0". Ignore top-level keys that
    only `now` has, because older titanlite versions did not write them.

    Args:
        before: Content at the previous start of the run.
        now: Content at this start.
    """
    # Convert keys of nested tables to names such as "packages.torch".
    old = flatten(before)
    new = flatten({key: value for key, value in now.items() if key in before})

    differences = []
    for key in old | new:
        if old.get(key) != new.get(key):
            differences.append(f"{key}: {old.get(key, 'none')} -> {new.get(key, 'none')}")
    return differences


def describe_code(package: Path = PACKAGE) -> dict[str, str]:
    """Identify the version of the code in the folder `package`.

    Returns:
        A dictionary with these keys:

        - "files": Hash of the names and contents of all Python files.
        - "commit": Current git commit, with the suffix "-dirty" if a file has uncommitted changes.
          Missing outside a git clone.
    """
    digest = xxhash.xxh3_64()
    for file in sorted(package.rglob("*.py")):
        if file.is_file():  # skip lock files of editors, which are broken links
            name = os.fsencode(file.relative_to(package))
            digest.update(name + b"\0" + file.read_bytes())

    code = {"files": digest.hexdigest()}
    commit = _read_git_commit(package.parent)
    if commit is not None:
        code["commit"] = commit
    return code


def _read_git_commit(repository: Path) -> str | None:
    """Return the current commit of a git clone, with "-dirty" if there are uncommitted changes.

    Return None if git is not installed, takes too long, or the folder is not a clone.
    """
    # Ignore GIT_* variables and repositories in parent folders.
    location = [f"--git-dir={repository / '.git'}", f"--work-tree={repository}"]
    # Start no background process and take no lock.
    settings = ["-c", "core.fsmonitor=false", "--no-optional-locks"]
    # Without tags, `git describe` prints the commit.
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            ["git", *location, *settings, *describe],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
