"""A run that is killed at any moment and restarted ends bitwise equal to an undisturbed run.

Each test is one run that is killed several times. The points of a save are distributed over the
layouts. With TITANLITE_KILLS=N (see `benchmarks/kill.sh`), every layout is killed at every point
and N times at random moments. Functions of the checkpoint package are wrapped to reach these
points. SIGKILL runs no handler and flushes nothing, like a node that fails.
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
from small_runs import losses

from titanlite.checkpoint import dcp, manifest
from titanlite.config.files import INCOMPLETE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kill")]

OPTIONS = (
    "--training.steps 8 --training.seq_len 32 --training.local_batch_size 1 "
    "--training.global_batch_size 2 --checkpoint.interval 2 --checkpoint.keep_latest_k 1"
)
LONG = "TITANLITE_KILLS" in os.environ
RANDOM_KILLS = int(os.environ.get("TITANLITE_KILLS", "4"))  # over all of LAYOUTS
SEED = int(os.environ.get("TITANLITE_KILL_SEED", "0"))

# Files of this process that found no room.
FULL: list[str] = []
LAYOUTS = [(1, "disabled"), (1, "async"), (2, "disabled"), (2, "async")]
SAMPLE = LAYOUTS if LONG else LAYOUTS[1:3]
DEALT = [
    ("before_data:0", "within_file:{last}", "before_rename:0"),
    ("within_file:0", "before_manifest:0", "after_rename:0", "during_purge:0"),
]


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(
    owner: Any, name: str, before: Callable[..., None], after: Callable[..., None] = lambda *_: None
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **keys: Any) -> Any:
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


def fill_disk_once(file: manifest.HashingFile, _data: object) -> None:
    """Fail the first large write with a full disk."""
    if file.tell() > 200_000 and not FULL:
        FULL.append(file.name)
        file.error = OSError(28, "No space left on device")
        raise file.error


POINTS: dict[str, tuple[Any, ...]] = {  # arguments of `wrap`
    "before_data": (dcp.CheckpointWriter, "write_data", kill),
    "within_file": (manifest.HashingFile, "write", kill_within_file),
    "before_manifest": (manifest, "encode_manifest", kill),
    "before_rename": (manifest, "sync", kill_between_manifest_and_name),
    "after_rename": (dcp, "publish_checkpoint", lambda *_: None, kill),
    "during_purge": (Path, "unlink", kill_within_removal),
    "full_disk": (manifest.HashingFile, "write", fill_disk_once),
}


def arm(point: str) -> None:
    """Set up the event on this rank. `point` is POINT:RANK or empty."""
    name, _, rank = point.partition(":")
    if os.environ["RANK"] == rank:
        wrap(*POINTS[name])


class Run:
    """A training run in `folder` that can be started and killed repeatedly."""

    def __init__(self, folder: Path, ranks: int, mode: str) -> None:
        self.folder = folder
        self.ranks = ranks
        self.seconds = 0.0  # that `finish` took
        self.options = [*OPTIONS.split(), "--checkpoint.async_mode", mode]

    def start(self, point: str = "") -> World:
        return start_small(
            self.folder, *self.options, ranks=self.ranks, before=functools.partial(arm, point)
        )

    def finish(self, point: str = "") -> str:
        started = time.monotonic()
        said = self.start(point).ends_with(0)
        self.seconds = time.monotonic() - started
        return said

    def die(self, point: str) -> str:
        world = self.start(point)
        codes = world.wait()
        assert codes[int(point[-1])] == -signal.SIGKILL, world.said
        assert 0 not in codes, world.said
        return world.said

    def die_after(self, seconds: float) -> bool:
        """Kill all processes of the run after `seconds`. Return False if it had already ended."""
        world = self.start()
        alive = not world.ended(seconds)
        for process in world.processes:
            for pid in descendants(process.pid or 0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        world.close()
        return alive

    def final_state(self) -> dict[str, str]:
        """Return the checksums of the data files in the last checkpoint."""
        files = manifest.check_checkpoint(self.folder / "checkpoint" / "step-00000008")["files"]
        return {name: files[name]["xxh3_128"] for name in files if name.endswith(".distcp")}


def assert_undisturbed(run: Run, reference: Run) -> None:
    assert losses(run.folder) == losses(reference.folder)
    assert sorted(losses(run.folder)) == list(range(1, 9))
    assert run.final_state() == reference.final_state()
    assert len(run.final_state()) == run.ranks
    assert os.listdir(run.folder / "checkpoint") == ["step-00000008"]


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
def test_killed_at_the_points_of_a_save(tmp_path, layout, references):
    run = Run(tmp_path / "run", *layout)
    folder = tmp_path / "run" / "checkpoint"
    saved = 0
    unfinished = []
    for point in [*DEALT[0], *DEALT[1]] if LONG else DEALT[LAYOUTS.index(layout) % 2]:
        out = run.die(point.format(last=layout[0] - 1))
        assert not unfinished or f"Removed the unfinished {unfinished[0].name}" in out
        if point == "during_purge:0":
            # The second checkpoint makes the first one superfluous.
            saved = max(saved, 2) + 2
        elif point == "after_rename:0":
            saved += 2
        # A checkpoint is complete or does not exist.
        complete = [folder / manifest.step_folder_name(saved)] if saved else []
        assert manifest.list_checkpoints(folder) == complete
        unfinished = manifest.list_unfinished(folder)
        # Else rank 0 may have noticed that a save failed.
        if point.endswith(":0"):
            assert len(unfinished) == (point != "after_rename:0"), unfinished
    out = run.finish("full_disk:0")

    assert f"Saving step {saved + 2} FAILED (OSError: [Errno 28] No space left on device)" in out
    assert_undisturbed(run, references(layout[0]))


@pytest.mark.parametrize("layout", SAMPLE, ids=str)
def test_killed_at_random_moments(tmp_path, layout, references):
    number = LAYOUTS.index(layout)
    reference, generator = references(layout[0]), random.Random(SEED + number)
    kills, runs, wanted = 0, 0, (RANDOM_KILLS + number) // len(LAYOUTS)
    while kills < wanted:
        # A run can end before it is killed.
        runs += 1
        run = Run(tmp_path / f"run-{runs}", *layout)
        while kills < wanted and run.die_after(generator.uniform(0.3, 1.0) * reference.seconds):
            kills += 1
        run.finish()
        assert_undisturbed(run, reference)
