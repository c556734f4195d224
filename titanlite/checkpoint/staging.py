"""Copy the live tensors to host memory, so that training can go on while they are written.

Invariant: the copies have the values of the moment at which `stage` is called.
Nothing is allocated after the first save of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.writer_process import SharedMemory
from titanlite.config.errors import UserError


class Stager:
    """One more copy of everything that is saved, in host memory.

    Args:
        pinned: copy from the GPU beside what is computed on it. Raises UserError without a GPU.
        shared: another process reads the copies.

    Attributes:
        memory: where they lie then, after the first `stage`.
    """

    def __init__(self, *, pinned: bool, shared: bool) -> None:
        if pinned and not torch.cuda.is_available():
            raise UserError('checkpoint.async_mode = "async_with_pinned_mem" needs a GPU. Use "async" on a CPU.')
        self._shared = shared
        self._stream = torch.cuda.Stream() if pinned else None
        self._copied: Any = None  # event
        self._buffers: dict[str, Tensor] = {}
        self.memory: SharedMemory | None = None

    @torch.no_grad()
    def stage(self, tensors: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Copy, or start to. The result waits for the copies, in whichever thread it is called.

        Raises:
            OSError, RuntimeError: there is not so much memory.
        """
        local = {name: _local(tensor) for name, tensor in tensors.items()}
        if not all(_alike(self._buffers.get(name), tensor) for name, tensor in local.items()):
            self._allocate(local)
        if self._stream is None:
            staged = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
            return lambda: staged
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            staged = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
            self._copied = copied = self._stream.record_event()

        def wait() -> dict[str, Tensor]:
            copied.synchronize()
            return staged

        return wait

    def before_update(self) -> None:
        """Make the next work on the GPU wait until the live tensors are copied. The host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        self._buffers = {}
        if not self._shared:
            pin = self._stream is not None
            self._buffers = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=pin) for n, t in tensors.items()}
            return
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        self.memory = SharedMemory(tensors)
        self._buffers = self.memory.buffers

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers[name]
        buffer.copy_(_local(tensor), non_blocking=self._stream is not None)
        if not isinstance(tensor, DTensor):
            return buffer
        return DTensor(
            buffer, tensor._spec, requires_grad=False
        )  # because from_local would move it to the mesh's device


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _alike(buffer: Tensor | None, tensor: Tensor) -> bool:
    return buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
