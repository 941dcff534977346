"""Who is at the other end of a connection, as the kernel says."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit._servers import callers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who holds a connection")


@pytest.mark.parametrize(
    ("listening", "calling"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")], ids=str
)
def test_asking_the_kernel_for_one_socket_and_reading_all_of_them_agree(listening: str, calling: str) -> None:
    family = socket.AF_INET6 if ":" in listening else socket.AF_INET
    with (
        socket.create_server((listening, 0), family=family, dualstack_ipv6=listening == "::") as listener,
        socket.create_connection((calling, listener.getsockname()[1])) as ours,
    ):
        theirs, _ = listener.accept()
        with theirs:
            client, server = theirs.getpeername()[:2], theirs.getsockname()[:2]
            expected = (os.getuid(), os.fstat(ours.fileno()).st_ino)
            assert callers._ask_for(client, server) == callers._look_for(client, server) == expected
            ours.close()
            assert callers._ask_for(client, server) is callers._look_for(client, server) is None
        nobody = ("::1" if ":" in calling else calling, listener.getsockname()[1])
        assert callers._ask_for(nobody, (nobody[0], 1)) is None  # not what listens there


CLIENT = """
import socket, sys
kept = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
sys.stdin.read()
"""


def test_who_connects_is_searched_once_and_known_afterwards(tmp_path: Path) -> None:
    """A client's further connections cost no search, whichever they are; the client's end is noticed."""
    script = tmp_path / "asks.py"
    script.write_text(
        """
import asyncio, os, socket, sys
from agentcore_rl_toolkit._servers import callers
listener = socket.socket(fileno=int(sys.argv[1]))
ends = [listener.accept()[0] for _ in range(40)]
searches = []
search = callers._holders_of
callers._holders_of = lambda *which: searches.append(which) or search(*which)

async def main():
    asked = callers.Callers(lambda: ())
    first = ends[:8]
    found = await asyncio.gather(*(asked.ask(e.getpeername(), e.getsockname()) for e in first))
    assert all(caller.is_user for caller in found), found
    assert len(searches) <= 2, searches
    before = len(searches)
    for end in reversed(ends):
        assert asked.known(end.getpeername(), end.getsockname()).is_user
    assert len(searches) == before
    print("known", flush=True)
    sys.stdin.readline()
    for end in ends:
        assert not (await asked.ask(end.getpeername(), end.getsockname())).is_user
    asked.close()

asyncio.run(main())
"""
    )
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port, fd = str(listener.getsockname()[1]), listener.fileno()
        client = subprocess.Popen([sys.executable, "-c", CLIENT, port, "40"], stdin=subprocess.PIPE)
        asks = subprocess.Popen(
            [sys.executable, str(script), str(fd)],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with client, asks:
            assert asks.stdout is not None
            assert asks.stdin is not None
            output = asks.stdout.readline()
            client.kill()
            client.wait()
            asks.stdin.write("\n")
            asks.stdin.flush()
            assert asks.wait(30) == 0
            assert output == "known\n"


async def test_a_search_that_fails_holds_up_no_later_one(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = [KeyError("of a kind that nobody foresaw")]

    def sessions() -> list[Any]:
        if failures:
            raise failures.pop()
        return []

    asked = callers.Callers(sessions)
    here, there = socket.socketpair()
    try:
        inode = os.fstat(here.fileno()).st_ino
        assert await asyncio.wait_for(asked._search_for(inode), 30) is None
        assert await asyncio.wait_for(asked._search_for(inode), 30) == os.getpid()
    finally:
        asked.close()
        here.close()
        there.close()
    assert "of a kind that nobody foresaw" in caplog.text
