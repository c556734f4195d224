"""A run on several machines: torch's elastic agent on each finds the others, and starts them all again after a crash.

The agent starts one process for its machine: `titanlite launch` once more, which starts and watches the ranks there. So
signals, the time to save, exit codes and reports are those of a run on one machine. The agents meet in a c10d store at
MASTER_ADDR, which trusts everybody who can reach it: docs/scaling_out.md says what the network must keep out.

Invariant: an end for a known reason is never restarted, because the process of the machine tells the agent that all is
well, and leaves the exit code in a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titanlite.checkpoint.find import is_saved, resume_hint
from titanlite.config.errors import StoppedBySignal, UserError
from titanlite.config.run import Run
from titanlite.launch.ranks import FINAL, Ranks
from titanlite.runtime.logging import note
from titanlite.runtime.process import leave, python_command, stop_signals

FOLDER = "TITANLITE_MACHINE"  # environment variable: where the process of the machine leaves its number and its end
SIOCGIFADDR = 0x8915  # of netdevice(7)
MEET_SECONDS = 900  # for all machines to come, also for lost ones to come back


def run_agent(
    argv: Sequence[str], run: Run, machines: tuple[int, int], store: tuple[str, int], number: int | None, restarts: int
) -> int:
    """Run `titanlite launch ARGV` under torch's agent; returns the exit code of the run on this machine.

    Args:
        machines: The least and the most that take part.
        store: The address and the port where they meet.
        number: Of this machine; 0 hosts the store. None: the one that has the address does.

    Raises:
        UserError: The machines did not meet.
        StoppedBySignal: The others were lost after a save.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or C++ stacks follow the last lines
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = Path(tempfile.mkdtemp(prefix="titanlite-launch-"))
    child, end, where = folder / "process", folder / "code", f"{store[0]}:{store[1]}"
    command, environment = python_command(["-m", "titanlite", "launch", *argv])
    # A store that outlived a restart would have the addresses of the ranks before it.
    os.environ.update({**environment, FOLDER: str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    signals = {*stop_signals(), signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a handler would not be called while torch waits for others
    threading.Thread(target=_pass_on, args=(signals, child), daemon=True).start()
    note(f"Waiting for {machines[1]} machines at {where}.")
    logging.disable(logging.ERROR)  # the process says why it ended
    host = {} if number is None else {"is_host": number == 0}
    config = LaunchConfig(
        *machines,
        nproc_per_node=1,
        run_id="titanlite",
        rdzv_backend="c10d",
        rdzv_endpoint=where,
        rdzv_configs={"join_timeout": MEET_SECONDS, "read_timeout": MEET_SECONDS, **host},
        max_restarts=restarts,
        local_addr=_own_address(store),
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # the agent would give the ranks too little time to save after others
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except (RendezvousError, RuntimeError) as error:
        if not end.exists():  # else only another machine is missed, after the end
            lost = StoppedBySignal if child.exists() and is_saved(run) else UserError
            why = f"{machines[0]} machines did not meet at {where}, where all must reach the first: {error}"
            raise lost(f"{why}\n{resume_hint(run, argv)}") from None
    return int(end.read_text())


def run_part(folder: Path, ranks: Ranks) -> int:
    """Run the ranks of this machine under its agent, and tell it whether they are to be started again."""
    (folder / "process").write_text(str(os.getpid()))
    (folder / "code").unlink(missing_ok=True)  # of ranks that made room for another machine
    count = len(ranks.ranks)
    first, size = (int(os.environ[name]) * count for name in ("RANK", "WORLD_SIZE"))  # the agent's rank is a machine
    code = replace(ranks, ranks=range(first, first + count), size=size, max_restarts=0).run()
    if code in FINAL:
        (folder / "code").write_text(str(code))
        return 0
    if left := ranks.max_restarts - int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
        note(f"Starting again from the newest checkpoint (restarts left: {left - 1}).")
    return code


def _pass_on(signals: set[signal.Signals], child: Path) -> None:
    """Pass signals on to the process of the machine."""
    while True:
        number = signal.sigwait(signals)
        try:
            os.kill(int(child.read_text()), number)
        except OSError:  # there is none now
            leave(128 + number)


def _own_address(store: tuple[str, int]) -> str | None:
    """The address by which the host of the store sees this machine; None: it cannot be found out. gloo is told the
    interface that has it, unless the user has named one. torch would take what belongs to the name of this machine,
    which is a loopback address where /etc/hosts says so, as on Debian."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(store)  # nothing is sent
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        return address
    return None
