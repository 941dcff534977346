"""Carries the few named endpoints into sessions that have no network.

A session in a network namespace of its own reaches nothing. A *listening socket*, however, belongs to the namespace it was
created in, whoever accepts from it. So the session, before it is confined, opens a listener on ``127.0.0.1:PORT`` inside its
namespace for every endpoint it may use, and hands the descriptors to this relay, which lives outside: it accepts there and
connects to the real ``127.0.0.1:PORT`` here. Agents use unchanged addresses, and no route, bridge or firewall rule is needed.

A handover is one message on the relay's unix socket: ports and a name as JSON, with as many descriptors. The connection then
only tells that the session lives: at end of file its listeners and connections are closed. Nothing that comes later on it is
read, so a session cannot add endpoints; and the socket's path is not visible from inside. The relay remembers who handed over
(the kernel says which process that was), so that a server in this process can tell whose a carried connection is.
"""

from __future__ import annotations

import array
import asyncio
import functools
import json
import os
import socket
from pathlib import Path
from typing import Any

from .._servers.peers import OUTSIDE, peer_pid
from .pipe import Pipe
from .spec import IsolationSpec, parse_endpoint

Owner = tuple[int, str]
_MAX_ENDPOINTS = 16
_HANDOVER_TIMEOUT_S = 10.0
_RETRY_S = 0.1


