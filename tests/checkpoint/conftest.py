import pytest
from tiny_run import TinyRun


@pytest.fixture
def two_saved(tmp_path):
    """A run that saved at steps 2 and 4."""
    run = TinyRun()
    manager = run.manager(tmp_path)
    for _ in range(2):
        run.train(2)
        manager.save(run.step, run.train_state())
    return tmp_path, run
