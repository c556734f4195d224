"""A run that is killed at any moment and restarted ends bitwise equal to an undisturbed run.

Each test is one run that is killed several times. The points of a save are distributed over the
layouts. With TITANLITE_KILLS=N (see `benchmarks/kill.sh`), every layout is killed at every point
and N times at random moments. Functions that save and validate are wrapped to reach these points.
SIGKILL runs no handler and flushes nothing, like a node that fails.
"""

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import World, descendants, start_small
from small_runs import list_saved_steps, read_jsonl, read_metrics

from titanlite.checkpoint import dcp, manifest
from titanlite.config.files import INCOMPLETE
from titanlite.hooks.validation import Validator

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kill")]

OPTIONS = (
    "--training.steps 8 --training.seq_len 32 --training.local_batch_size 1 "
    "--training.global_batch_size 2 --checkpoint.interval 2 --checkpoint.keep_latest_k 1 "
    "--validation.freq 2 --validation.holdout 0.02 --validation.sequences 2 "
    "--dataset.num_workers 1"
)
LONG = "TITANLITE_KILLS" in os.environ
# Number of random kills over all layouts.
RANDOM_KILLS = int(os.environ.get("TITANLITE_KILLS", "4"))
SEED = int(os.environ.get("TITANLITE_KILL_SEED", "0"))

# Files that this process could not write to the full disk.
FULL: list[str] = []
# One item per validation of this process.
VALIDATIONS: list[Validator] = []
LAYOUTS = [(1, "disabled"), (1, "async"), (2, "disabled"), (2, "async")]
SAMPLE = LAYOUTS if LONG else LAYOUTS[1:3]
# Kill points, divided between the two layouts of the sample.
KILL_POINTS = [
    ("before_data:0", "within_file:{last}", "before_rename:0"),
    ("within_file:0", "before_manifest:0", "after_rename:0", "during_purge:0"),
]


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(
    owner: Any,
    name: str,
    before: Callable[..., None],
    after: Callable[..., None] = lambda *_: None,
) -> None:
    original = getattr(owner, name)

    def wrapped(*args, **keys):
        before(*args)
        result = original(*args, **keys)
        after(*args)
        return result

    setattr(owner, name, wrapped)


def kill_within_file(file: manifest.HashingFile, _data: object) -> None:
    if file.tell() > 200_000:
        file.flush()
        kill()


def kill_within_removal(path: Path, *_: object) -> None:
    if path.suffix == ".distcp" and (path.parent / INCOMPLETE).exists():
        kill()


def kill_between_manifest_and_name(path: Path) -> None:
    if path.name.startswith(manifest.TMP_PREFIX):
        kill()


def kill_in_second_validation(validator: Validator) -> None:
    """Die in the second validation of this process.

    The first one runs at the start: for step 0, or for the loaded step if this was missing.
    """
    VALIDATIONS.append(validator)
    if len(VALIDATIONS) == 2:
        kill()


def fill_disk_once(file: manifest.HashingFile, _data: object) -> None:
    """Fail the first large write with a full disk."""
    if file.tell() > 200_000 and not FULL:
        FULL.append(file.name)
        file.error = OSError(28, "No space left on device")
        raise file.error


# Name of a point -> arguments of `wrap`
POINTS: dict[str, tuple[Any, ...]] = {
    "before_data": (dcp.CheckpointWriter, "write_data", kill),
    "within_file": (manifest.HashingFile, "write", kill_within_file),
    "before_manifest": (manifest, "encode_manifest", kill),
    "before_rename": (manifest, "sync", kill_between_manifest_and_name),
    "after_rename": (dcp, "publish_checkpoint", lambda *_: None, kill),
    "during_purge": (Path, "unlink", kill_within_removal),
    "before_validation": (Validator, "compute_score", kill_in_second_validation),
    "full_disk": (manifest.HashingFile, "write", fill_disk_once),
}


def prepare_kill(point: str) -> None:
    """Let this rank die at a point, given as POINT:RANK. If it is empty, do nothing."""
    name, _, rank = point.partition(":")
    if os.environ["RANK"] == rank:
        wrap(*POINTS[name])


