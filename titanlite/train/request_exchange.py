"""Let all ranks agree on the actions after a step: stop, save, validate, or finish the run."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.hooks.hook import Request
from titanlite.runtime.world import gathered

REQUEST_DELAY = {"cpu": 0, "cuda": 1}
"""Number of steps by which a request is collected early, by device type; see `RequestExchange`.

When a run on a GPU ends, the last collected request is dropped.
"""


class RequestExchange:
    """Exchanges requests for actions, such as a save, between all ranks.

    Ranks must agree on the actions after a step, because saves and validations use collectives. In
    most steps, no rank has a request. To avoid an extra collective, the all-reduce of the gradient
    norm also counts the ranks with a request. The ranks gather their requests only if this count is
    not 0.

    On a GPU, the CPU launches the next step before it waits for the count of a step, so that the
    GPU always has work. It must therefore collect each request one step early:

        when          | CPU                            | GPU
        before step 1 | collect for step 1             | collect for steps 1 and 2
        after step 1  | receive for step 1             | receive for step 1
        before step 2 | collect for step 2             | collect for step 3
        after step 2  | receive for step 2             | receive for step 2
    """

    def __init__(self, collect: Callable[[int], Request], device: torch.device) -> None:
        """Prepare to exchange requests between all ranks.

        Args:
            collect: Returns the actions that this rank requests after a step. It is called once for
                each step.
            device: Device of this rank.
        """
        self._collect = collect
        self._delay = REQUEST_DELAY[device.type]
        self._collected = Request()
        self._queue = deque[_CountedRequest]()

    def collect_next(self, step: int) -> bool:
        """Collect the next request of this rank, and return whether it is not empty.

        Call this before each step is trained. On a CPU, collect the request for the actions after
        `step`. On a GPU, collect one step early: the request for the actions after `step + 1`.

        Args:
            step: Step to train next.

        Returns:
            Whether that request is not empty. Pass this to the step, which counts the ranks with
            such a request.
        """
        is_first_step_on_gpu = len(self._queue) < self._delay
        if is_first_step_on_gpu:
            # Also collect the request for this step. No earlier step has counted it, so it is
            # gathered without a count.
            first_request = self._collect(step)
            self._queue.append(_CountedRequest(first_request, count=None))

        self._collected = self._collect(step + self._delay)
        return self._collected != Request()

    def receive(self, num_requests: Tensor) -> Request:
        """Combine the requests of all ranks for a step. Call this after the step is launched.

        All ranks must call this together, and all receive the same result. The CPU waits for the
        step that counted the requests. On a GPU, this is the step before the newest one, so the GPU
        has work during the wait.

        Args:
            num_requests: Number of ranks whose last collected request is not empty. A scalar on
                the device, which the step has computed.
        """
        self._queue.append(_CountedRequest(self._collected, _CopiedNumber(num_requests)))
        request, count = self._queue.popleft()
        if count is not None and count.wait() == 0:
            return Request()
        return combine_requests(request)


class _CountedRequest(NamedTuple):
    """A request of this rank, and the number of ranks that request an action after the same step.

    Attributes:
        request: Actions that this rank requests. Empty if it requests none.
        count: Number of ranks whose request is not empty. None if no step has counted them.
    """

    request: Request
    count: _CopiedNumber | None


class _CopiedNumber:
    """A number that is being copied from the device to the CPU, while the CPU continues."""

    def __init__(self, number: Tensor) -> None:
        """Start to copy a scalar tensor to the CPU."""
        self._copy = number.to("cpu", non_blocking=True)
        self._copy_event: torch.cuda.Event | None = None
        if number.is_cuda:
            self._copy_event = torch.cuda.Event()
            self._copy_event.record()

    def wait(self) -> float:
        """Wait until the copy is complete, and return the number."""
        if self._copy_event is not None and not self._copy_event.query():
            self._copy_event.synchronize()
        return self._copy.item()


def combine_requests(request: Request) -> Request:
    """Return all actions that any rank requests. All ranks must call this together.

    Args:
        request: Actions that this rank requests, such as a save.
    """
    return functools.reduce(operator.or_, gathered(request))
