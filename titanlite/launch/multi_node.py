"""Run on several nodes, with torch elastic agents that connect and restart the nodes.

On each node, the torch agent starts one process, which runs `titanlite launch` again. This node
process starts and watches the ranks of the node. Signals, the time to save, exit codes and error
reports therefore work as on a single node. The agents connect through a c10d store at MASTER_ADDR,
which accepts every process that can reach it. docs/guides/clusters.md lists what the network must
block.

Invariant: a run that ended for a known reason is never restarted. In that case the node process
reports success to the agent, and writes the actual exit code to a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.find import is_saved, resume_hint
from titanlite.config.errors import StoppedBySignal, UserError, format_count
from titanlite.config.run import Run
from titanlite.launch.ranks import FINAL_CODES, Ranks, to_exit_code
from titanlite.runtime.logging import note
from titanlite.runtime.process import leave, python_command, stop_signals

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

FOLDER = "TITANLITE_NODE"  # environment variable: folder of the three files below
PROCESS_FILE = "process"  # process ID of the node process
END_FILE = "code"  # exit code of a run for which a restart would not help (`FINAL_CODES`)
CRASH_FILE = "crash"  # exit code of a run that has crashed and used up its restarts

Address = tuple[str, int]
"""Host name or IP address, and port."""
# A documentation address (RFC 5737), used to look up the default route of this node. Nothing is
# sent to it.
DEFAULT_ROUTE = ("192.0.2.1", 9)
SIOCGIFADDR = 0x8915  # request of netdevice(7): the address of an interface
CONNECT_SECONDS = 900  # seconds to wait for nodes to connect, or to reconnect after a crash
SILENT_SECONDS = 10.0  # seconds after which a waiting node logs the probable reason
# Seconds that the agent has to end after a crash. It can hang if the store is unreachable.
AGENT_SECONDS = 10.0


def run_agent(
    argv: Sequence[str],
    run: Run,
    nodes: tuple[int, int],
    store: Address,
    node_rank: int | None,
    restarts: int,
) -> int:
    """Run `titanlite launch ARGV` under the torch agent, and return the exit code of this node.

    Args:
        argv: Options of `titanlite train`.
        run: The run that `argv` describes.
        nodes: Minimum and maximum number of nodes.
        store: Address and port of the c10d store, through which the nodes connect.
        node_rank: Number of this node. Node 0 hosts the store. If None, the node that has the
            address of the store hosts it.
        restarts: Maximum number of restarts after crashes.

    Raises:
        UserError: If MASTER_ADDR cannot be resolved, or not enough nodes have connected.
        StoppedBySignal: If the connection to the other nodes was lost after a save, so that the run
            can be resumed.
    """
    # By default, torch prints C++ stacks after the error message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # Call this even if NODE_RANK is set, because it also rejects an invalid MASTER_ADDR.
    is_local = _is_on_this_node(store)
    is_host = is_local if node_rank is None else node_rank == 0
    config = _configure_agent(nodes, store, node_rank, is_host, restarts)

    with tempfile.TemporaryDirectory(
        prefix="titanlite-launch-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        command, environment = python_command(["-m", "titanlite", "launch", *argv])
        os.environ.update(environment)
        os.environ[FOLDER] = str(folder)
        # A shared store would survive a restart, with the addresses of ranks that no longer exist.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        _start_threads(folder, store, is_host)

        expected = format_count(nodes[1], "node")
        if nodes[0] < nodes[1]:
            expected = f"{nodes[0]} to {expected}"
        where = f"{store[0]}:{store[1]}"
        note(f"Waiting for {expected} at {where}.")
        logging.disable(logging.ERROR)  # the node process reports why it ended
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            return to_exit_code(error.get_first_failure()[1].exitcode)
        except (RendezvousError, RuntimeError) as error:
            # The nodes did not connect, or lost their connection. If the run has already ended on
            # this node, ignore this error, and return the exit code of the run.
            if (folder / CRASH_FILE).exists():
                return int((folder / CRASH_FILE).read_text())
            if not (folder / END_FILE).exists():
                has_started = (folder / PROCESS_FILE).exists()
                error_kind = StoppedBySignal if has_started and is_saved(run) else UserError
                needed = format_count(nodes[0], "node")
                text = f"Fewer than {needed} connected to {where}, which all must reach: {error}"
                raise error_kind(f"{text}\n{resume_hint(run, argv)}") from None
        return int((folder / END_FILE).read_text())


def _configure_agent(
    nodes: tuple[int, int],
    store: Address,
    node_rank: int | None,
    is_host: bool,
    restarts: int,
) -> LaunchConfig:
    """Configure the torch agent to start one process on this node, and to host or join the store.

    By default, torch would decide whether this node hosts the store by resolving the name of the
    node, which often gives a loopback address.

    Args:
        nodes: Minimum and maximum number of nodes.
        store: Address and port of the store.
        node_rank: Number of this node, or None if the user has not set it.
        is_host: Whether this node hosts the store.
        restarts: Maximum number of restarts after crashes.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    local_address = _find_local_address(store)
    if local_address is not None:
        _set_interface(local_address)

    address, port = store
    rendezvous: dict[str, Any] = {"join_timeout": CONNECT_SECONDS, "read_timeout": CONNECT_SECONDS}
    if node_rank is None and is_host:
        address = "127.0.0.1"  # torch then hosts the store, or joins one on this node
    else:
        rendezvous["is_host"] = is_host

    min_nodes, max_nodes = nodes
    return LaunchConfig(
        min_nodes,
        max_nodes,
        nproc_per_node=1,
        run_id="titanlite",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs=rendezvous,
        max_restarts=restarts,
        local_addr=local_address,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        # `_forward_signals` handles all other signals, because the agent would give the ranks too
        # little time to save.
        signals_to_handle="SIGQUIT",
    )