def hand_over(spec: IsolationSpec) -> int:
    """Called inside the session's network namespace: open the listeners and give them to the relay.

    Returns: a descriptor that has to stay open as long as the session lives; its end is how the relay knows.
    Raises: OSError when the relay does not take them.
    """
    if spec.relay is None:
        raise OSError("network='loopback' with endpoints needs the relay's socket path in the spec")
    targets = list(dict.fromkeys(parse_endpoint(e) for e in spec.endpoints))
    listeners = []
    try:
        for _, port in targets:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(128)
        life = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listeners.append(life)  # closed below, unless it was given away
        life.settimeout(_HANDOVER_TIMEOUT_S)
        life.connect(str(spec.relay))
        ports = json.dumps({"ports": [port for _, port in targets], "name": spec.name}).encode()
        fds = array.array("i", [s.fileno() for s in listeners[:-1]])
        life.sendmsg([ports], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        if life.recv(2) != b"ok":
            raise OSError("the relay refused the session's endpoints")
        life.settimeout(None)
        return life.detach()
    finally:
        for listener in listeners:
            listener.close()


class Relay:
    """The outer end: takes listeners of sessions and pipes their connections to this machine's loopback.

    ``endpoints`` are the only targets it will ever connect to. Runs on the caller's event loop.
    """

    def __init__(self, path: str | Path, endpoints: tuple[str, ...]) -> None:
        self.path = Path(path)
        self.allowed = {parse_endpoint(e)[1] for e in endpoints}
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._owners: dict[tuple[int, int], Owner] = {}  # by the two ports of a carried connection's outer half

    def owner_of(self, client: tuple[str, int], server: tuple[str, int]) -> Owner | None:
        """Whose the connection between these two ends is: the process that handed over, and what it says its name is.

        None for one that is not carried.
        """
        if client[0] not in ("127.0.0.1", "::ffff:127.0.0.1"):
            return None
        return self._owners.get((client[1], server[1]))

    async def start(self) -> None:
        """Listen on ``path`` (mode 0600)."""
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(str(self.path))
        os.chmod(self.path, 0o600)
        listener.listen(1024)
        self._socket = listener
        self._keep(self._accept(listener))

    async def aclose(self) -> None:
        """Stop, closing every connection that is carried."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        self.path.unlink(missing_ok=True)

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors: sessions that end give some back
                await asyncio.sleep(_RETRY_S)
                continue
            # Also of one that is cancelled before it began.
            self._keep(self._session(connection)).add_done_callback(functools.partial(_close, connection))

    async def _session(self, life: socket.socket) -> None:
        """One session's listeners, from handover to its end."""
        loop = asyncio.get_running_loop()
        servers: list[asyncio.Server] = []
        taken: list[tuple[int, socket.socket]] = []
        carried: set[_Inner] = set()
        with life:
            life.setblocking(False)
            try:
                async with asyncio.timeout(_HANDOVER_TIMEOUT_S):
                    await _readable(life)
                name, taken = self._take(life)
                owned = functools.partial(
                    _Inner, carried=carried, owner=(peer_pid(life) or OUTSIDE, name), owners=self._owners
                )
                for port, listener in taken:
                    listener.setblocking(False)
                    servers.append(await loop.create_server(functools.partial(owned, port), sock=listener))
                await loop.sock_sendall(life, b"ok" if taken else b"no")
                if taken:
                    # The other side never speaks again; whatever it sends is dropped unread.
                    while await loop.sock_recv(life, 4096):
                        continue
            except (OSError, TimeoutError, ValueError):
                return
            finally:
                for server in servers:
                    server.close()
                for _, listener in taken[len(servers) :]:
                    listener.close()
                for inner in list(carried):
                    inner.abort()
                await asyncio.sleep(0)  # aborted transports give up their sockets on the loop's next turn

    def _take(self, life: socket.socket) -> tuple[str, list[tuple[int, socket.socket]]]:
        message, fds, _, _ = socket.recv_fds(life, 4096, _MAX_ENDPOINTS)
        listeners = [socket.socket(fileno=fd) for fd in fds]
        try:
            order = json.loads(message)
            ports, name = order["ports"], str(order["name"])
            fit = len(ports) == len(listeners) and set(ports) <= self.allowed
        except (KeyError, TypeError, ValueError, RecursionError):  # a session may say anything
            fit = False
        if not fit:
            for listener in listeners:
                listener.close()
            return "", []
        return name, list(zip(ports, listeners, strict=True))


def _close(connection: socket.socket, _: object) -> None:
    connection.close()


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


class _Outer(Pipe):
    """A connection to an endpoint. It is in ``owners`` as long as it is open, from before its first byte is sent."""

    def __init__(self, owner: Owner, owners: dict[tuple[int, int], Owner]) -> None:
        self._owner, self._owners = owner, owners
        self._ports = (0, 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        here, there = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self._ports = (here[1], there[1])
        self._owners[self._ports] = self._owner

    def connection_lost(self, error: Exception | None) -> None:
        self._owners.pop(self._ports, None)
        super().connection_lost(error)


class _Inner(Pipe):
    """A connection accepted from inside a session. It is in ``carried`` as long as it is open."""

    def __init__(
        self,
        port: int,
        carried: set[_Inner],
        owner: Owner = (0, ""),
        owners: dict[tuple[int, int], Owner] | None = None,
    ) -> None:
        self.port = port
        self._carried = carried
        self._outer = functools.partial(_Outer, owner, owners if owners is not None else {})
        self._connecting: asyncio.Task[None] | None = None
        self._early: list[bytes] = []  # what came before there was somewhere to send it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._carried.add(self)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
            return
        # Not paused in connection_made: uvloop starts reading only after it and would forget the pause.
        self._early.append(data)
        self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._carried.discard(self)
        super().connection_lost(error)

    def abort(self) -> None:
        """The session is gone."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self.other is not None:
            self.other.transport.abort()
        self.transport.abort()

    async def _connect(self) -> None:
        try:
            _, outer = await asyncio.get_running_loop().create_connection(self._outer, "127.0.0.1", self.port)
        except OSError:
            self.transport.abort()  # a reset, which is what a refused connection comes closest to from here
            return
        if self.transport.is_closing():
            outer.transport.close()
            return
        self.other, outer.other = outer, self
        outer.transport.writelines(self._early)
        if self.ended and outer.transport.can_write_eof():
            outer.transport.write_eof()
        if self._early:
            self._early.clear()
            self.transport.resume_reading()
