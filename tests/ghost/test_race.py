"""The race detector: it reports planted races and removed waits, and no race in training jobs.

docs/internals/ghost.md describes what it can find. The jobs of test_ghost.py also run with the
detector.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ghost.planted import RACES
from ghost.removed_waits import REMOVED_WAITS
from ghost.test_ghost import HYBRID, SMALL, ghost

FOLDER = Path(__file__).parent
pytestmark = [pytest.mark.ghost, pytest.mark.slow, pytest.mark.xdist_group("ghost")]
PINNED = "--checkpoint.interval 1 --checkpoint.async_mode async_with_pinned_mem"
RUNS = {
    "saves, EMA, guards, validation": (
        f"{PINNED} {HYBRID} 1 --guards.compare_every 1 --ema.decay 0.9 --validation.freq 2 "
        "--validation.holdout 0.1 --samples.freq 3 --samples.prompts def"
    ),
    "rollback while staging": (
        f"{PINNED} --job.plugins rolling --job.hooks roll_back --ema.decay 0.9"
    ),
    "offloaded Muon": f"{PINNED} --optimizer.name Muon --training.enable_cpu_offload",
}
PLUGIN = """
from titanlite import register
from titanlite.hooks.hook import Hook


@register("hook", "roll_back")
class RollBack(Hook):
    def built(self, trainer):
        self.trainer = trainer

    def check(self, step, request):
        if step > 1:
            assert self.trainer.checkpointer.roll_back(step) == step - 1
"""


@pytest.fixture(scope="session")
def count(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return `count(program, ranks)`, which runs a program and returns its alarms by name."""

    @cache
    def run(program: str, ranks: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("race")
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
@pytest.mark.parametrize("name", REMOVED_WAITS)
def test_a_removed_wait_is_reported(count: Any, name: str):
    for alarms in count("removed_waits.py", 2):
        assert (alarms[name] > 0) == (name != "none")


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_saves_and_rolls_back_has_no_race(tmp_path: Path, name: str):
    (tmp_path / "rolling.py").write_text(PLUGIN)
    options = f"{SMALL} {RUNS[name]} --training.steps 5 --job.dump_folder {tmp_path / 'run'}"
    launch = ["python", "-m", "titanlite", "launch", *options.split()]

    ghost(*launch, ranks=2, race=tmp_path / "race", plugins=tmp_path)

    logs = [path.read_text() for path in tmp_path.glob("race.*")]
    is_complete = re.compile(r"^SUMMARY.* allocations \d{4}", re.MULTILINE)

    assert len(list(filter(is_complete.search, logs))) == 2
    assert not [log for log in logs if "ALARM" in log]