def _start_threads(folder: Path, store: Address, is_host: bool) -> None:
    """Start background threads that support the torch agent in this process.

    They forward signals to the node process (the child that starts the ranks), log why nodes do
    not connect, and end this process if the agent hangs after a crash.

    Args:
        folder: Folder of the files that the node process writes.
        store: Address and port of the store, through which the nodes connect.
        is_host: Whether this node hosts the store.
    """
    # Forward signals in a thread. Python would call a signal handler in the main thread, but only
    # after torch has finished waiting for other nodes.
    signals = {*stop_signals(), signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # so that the thread can wait for them
    _start_thread(_forward_signals, signals, folder)

    _start_thread(_log_missing_nodes, folder, store, is_host)
    _start_thread(_leave_after_crash, folder)  # in case the torch agent hangs


def _start_thread(function: Callable[..., None], *args: Any) -> None:
    """Call a function in a background thread, which does not keep this process alive."""
    threading.Thread(target=function, args=args, daemon=True).start()


def run_node_process(folder: Path, ranks: Ranks) -> int:
    """Run the ranks of this node in its node process, which the torch agent started.

    The agent restarts all nodes if this process exits with a code other than 0. The process that
    runs the agent reads these files in `folder`:

    - `PROCESS_FILE`: Process ID of this process.
    - `END_FILE`: Exit code of a run for which a restart would not help, for example after an
      invalid option. This process then exits with 0.
    - `CRASH_FILE`: Exit code of a run that has crashed and used up its restarts.

    Args:
        folder: Folder of these files.
        ranks: Settings of the ranks, numbered as on the first node.

    Returns:
        Exit code for the agent.
    """
    (folder / PROCESS_FILE).write_text(str(os.getpid()))
    end_file = folder / END_FILE
    end_file.unlink(missing_ok=True)  # the agent may have stopped this node to let another one join

    # Number the ranks of this node. On the second of two nodes with 8 ranks each, they are 8 to 15.
    # The agent starts one process per node, so its variables RANK and WORLD_SIZE count nodes.
    node_rank = int(os.environ["RANK"])
    num_nodes = int(os.environ["WORLD_SIZE"])
    num_local_ranks = len(ranks.ranks)
    first_rank = node_rank * num_local_ranks
    node_ranks = replace(
        ranks,
        ranks=range(first_rank, first_rank + num_local_ranks),
        size=num_nodes * num_local_ranks,
        max_restarts=0,  # the agent restarts all nodes together
    )

    exit_code = node_ranks.run()
    if exit_code in FINAL_CODES:  # a restart would not help
        end_file.write_text(str(exit_code))
        return 0

    # The run has crashed. The agent restarts it if there are restarts left.
    restarts_left = ranks.max_restarts - int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts_left:
        note(f"Starting again from the newest checkpoint (restarts left: {restarts_left - 1}).")
    else:
        (folder / CRASH_FILE).write_text(str(exit_code))
    return exit_code


def _forward_signals(signals: set[signal.Signals], folder: Path) -> None:
    """Forward each received signal to the node process, the child that starts the ranks.

    This runs forever in a background thread, beside the torch agent. If a signal arrives while the
    node process is not running, end this process.

    Args:
        signals: Signals to wait for, which must be blocked.
        folder: Folder that contains the process ID of the node process.
    """
    while True:
        number = signal.sigwait(signals)
        try:
            os.kill(int((folder / PROCESS_FILE).read_text()), number)
        except OSError:  # there is no node process now
            shutil.rmtree(folder, ignore_errors=True)
            leave(128 + number)


def _leave_after_crash(folder: Path) -> None:
    """End this process after the last crash of the run, in case the torch agent hangs.

    Wait until the run has crashed with no restarts left. The agent then has `AGENT_SECONDS` to end
    by itself. Without this limit, it could wait many minutes for a node that is down.

    Args:
        folder: Folder in which the node process writes the exit code of the crash.
    """
    crash_file = folder / CRASH_FILE
    while not crash_file.exists():
        time.sleep(1.0)
    time.sleep(AGENT_SECONDS)
    code = int(crash_file.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    leave(code)


def _log_missing_nodes(folder: Path, store: Address, is_host: bool) -> None:
    """Log the probable reason if the nodes have not connected after `SILENT_SECONDS`.

    Args:
        folder: Folder in which the node process writes a file once the nodes have connected.
        store: Address and port of the store, through which the nodes connect.
        is_host: Whether this node hosts the store.
    """
    time.sleep(SILENT_SECONDS)
    has_connected = (folder / PROCESS_FILE).exists()
    if has_connected:
        return

    where = f"{store[0]}:{store[1]}"
    if is_host:
        reason = f"this node is ready at {where}, but other nodes have not joined."
    else:
        reason = _check_connection(store)
    note(f"Still waiting after {SILENT_SECONDS:.0f} s: {reason}")


def _check_connection(store: Address) -> str:
    """Diagnose why nodes are missing by trying to connect to the store.

    Args:
        store: Address and port of the store, through which the nodes connect.

    Returns:
        The reason, for example "host:29500 is reachable, but other nodes have not joined."
    """
    where = f"{store[0]}:{store[1]}"
    try:
        socket.create_connection(store, timeout=SILENT_SECONDS).close()
    except OSError as error:
        return (
            f"cannot connect to {where} ({error.strerror or error}). "
            "Start the node that has this address, or set NODE_RANK=0 on the first node."
        )
    return f"{where} is reachable, but other nodes have not joined."


def _is_on_this_node(store: Address) -> bool:
    """Return whether the address of the c10d store belongs to this node.

    Args:
        store: Host name or address from MASTER_ADDR, and port of the store.

    Raises:
        UserError: If MASTER_ADDR cannot be resolved.
    """
    try:
        results = socket.getaddrinfo(*store, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"MASTER_ADDR={store[0]} cannot be resolved: {reason}. "
            "Use an address or a name of the first node that all nodes can resolve."
        ) from None

    # Only the node with this address can bind a socket to it.
    return any(_can_bind(family, kind, address[0]) for family, kind, _, _, address in results)


def _can_bind(family: int, kind: int, host: str | int) -> bool:
    """Return whether a socket can be bound to a free port of an address.

    Args:
        family: Address family of the socket.
        kind: Type of the socket.
        host: The address, as `socket.getaddrinfo` returns it.
    """
    try:
        with socket.socket(family, kind) as probe:
            probe.bind((host, 0))  # any free port
    except OSError:
        return False
    return True


def _find_local_address(store: Address) -> str | None:
    """Return the IP address at which other nodes reach this node, or None if it is unknown.

    This is usually the address from which this node sends to the first node. By default, torch
    would look up the name of this node, which /etc/hosts often maps to a loopback address.

    Args:
        store: Address and port of the first node.
    """
    address = _source_address(store)
    # On the first node, its name may resolve to a loopback address, which other nodes cannot reach.
    if address is not None and _is_loopback(address) and not _is_loopback(store[0]):
        return _source_address(DEFAULT_ROUTE) or address
    return address


def _is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address, such as "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _source_address(target: Address) -> str | None:
    """Return the IP address from which this node sends to `target`; None if there is no route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket sends nothing here
            return probe.getsockname()[0]
    except OSError:
        return None


def _set_interface(address: str) -> None:
    """Make gloo use the network interface that has `address`, unless the user has selected one.

    Args:
        address: IPv4 address of this node.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                # A struct ifreq: the name in 16 bytes, then a sockaddr_in, whose bytes 4 to 7 are
                # the IPv4 address.
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
