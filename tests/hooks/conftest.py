import signal
from collections.abc import Iterator

import pytest

from titanlite.runtime.process import stop_signals


@pytest.fixture
def single_rank(one_rank, monkeypatch) -> Iterator[None]:
    """Set up this process as the only rank of a run, so that a test can call `train_small`."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    numbers = (*stop_signals(), signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    # A trainer that gets a device, as in `small_trainer`, does not restore these handlers.
    for number, handler in handlers.items():
        signal.signal(number, handler)
