"""What a signal asks for. All ranks obey it after the step that follows: see tests/test_train.py for real runs."""

import os
import signal
from collections.abc import Iterator

import pytest

from titanlite.runtime.process import STOP_SIGNALS
from titanlite.runtime.signals import SAVE, Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, SAVE)}
    taken = Signals()
    taken.catch()
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_request_to_stop_is_kept_and_an_interrupt_after_it_ends_at_once(
    signals: Signals, number: signal.Signals
) -> None:
    assert signals.stop == 0
    os.kill(os.getpid(), number)
    if number != signal.SIGINT:  # a scheduler says it to the launcher, too, which passes it on
        os.kill(os.getpid(), number)
    assert signals.stop == number
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_request_to_save_is_taken_once(signals: Signals) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    assert [signals.take_save() for _ in range(3)] == [True, False, False]
    assert signals.stop == 0
