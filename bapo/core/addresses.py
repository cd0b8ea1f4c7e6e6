"""Hosts and ports as text, of IPv4, IPv6 and names.

    listen on   127.0.0.1   ::1     fe80::1%eth0     ::
    in a URL    127.0.0.1   [::1]   [fe80::1%25eth0]
    call        127.0.0.1   ::1     fe80::1%eth0     ::1

In a URL an IPv6 address has brackets, because its colons would begin the port (RFC 3986), and the zone of a link-local
one begins with %25 (RFC 6874).
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

IPV4_LOOPBACK, IPV6_LOOPBACK = "127.0.0.1", "::1"
IN_BRACKETS = "; in a URL an IPv6 address has brackets: http://[::1]:8700"
"""End of a message about a URL with too many colons."""


def bare_host(text: str) -> str:
    """The host as sockets take it: `[::1]` is `::1`, `[fe80::1%25eth0]` is `fe80::1%eth0`.

    Raises: ValueError for anything other than a host: a URL, a host with a port, half of a bracket.
    """
    host = text
    if text.startswith("[") and text.endswith("]"):
        host = text[1:-1].replace("%25", "%")
        if _address(host) is None or ":" not in host:
            raise ValueError(f"{text!r} is not an IPv6 address in brackets")
    if not host or any(letter in host for letter in "/[]@ ") or (":" in host and _address(host) is None):
        raise ValueError(f"{text!r} is not a host: give a name, an IPv4 or an IPv6 address, and the port separately")
    return host


def authority(host: str, port: int) -> str:
    """host:port of a URL: `[::1]:8700`."""
    host = host.removeprefix("[").removesuffix("]").replace("%25", "%")
    return f"[{host.replace('%', '%25')}]:{port}" if ":" in host else f"{host}:{port}"


def http_url(host: str, port: int) -> str:
    """`http://[::1]:8700`, without a slash at its end."""
    return f"http://{authority(host, port)}"


def http_address(text: str) -> str:
    """The URL of a server without a slash at its end, as routes are appended to it. Raises: ValueError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not an address: give http:// or https://, and a host")
    return text.rstrip("/")


def to_bind(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Family and address for `socket.bind`; of a name with both, IPv4. Raises: OSError for an unknown name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address


def reachable(host: str) -> str:
    """The address under which this machine calls a service that listens on `host`: a wildcard cannot be called."""
    if not is_wildcard(host):
        return host
    return IPV6_LOOPBACK if ":" in host else IPV4_LOOPBACK


def is_wildcard(host: str) -> bool:
    """Whether it stands for every address of the machine."""
    address = _address(host.strip("[]"))
    return address is not None and _unmapped(address).is_unspecified


def is_loopback(host: str) -> bool:
    """Whether this address is only reachable from this machine."""
    if host == "localhost":
        return True
    address = _address(host.strip("[]"))
    return address is not None and _unmapped(address).is_loopback


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _unmapped(address: Address) -> Address:
    """::ffff:127.0.0.1 is 127.0.0.1; Python says so from 3.13 on."""
    return getattr(address, "ipv4_mapped", None) or address
