"""A run on several machines: torch's elastic agent on each finds the others, and starts them all again after a crash.

The agent starts one process for its machine: `titanlite launch` once more, which starts and watches the ranks there. So
signals, the time to save, exit codes and reports are those of a run on one machine. The agents meet in a c10d store at
MASTER_ADDR, which trusts everybody who can reach it: docs/scaling_out.md says what the network must keep out.

Invariant: an end for a known reason is never restarted, because the process of the machine tells the agent that all is
well, and leaves the exit code in a file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite.config.errors import StoppedBySignal, UserError
from titanlite.launch.exit_report import KNOWN_EXITS, UNSAVED_STOPS
from titanlite.launch.ranks import World
from titanlite.runtime.logging import note
from titanlite.runtime.process import STOP_SIGNALS, leave, python_command

FOLDER = "TITANLITE_MACHINE"  # environment variable: where the process of the machine leaves its number and its end
SIOCGIFADDR = 0x8915  # of netdevice(7)
MEET_SECONDS = 900  # for all machines to come, also for lost ones to come back
SAY_AFTER = 10  # seconds of waiting for the others


@dataclass(frozen=True)
class Machines:
    """How many take part, and where they meet."""

    least: int
    most: int
    address: str
    port: int
    number: int | None  # of this one; 0 hosts the store. None: the one that has the address does
    max_restarts: int


def run_agent(words: Sequence[str], machines: Machines, resume_hint: Callable[[], str]) -> int:
    """Run `titanlite launch WORDS` under torch's agent; returns the exit code of the run on this machine.

    Args:
        resume_hint: How to continue from the newest checkpoint. Empty if there is none.

    Raises:
        UserError: The machines did not meet.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or C++ stacks follow the last lines
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = Path(tempfile.mkdtemp(prefix="titanlite-launch-"))
    child, end = folder / "process", folder / "code"
    command, environment = python_command(["-m", "titanlite", "launch", *words])
    # A store that outlived a restart would have the addresses of the ranks before it.
    os.environ.update({**environment, FOLDER: str(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    signals = {*STOP_SIGNALS, signal.SIGUSR2}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        signals.remove(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a handler would not be called while torch waits for others
    waiting = f"Waiting for {machines.most} machines at {machines.address}:{machines.port}."
    threading.Thread(target=_pass_on, args=(signals, child, waiting), daemon=True).start()
    logging.disable(logging.ERROR)  # the process says why it ended
    address, interface = own_address(machines.address, machines.port)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    is_host = {} if machines.number is None else {"is_host": machines.number == 0}
    config = LaunchConfig(
        min_nodes=machines.least,
        max_nodes=machines.most,
        nproc_per_node=1,
        run_id="titanlite",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{machines.address}:{machines.port}",
        rdzv_configs={"join_timeout": MEET_SECONDS, "read_timeout": MEET_SECONDS, **is_host},
        max_restarts=machines.max_restarts,
        local_addr=address,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # the agent would give the ranks too little time to save after others
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except (RendezvousError, RuntimeError) as error:
        if not end.exists():
            where = f"{machines.address}:{machines.port}"
            if child.exists() and (hint := resume_hint()):
                raise StoppedBySignal(f"Lost: the other machines at {where} ({error}).\n{hint}") from None
            raise UserError(
                f"{machines.least} machines did not meet at {where}: {error} MASTER_ADDR must be an address of the "
                "first machine that the others reach, MASTER_PORT free there, and all values the same on every machine."
            ) from None
    return int(end.read_text())


def part_of(world: World) -> World:
    """The ranks of this machine among those of all, as the agent has numbered them."""
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    number, machines, restarts = (int(os.environ[name]) for name in names)
    count = len(world.ranks)
    ranks = range(number * count, (number + 1) * count)
    return replace(world, ranks=ranks, size=machines * count, restarts=restarts, agent=True)


def run_part(folder: Path, run: Callable[[], int]) -> int:
    """Run the ranks of this machine under its agent, and tell it whether they are to be started again."""
    (folder / "process").write_text(str(os.getpid()))
    (folder / "code").unlink(missing_ok=True)  # of ranks that made room for another machine
    code = run()
    if code not in (0, *KNOWN_EXITS, *UNSAVED_STOPS):
        return code
    (folder / "code").write_text(str(code))
    return 0


def _pass_on(signals: set[signal.Signals], child: Path, waiting: str) -> None:
    """Pass signals on to the process of the machine; say so once if it takes long until there is one."""
    said = False
    while True:
        got = signal.sigtimedwait(signals, SAY_AFTER)
        if got is not None:
            try:
                os.kill(int(child.read_text()), got.si_signo)
            except OSError:  # there is none now
                leave(128 + got.si_signo)
        elif not said and not child.exists():
            said = True
            note(waiting)


def own_address(host: str, port: int) -> tuple[str | None, str | None]:
    """The address by which `host` sees this machine, and the interface that has it. None: it cannot be found out.

    torch would take what belongs to the name of this machine, which can be a loopback address.
    """
    address = None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # nothing is sent
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            import fcntl

            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return address, name
    return address, None
