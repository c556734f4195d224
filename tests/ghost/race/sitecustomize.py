"""Attach the race detector to torch, in each process that scripts/ghost.sh starts with GHOST_RACE.

Report what only Python can see: the order between CPU threads, reads of pinned memory without an
operator, and which parameters a compiled kernel writes.
"""

import concurrent.futures as futures
import ctypes
import functools
import importlib.util
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

detector = ctypes.CDLL("libcuda.so.1")
ADDRESS = ctypes.c_uint64
detector.race_release.argtypes = detector.race_acquire.argtypes = [ADDRESS]
detector.race_hint.argtypes = [ADDRESS, ctypes.c_char]
detector.race_host_touch.argtypes = [ADDRESS, ctypes.c_size_t, ctypes.c_char, ctypes.c_char_p]


def release(key: object, *args: object, **kwargs: object) -> None:
    detector.race_release(id(key))


def acquire(key: object, *args: object, **kwargs: object) -> None:
    detector.race_acquire(id(key))


def wrap(
    owner: Any, name: str, before: Callable | None = None, after: Callable | None = None
) -> None:
    """Call `before` and `after` with the arguments of a function around each call of it."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            if after is not None:
                after(*args, **kwargs)

    setattr(owner, name, wrapped)


def order_threads() -> None:
    """Report the order that threads, events, queues and futures of Python create."""
    wrap(threading.Thread, "start", before=release)
    wrap(threading.Thread, "run", before=acquire, after=release)
    wrap(threading.Thread, "join", after=acquire)
    wrap(threading.Event, "set", before=release)
    wrap(threading.Event, "wait", after=acquire)
    wrap(queue.Queue, "put", before=release)
    wrap(queue.Queue, "get", after=acquire)
    for name in ("set_result", "set_exception"):
        wrap(futures.Future, name, before=release)
    for name in ("result", "exception"):
        wrap(futures.Future, name, after=acquire)

    wait = futures.wait
    submit = futures.ThreadPoolExecutor.submit

    def ordered_wait(pending: Any, *args: Any, **kwargs: Any) -> Any:
        waited = wait(pending, *args, **kwargs)
        for future in waited.done:
            acquire(future)
        return waited

    def ordered_submit(self: Any, call: Callable, /, *args: Any, **kwargs: Any) -> Any:
        def ordered_call(*args: Any, **kwargs: Any) -> Any:
            acquire(ordered_call)
            return call(*args, **kwargs)

        release(ordered_call)
        return submit(self, ordered_call, *args, **kwargs)

    futures.wait = ordered_wait
    futures.ThreadPoolExecutor.submit = ordered_submit


def attach() -> None:
    import torch

    library = ctypes.CDLL(str(Path(__file__).with_name("libtorch_race.so")), ctypes.RTLD_GLOBAL)
    library.race_attach()
    torch.cuda._lazy_call(library.race_attach_allocator)

    def read_tensor(tensor: Any, *args: object) -> None:
        if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            detector.race_host_touch(tensor.data_ptr(), tensor.nbytes, b"R", b"Tensor")

    def read_storage(storage: Any, *args: object) -> None:
        if storage.device.type == "cpu":
            detector.race_host_touch(storage.data_ptr(), storage.nbytes(), b"R", b"Storage")

    for name in ("tolist", "numpy"):
        wrap(torch.Tensor, name, before=read_tensor)
    for name in ("_write_file", "tolist"):
        wrap(torch.UntypedStorage, name, before=read_storage)


def attach_groups() -> None:
    """Synchronize and write the summary before the process group is destroyed.

    Its watchdog would wait forever for work that no thread has waited for. Some programs exit
    without destructors, so the one of the detector cannot write the summary.
    """
    import torch
    from torch.distributed import distributed_c10d

    def synchronize(*args: object) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            detector.race_summary()

    wrap(distributed_c10d, "destroy_process_group", before=synchronize)


def attach_compiler() -> None:
    """Report which parameters a kernel of Inductor writes, according to their names."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def hint(kernel: Any, *args: Any, **kwargs: object) -> None:
        detector.race_hint(0, b"R")
        for name, value in zip(kernel.fn.arg_names, args, strict=False):
            if hasattr(value, "data_ptr"):
                detector.race_hint(value.data_ptr(), b"R" if name.startswith("in_ptr") else b"W")

    def remove_hints(*args: object, **kwargs: object) -> None:
        detector.race_hint(0, b"R")

    wrap(CachingAutotuner, "run", before=hint, after=remove_hints)


class Finder:
    """Call a function after a module has been imported for the first time."""

    def __init__(self, pending: dict[str, Callable[[], None]]) -> None:
        self.pending = pending

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        call = self.pending.pop(name, None)
        if call is None:
            return None
        spec: Any = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_call(module: Any) -> None:
            run(module)
            call()

        spec.loader.exec_module = run_and_call
        return spec


order_threads()
finder: Any = Finder(
    {
        "torch": attach,
        "torch.distributed.distributed_c10d": attach_groups,
        "torch._inductor.runtime.triton_heuristics": attach_compiler,
    }
)
sys.meta_path.insert(0, finder)
