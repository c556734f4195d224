"""A signal is obeyed by all ranks after the step that follows it: see tests/test_train.py for real runs."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from titanlite.runtime.process import STOP_SIGNALS
from titanlite.runtime.signals import SAVE, Requests, Signals


@pytest.fixture
def signals(tmp_path: Path) -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, SAVE)}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield Signals(dist.group.WORLD)
    dist.destroy_process_group()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_request_to_stop_is_obeyed_one_step_later(signals: Signals, number: signal.Signals) -> None:
    assert signals.agreed(False) == Requests()
    os.kill(os.getpid(), number)
    if number != signal.SIGINT:  # a scheduler says it to the launcher, too, which passes it on
        os.kill(os.getpid(), number)
    assert signals.agreed(False) == Requests()  # what the ranks said a step before
    assert signals.agreed(False) == Requests(stop=number.name)


def test_a_request_to_save_is_obeyed_once(signals: Signals) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    assert [signals.agreed(False).save for _ in range(4)] == [False, True, False, False]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_an_interrupt_after_a_request_to_stop_ends_at_once(signals: Signals, first: signal.Signals) -> None:
    os.kill(os.getpid(), first)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signals.agreed(False) == Requests()
