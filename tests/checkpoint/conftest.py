from pathlib import Path

import pytest
from tiny_run import TinyRun


@pytest.fixture
def two_saved(tmp_path) -> tuple[Path, TinyRun]:
    """Return the checkpoint folder of a run that saved at steps 2 and 4, and the run."""
    run = TinyRun()
    checkpoints = run.checkpoints(tmp_path)
    for _ in range(2):
        run.train(2)
        checkpoints.save(run.step)
    return tmp_path, run
