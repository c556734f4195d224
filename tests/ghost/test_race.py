"""The race detector: it reports planted races and removed waits, and no race in training jobs.

docs/internals/ghost.md describes what it can find. The jobs of test_ghost.py also run with the
detector.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ghost.planted import RACES
from ghost.removed_waits import REMOVED_WAITS
from ghost.test_ghost import HYBRID, ghost, with_variants

FOLDER = Path(__file__).parent
pytestmark = [pytest.mark.ghost, pytest.mark.slow, pytest.mark.xdist_group("ghost")]
RUNS = with_variants(
    {
        "EMA, guards, validation": (
            f"{HYBRID} 1 --guards.compare_every 1 --ema.decay 0.9 --validation.freq 2 "
            "--validation.holdout 0.1 --samples.freq 3 --samples.prompts def"
        ),
        "rollback during a save": "--job.hooks roll_back_during_save --ema.decay 0.9",
        "offloaded Muon": "--optimizer.name Muon --training.enable_cpu_offload",
    }
) | {"rollback before a save": "--job.hooks roll_back --ema.decay 0.9"}
# Number of ranks, removed wait, and whether the detector must report it. Jobs whose name starts
# with "none" keep all waits.
REMOVALS = [
    (ranks, name, not name.startswith("none"))
    for ranks, removals in REMOVED_WAITS.items()
    for name in removals
]


@pytest.fixture(scope="session")
def count(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return `count(program, ranks)`, which runs a program and returns its alarms by name."""

    @cache
    def run(program: str, ranks: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("race")
        (folder / "runs.json").write_text(json.dumps(RUNS))  # for saving_runs.py
        start = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)]
        options = [*start, str(FOLDER / program), str(folder / "out")]
        ghost(*options, ranks=ranks, race=folder / "race")
        return [json.loads(path.read_text()) for path in folder.glob("out.*")]

    return run


@pytest.mark.parametrize("name", [race.__name__ for race in RACES])
def test_a_planted_race_is_reported_and_its_correct_version_is_not(count: Any, name: str):
    ((planted, correct),) = [alarms[name] for alarms in count("planted.py", 1)]

    assert planted > 0
    assert correct == 0


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "name", "is_reported"), REMOVALS)
def test_each_removed_wait_is_reported_and_a_job_with_all_waits_is_not(
    count: Any, ranks: int, name: str, is_reported: bool
):
    for alarms in count("removed_waits.py", ranks):
        assert (alarms[name] > 0) == is_reported


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_saves_and_rolls_back_has_no_race(count: Any, name: str):
    assert [alarms[name] for alarms in count("saving_runs.py", 2)] == [0, 0]
