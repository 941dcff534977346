"""What a session can connect to, per network mode: real servers on this machine, real sockets in the session."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.isolation.relay import Relay

from .conftest import NOBODY, Launcher, Session, linux_only

pytestmark = linux_only

TRY = """
import socket
def reach(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
            s.sendall(b"ping\\n")
            return s.makefile("rb").readline().decode()
    except OSError as e:
        return type(e).__name__
"""


@pytest.fixture
def echo() -> Iterator[Callable[[], int]]:
    """Start servers on this machine's loopback that send every line back; returns a port each."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    connection.sendall(line)

    def start() -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threads.append(threading.Thread(target=serve, args=(listener,), daemon=True))
        threads[-1].start()
        return int(listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(timeout=5)


@pytest.fixture
def relay(folder: Path) -> Iterator[Callable[..., Path]]:
    """A relay on its own loop, as the runtime has one; returns its socket's path."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    relays: list[Relay] = []

    def start(*ports: int) -> Path:
        relays.append(Relay(folder.parent / "relay.sock", tuple(f"127.0.0.1:{p}" for p in ports)))
        asyncio.run_coroutine_threadsafe(relays[-1].start(), loop).result(10)
        if os.geteuid() == 0:
            os.chown(relays[-1].path, NOBODY, NOBODY)
        return relays[-1].path

    yield start
    for each in relays:
        asyncio.run_coroutine_threadsafe(each.aclose(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)
    loop.close()


def test_host_network_reaches_the_host(launcher: Launcher, echo: Callable[[], int]) -> None:
    assert launcher.one(TRY + f"say(reach({echo()}))") == "ping\n"


def test_no_network_reaches_nothing(namespaces: Launcher, echo: Callable[[], int]) -> None:
    assert namespaces.one(TRY + f"say(reach({echo()}))", network="none") in ("OSError", "ConnectionRefusedError")


def test_loopback_reaches_its_endpoints_and_nothing_else(
    namespaces: Launcher, echo: Callable[[], int], relay: Callable[..., Path]
) -> None:
    wanted, second, other = echo(), echo(), echo()
    spec: dict[str, Any] = {
        "network": "loopback",
        "endpoints": (f"127.0.0.1:{wanted}", f"localhost:{second}"),
        "relay": relay(wanted, second),
    }
    entries = namespaces.one(TRY + f"say([reach(p) for p in ({wanted}, {second}, {other}, {wanted})])", **spec)
    assert entries == ["ping\n", "ping\n", "ConnectionRefusedError", "ping\n"]


def test_the_relay_carries_megabytes_both_ways(
    namespaces: Launcher, echo: Callable[[], int], relay: Callable[..., Path]
) -> None:
    port = echo()
    code = f"""
import hashlib, socket, threading
line = b"x" * (4 << 20) + b"\\n"
with socket.create_connection(("127.0.0.1", {port}), timeout=20) as s:
    threading.Thread(target=s.sendall, args=(line,)).start()
    got = s.makefile("rb").readline()
say(hashlib.md5(got).hexdigest() == hashlib.md5(line).hexdigest() and len(got))
"""
    spec: dict[str, Any] = {"network": "loopback", "endpoints": (f"127.0.0.1:{port}",), "relay": relay(port)}
    assert namespaces.one(code, **spec) == (4 << 20) + 1


def test_the_relay_takes_only_the_endpoints_it_was_made_for(
    namespaces: Launcher, echo: Callable[[], int], relay: Callable[..., Path]
) -> None:
    allowed, other = echo(), echo()
    spec: dict[str, Any] = {"network": "loopback", "endpoints": (f"127.0.0.1:{other}",), "relay": relay(allowed)}
    [result] = namespaces.run(Session(TRY + "say(1)", spec=spec))
    assert result.reported is None
    assert result.status == 1
    assert "the relay refused" in namespaces.errors


def test_sessions_share_a_relay_and_are_forgotten_when_they_end(
    namespaces: Launcher, echo: Callable[[], int], relay: Callable[..., Path]
) -> None:
    port = echo()
    spec: dict[str, Any] = {"network": "loopback", "endpoints": (f"127.0.0.1:{port}",), "relay": relay(port)}
    before = len(os.listdir("/proc/self/fd"))
    results = namespaces.run(*(Session(TRY + f"say(reach({port}))", spec=spec) for _ in range(8)))
    assert [r.reported for r in results] == ["ping\n"] * 8
    for _ in range(100):
        if len(os.listdir("/proc/self/fd")) <= before:
            break
        threading.Event().wait(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_servers_inside_do_not_clash(namespaces: Launcher) -> None:
    """Two sessions listen on the same port, which is also taken outside."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = f"import socket, time\ns = socket.create_server(('127.0.0.1', {port})); say(s.getsockname()[1]); time.sleep(20)"
        results = namespaces.run(*(Session(code, stays=True, spec={"network": "loopback"}) for _ in range(2)))
    assert [r.reported for r in results] == [port, port]


def test_landlock_allows_the_endpoints_ports_only(landlock: Launcher, echo: Callable[[], int]) -> None:
    wanted, other = echo(), echo()
    spec: dict[str, Any] = {"network": "loopback", "endpoints": (f"127.0.0.1:{wanted}",)}
    assert landlock.one(TRY + f"say([reach({wanted}), reach({other})])", **spec) == ["ping\n", "PermissionError"]


def test_landlock_does_not_hold_udp_and_its_report_says_so(landlock: Launcher) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(10)
        port = receiver.getsockname()[1]
        code = f"import socket; say(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', {port})))"
        assert landlock.one(code, network="loopback") == 3
        assert receiver.recv(10) == b"out"


@pytest.mark.parametrize("tier", ["landlock", "process"])
def test_a_network_mode_that_cannot_be_held_is_refused(tier: str, user: str, folder: Path) -> None:
    launcher = Launcher(tier, user, folder)
    [result] = launcher.run(Session("say(1)", spec={"network": "none"}))
    assert (result.reported, result.status) == (None, 1)
    assert "cannot hold network='none'" in launcher.errors


def test_abstract_sockets_of_the_host(launcher: Launcher) -> None:
    name = f"\0isolation-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen(1)
        code = f"""
import socket
try:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect({name!r})
    say("connected")
except OSError as e:
    say("refused")
"""
        assert launcher.one(code) == ("connected" if launcher.tier == "process" else "refused")


def test_a_unix_socket_by_path(launcher: Launcher) -> None:
    """Not there in namespaces; in the Landlock tier connecting is not held, as its report says."""
    path = str(launcher.folder.parent / "outside.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.listen(1)
        code = f"""
import socket
try:
    with socket.socket(socket.AF_UNIX) as s:
        s.connect({path!r})
    say("connected")
except OSError as e:
    say("refused")
"""
        assert launcher.one(code) == ("refused" if launcher.tier == "namespaces" else "connected")
