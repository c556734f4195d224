"""Addresses and interfaces of this machine, found without torch."""

from __future__ import annotations

import socket
import struct
import sys

LOST_AFTER = 20  # seconds without a sign of life from another machine


def address_towards(host: str, port: int) -> str | None:
    """This machine's address as `host` sees it. None if there is no route to `host`. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return probe.getsockname()[0]
    except OSError:
        return None


def loopback_interface() -> str:
    """The interface that only this machine can reach: lo on Linux, lo0 on macOS."""
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address. None if it is unknown, which is so on systems other than Linux."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR of netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def watch_connection(connection: socket.socket) -> None:
    """Let the kernel close the connection if the other machine no longer answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, LOST_AFTER // 4),
            (socket.TCP_KEEPINTVL, LOST_AFTER // 4),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, LOST_AFTER * 1000),  # for data that was sent and is not acknowledged
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