class Run:
    """A training run in `folder` that can be started and killed repeatedly.

    Attributes:
        seconds: Duration of `finish`.
    """

    def __init__(self, folder: Path, ranks: int, mode: str, options: str = "") -> None:
        self.folder = folder
        self.ranks = ranks
        self.seconds = 0.0
        self.options = f"{OPTIONS} --checkpoint.async_mode {mode} {options}"

    def start(self, point: str = "") -> World:
        before = functools.partial(prepare_kill, point)
        return start_small(self.folder, self.options, ranks=self.ranks, before=before)

    def finish(self, point: str = "") -> str:
        started = time.monotonic()
        output = self.start(point).wait_for_exit(0)
        self.seconds = time.monotonic() - started
        return output

    def die(self, point: str) -> str:
        """Train until a rank is killed at a point, and return the output."""
        world = self.start(point)
        codes = world.wait()
        assert codes[int(point[-1])] == -signal.SIGKILL, world.output
        assert 0 not in codes, world.output
        return world.output

    def die_after(self, seconds: float) -> bool:
        """Kill all processes of the run after `seconds`. Return whether it was still running."""
        world = self.start()
        is_running = not world.exits_within(seconds)
        for process in world.processes:
            for pid in descendants(process.pid or 0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        world.close()
        return is_running

    def read_curve(self) -> dict[int, list[float]]:
        """Return the metrics of each step that must not depend on kills."""
        keys = ("loss", "grad_norm", "lr", "tokens")
        metrics = read_metrics(self.folder)
        return {step: [entry[key] for key in keys] for step, entry in metrics.items()}

    def final_state(self) -> dict[str, str]:
        """Return the checksums of the data files in the last checkpoint."""
        files = manifest.check_checkpoint(self.folder / "checkpoint" / "step-00000008")["files"]
        return {name: files[name]["xxh3_128"] for name in files if name.endswith(".distcp")}


def assert_undisturbed(run: Run, reference: Run) -> None:
    assert run.read_curve() == reference.read_curve()
    assert sorted(run.read_curve()) == list(range(1, 9))
    validations = read_jsonl(run.folder / "validation.jsonl")
    assert validations == read_jsonl(reference.folder / "validation.jsonl")
    assert run.final_state() == reference.final_state()
    assert len(run.final_state()) == run.ranks
    assert list_saved_steps(run.folder) == [8]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return the undisturbed run on a number of ranks, with synchronous saves."""

    @functools.cache
    def reference(ranks: int) -> Run:
        run = Run(tmp_path_factory.mktemp("reference") / "run", ranks, "disabled")
        run.finish()
        return run

    return reference


@pytest.mark.parametrize("layout", SAMPLE, ids=str)
def test_a_run_killed_at_any_point_of_a_save_ends_undisturbed(tmp_path, layout, references):
    ranks, mode = layout
    run = Run(tmp_path / "run", ranks, mode)
    folder = run.folder / "checkpoint"
    saved_step = 0
    unfinished = []
    points = KILL_POINTS[LAYOUTS.index(layout) % 2]
    if LONG:
        points = KILL_POINTS[0] + KILL_POINTS[1]

    for point in points:
        output = run.die(point.format(last=ranks - 1))

        if unfinished:  # by the kill before this one
            assert f"Removed the unfinished {unfinished[0].name}" in output

        if point == "during_purge:0":
            # The purge of the first checkpoint starts after the save of the second.
            saved_step = max(saved_step, 2) + 2
        elif point == "after_rename:0":
            saved_step += 2
        # A checkpoint is complete or does not exist.
        complete = [folder / manifest.step_folder_name(saved_step)] if saved_step else []
        assert manifest.list_checkpoints(folder) == complete

        unfinished = manifest.list_unfinished(folder)
        # If another rank dies, rank 0 may notice the failed save and remove it first.
        if point.endswith(":0"):
            expected_count = 0 if point == "after_rename:0" else 1
            assert len(unfinished) == expected_count, unfinished

    output = run.finish("full_disk:0")

    failure = f"Could not save step {saved_step + 2}: OSError: [Errno 28] No space left on device"
    assert failure in output
    assert_undisturbed(run, references(ranks))


def test_a_run_killed_between_a_save_and_its_validation_records_both(tmp_path):
    options = (
        "--training.steps 3 --samples.freq 1 --samples.prompts def class --samples.max_new_tokens 3"
    )
    reference = Run(tmp_path / "reference", 2, "disabled", options)
    run = Run(tmp_path / "run", 2, "disabled", options)

    reference.finish()
    for saved_step in (2, 3):
        run.die("before_validation:0")
        assert list_saved_steps(run.folder) == [saved_step]
    run.finish()

    for name in ("validation.jsonl", "samples.jsonl"):
        lines = read_jsonl(run.folder / name)
        assert lines == read_jsonl(reference.folder / name)
        assert {line["step"] for line in lines} >= {2, 3}


@pytest.mark.parametrize("layout", SAMPLE, ids=str)
def test_a_run_killed_at_random_times_ends_undisturbed(tmp_path, layout, references):
    number = LAYOUTS.index(layout)
    reference = references(layout[0])
    generator = random.Random(SEED + number)
    kills = 0
    runs = 0
    wanted = (RANDOM_KILLS + number) // len(LAYOUTS)
    while kills < wanted:
        # If a run ends before it is killed, the next run continues the count.
        runs += 1
        run = Run(tmp_path / f"run-{runs}", *layout)
        while kills < wanted and run.die_after(generator.uniform(0.3, 1.0) * reference.seconds):
            kills += 1
        run.finish()
        assert_undisturbed(run, reference)
