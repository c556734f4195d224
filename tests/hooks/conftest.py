import signal
from collections.abc import Iterator

import pytest

from titanlite.runtime.process import stop_signals


@pytest.fixture
def single_rank(one_rank, monkeypatch) -> Iterator[None]:
    """Let this process be the only rank, so that a test can call `train_small`."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    numbers = (*stop_signals(), signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    # The handlers of a trainer that is created with a device stay after it is closed.
    for number, handler in handlers.items():
        signal.signal(number, handler)
