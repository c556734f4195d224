import pytest
from tiny_run import TinyRun


@pytest.fixture
def saved_run(tmp_path) -> TinyRun:
    """Return a run that saved steps 2 and 4 in `tmp_path`."""
    run = TinyRun()
    checkpoints = run.checkpoints(tmp_path)
    for _ in range(2):
        run.train(2)
        checkpoints.save(run.step)
    return run
