"""Let all ranks agree on the actions after a step: stop, save, validate, or finish the run."""

from __future__ import annotations

import functools
import operator
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite.hooks.hook import Request
from titanlite.runtime.world import gathered

REQUEST_DELAY = {"cpu": 0, "cuda": 1}
"""Number of steps between submitting a request and receiving it on all ranks, by device type.

When a run on a GPU ends, the last submitted request is dropped.
"""


class RequestExchange:
    """Exchanges requests for actions, such as a save, between all ranks.

    Ranks must agree on the actions after a step, because saves and validations use collectives. In
    most steps, no rank has a request. To avoid an extra collective, the all-reduce of the gradient
    norm also counts the ranks with a request. The ranks gather their requests only if this count is
    not 0.

    On a CPU, a request that is submitted during a step is received after this step. On a GPU, it is
    received after the next step: the CPU launches the next step before it waits for the count, so
    that the GPU always has work. The request must therefore be submitted one step early:

        when          | CPU (`delay` 0)               | GPU (`delay` 1)
        before step 1 |                               | submit for step 1
        in step 1     | submit and receive for step 1 | submit for step 2, receive for step 1
        in step 2     | submit and receive for step 2 | submit for step 3, receive for step 2

    Before step 1, the trainer submits one more request and receives it at once, to end the run if a
    rank has a stop signal or cannot read its data. Requests that are submitted before step 1 have
    no count, so the ranks always gather them.

    Attributes:
        delay: Number of steps between submitting and receiving a request: 0 on a CPU, 1 on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare to exchange requests between all ranks.

        Args:
            device: Device of this rank. On a GPU, requests are received one step later.
        """
        self.delay = REQUEST_DELAY[device.type]
        self._queue = deque[_QueuedRequest]()

    def submit(self, request: Request, num_requests: Tensor | None = None) -> None:
        """Queue a request of this rank. `receive` combines it with the requests of all other ranks.

        Args:
            request: Request of this rank. In most steps it is empty.
            num_requests: Number of ranks, including this one, whose request is not empty. A scalar
                on the device that the training step has all-reduced. If it is 0, `receive` does not
                gather the requests. If it is None, `receive` always gathers them.
        """
        if num_requests is None:
            self._queue.append(_QueuedRequest(request))
            return

        # Start to copy the number to the CPU, but do not wait for it until `receive`.
        count = num_requests.to("cpu", non_blocking=True)
        copied = None
        if num_requests.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._queue.append(_QueuedRequest(request, count, copied))

    def receive(self) -> Request:
        """Combine the requests that the ranks have submitted for a step, and return the result.

        Calls return the requests in the order in which they were submitted. All ranks must call
        this together, and all receive the same result. The CPU waits for the step during which the
        requests were submitted, because the all-reduce in that step counts them. On a GPU, this is
        the step before the newest one, so the GPU has work during the wait.
        """
        queued = self._queue.popleft()
        if queued.copied is not None and not queued.copied.query():
            queued.copied.synchronize()
        if queued.count is not None and queued.count.item() == 0:
            return Request()

        requests = gathered(queued.request)
        return functools.reduce(operator.or_, requests)


class _QueuedRequest(NamedTuple):
    """A request of this rank that `receive` has not exchanged yet.

    Attributes:
        request: Actions, such as a save, that this rank has requested from all ranks.
        count: CPU tensor with the number of ranks that requested an action. None if it is unknown,
            as before the first step.
        copied: CUDA event that completes when `count` has been copied from the GPU. None on a CPU.
    """

    request: Request
    count: Tensor | None = None
    copied: torch.cuda.Event | None = None
