import pytest


@pytest.fixture
def single_rank(one_rank, monkeypatch) -> None:
    """Let this process be the only rank, so that a test can call `train_small`."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
