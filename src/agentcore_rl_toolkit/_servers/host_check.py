"""Refuses requests with another server's name in ``Host``, and those of foreign web pages.

Theory of operation. A page in the user's browser reaches every port of this machine, and needs no permission to send a POST of
``text/plain`` or to open a WebSocket. Two headers that a page cannot forge tell it apart. ``Origin`` comes with every such
request and names the page: any but the server's own is refused, ``null`` included. A page that makes its own name point to this
machine (DNS rebinding) has the right ``Origin``, but its ``Host`` is that name. So a name has to be known: the one the server
listens on, ``localhost``, and those that the user allowed. An address needs no permission: it cannot be made to point elsewhere.
"""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import json
import platform
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

OPTION = "--allowed-host"
# This machine, as containers see it. A network's own name server could answer for these names as well, so no page may use them.
CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.%]+\]|[^\s:/@\[\]]+)(?::(?P<port>[0-9]{0,5}))?")
_PORTS = {"http": "80", "https": "443"}


class Refusal(NamedTuple):
    """Status and message of the response to a request that is not answered."""

    status: int
    message: str


class HostCheck:
    """Decides by ``Host`` and ``Origin`` for a server that listens on ``bound``.

    ``allowed`` are further names, with ``*`` for any part of one: of load balancers, of services in a cluster. Web pages there
    may use the server, too. NAME:PORT allows the pages of one port.
    """

    def __init__(self, bound: Iterable[str] = ("127.0.0.1",), allowed: Iterable[str] = ()) -> None:
        hosts = [_plain(host) for host in bound]
        self._names = {"localhost", *hosts}
        if not all(is_loopback(host) for host in hosts):
            self._names |= {platform.node().lower(), platform.node().lower().partition(".")[0]} - {""}
        self._allowed = tuple(_plain(pattern) for pattern in allowed)

    def refusal(self, host: bytes | None, origin: bytes | None) -> Refusal | None:
        """Return the refusal of a request with these headers, or None to accept it. An absent header is None."""
        named = ("", "")
        if host is not None:
            found = _authority(host)
            if found is None or not self._is_ours(found[0]):
                return Refusal(421, f"{_shown(host)} is not a name of this server. If it is meant to be, {_how(host)}.")
            named = found
        if origin is not None and not self._may_come_from(origin, named):
            return Refusal(
                403, f"web pages of {_shown(origin)} may not use this server. If they are to, {_how(origin)}."
            )
        return None

    def refusal_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
        """Return the same for the headers of a request, their names in lower case."""
        host = origin = None
        for name, value in headers:
            if name == b"host":
                host = value if host is None else b"?"  # two hosts are none: RFC 9112, 3.2
            elif name == b"origin":
                origin = value
        return self.refusal(host, origin)

    def _is_ours(self, name: str) -> bool:
        return name in self._names or name in CONTAINER_NAMES or _address(name) is not None or self._allows(name)

    def _allows(self, *names: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._allowed for name in names)

    def _may_come_from(self, origin: bytes, named: tuple[str, str]) -> bool:
        scheme, sign, rest = origin.decode("latin-1").strip().lower().partition("://")
        page = _authority(rest.encode("latin-1")) if sign and scheme in _PORTS else None
        if page is None:
            return self._allows("null")  # a pattern of "*" allows all
        if self._allows(page[0], f"{page[0]}:{page[1] or _PORTS[scheme]}"):
            return True
        usual = _PORTS[scheme]
        same = page[0] == named[0] and (page[1] or usual) == (named[1] or usual)
        return same and page[0] not in CONTAINER_NAMES


class CheckedApp:
    """An ASGI application with a check of Host and Origin."""

    def __init__(self, app: Any, check: HostCheck) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._check.refusal_of(scope["headers"]) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        body = json.dumps({"error": {"message": refusal.message, "type": "invalid_request_error"}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _authority(value: bytes) -> tuple[str, str] | None:
    """Name and port of ``name[:port]``, in lower case, brackets and a last dot left out."""
    match = _AUTHORITY.fullmatch(value.decode("latin-1").strip().lower())
    return None if match is None else (_plain(match["host"]), match["port"] or "")


def _plain(host: str) -> str:
    return host.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


def is_loopback(name: str) -> bool:
    """Return True if a name or address to listen on is reachable from this machine only."""
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _shown(value: bytes) -> str:
    return repr("".join(c if c.isascii() and c.isprintable() else "?" for c in value.decode("latin-1")[:100]))


def _how(value: bytes) -> str:
    known = _authority(value.rpartition(b"//")[2])
    return f"start it with {OPTION} {known[0] if known is not None else 'NAME'}"
