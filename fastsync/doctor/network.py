"""The network interfaces of this machine, and which of them Gloo takes.

Linux alone: /sys and /proc say what there is.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Interface", "find_interface", "gloo_address", "is_loopback", "list_interfaces"]

_SYS = Path("/sys/class/net")
_INET6 = Path("/proc/net/if_inet6")
_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        addresses: IPv4 and IPv6, as far as the system tells.
        mtu: bytes of the largest packet; 0: unknown.
        speed: Mbit/s; 0 where the driver does not tell.
        up: whether it has a carrier.
    """

    name: str
    addresses: tuple[str, ...] = ()
    mtu: int = 0
    speed: int = 0
    up: bool = True


def is_loopback(address: str) -> bool:
    """Whether `address` reaches this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def list_interfaces() -> tuple[Interface, ...]:
    """Those of this machine, or of this container if it has a network of its own."""
    six = _inet6(_INET6.read_text() if _INET6.exists() else "")
    found = []
    for _, name in socket.if_nameindex():
        four = _inet4(name)
        addresses = (*((four,) if four else ()), *six.get(name, ()))
        mtu, speed = _number(name, "mtu"), _number(name, "speed")
        up = _text(name, "operstate") in ("up", "unknown")
        found.append(Interface(name, addresses, mtu, max(speed, 0), up))
    return tuple(found)


def find_interface(address: str, interfaces: tuple[Interface, ...]) -> Interface | None:
    """The one that has `address`; for any address of this machine alone, the one of that kind."""
    for interface in interfaces:
        if address in interface.addresses:
            return interface
    if is_loopback(address):
        return next((i for i in interfaces if any(map(is_loopback, i.addresses))), None)
    return None


def gloo_address(asked: str, interfaces: tuple[Interface, ...]) -> str:
    """The address at which the other ranks find this one's Gloo.

    Gloo takes the interface that GLOO_SOCKET_IFNAME names. Without it, it takes the first address
    of the machine's name at which it can listen, and 127.0.0.1 where there is none.

    Args:
        asked: the variable, empty where it is not set; of several names the first counts.

    Returns:
        Empty where there is no such interface, or it has no address.
    """
    if asked:
        first = asked.split(",")[0]
        named = [i for i in interfaces if i.name == first]
        return named[0].addresses[0] if named and named[0].addresses else ""
    return _of_host_name(socket.gethostname())


def _of_host_name(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return str(where[0])
    return _LOOPBACK


def _inet4(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])


def _inet6(table: str) -> Mapping[str, tuple[str, ...]]:
    """Of /proc/net/if_inet6: 32 digits, four numbers, and a name in each line."""
    found: dict[str, tuple[str, ...]] = {}
    for line in table.splitlines():
        digits, *_, name = line.split()
        found[name] = (*found.get(name, ()), str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def _text(name: str, what: str) -> str:
    try:
        return (_SYS / name / what).read_text().strip()
    except OSError:  # drivers refuse what they do not know
        return ""


def _number(name: str, what: str) -> int:
    text = _text(name, what)
    return int(text) if text.lstrip("-").isdigit() else 0
