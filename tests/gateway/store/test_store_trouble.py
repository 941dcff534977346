"""Full disks, and disks that refuse now and then: what is kept, what is refused, what is never made up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import GatewayError
from agentcore_rl_toolkit.gateway import GatewayClient, SessionCapture
from agentcore_rl_toolkit.gateway.http.client import request
from agentcore_rl_toolkit.gateway.store.schema import FILE
from scripted_engine import Fault, ScriptedEngine

from ..asking import Start, opened
from ..asking import status_of as ask
from ..served import Served
from ..stores import refused


def turns_of(capture: SessionCapture) -> list[tuple[str, list[int], list[int]]]:
    return [(t.turn_id, t.prompt_ids, t.completion_ids) for t in capture.turns]


# -- calls that the disk refuses


@pytest.mark.parametrize("invalid", [False, True])
async def test_a_refused_call_is_an_error_and_uses_up_no_turn(
    engine: ScriptedEngine, start_gateway: Start, invalid: bool
) -> None:
    def without_tokens(reply: dict[str, Any]) -> dict[str, Any]:
        for choice in reply["choices"]:
            choice.pop("token_ids", None)
        return reply

    gateway = await start_gateway(engine)
    session = await opened(gateway, max_turns=2)
    assert await ask(session, "one") == 200
    with refused(gateway):
        if invalid:
            engine.faults.append(Fault(edit=without_tokens))
        assert await ask(session, "two") == 503
    state = gateway.sessions.by_id[session.session_id.encode()]
    counts = state.turns, state.errors, state.started_turns, gateway.sessions.turns, state.next_index
    assert counts == (1, 1, 1, 1, 2)
    assert (gateway.counters["store_failures"], gateway.counters["turns_invalid"]) == (1, int(invalid))
    for _ in range(200):  # until the store is looked at again
        if (status := await ask(session, "three")) != 503:
            break
        await asyncio.sleep(0.05)
    assert (status, await ask(session, "four")) == (200, 403)


# -- a full disk


class OnSmallDisk(Served):
    """A gateway process whose store lies on a file system of its own, which the test fills and empties."""

    def __init__(self, engine: ScriptedEngine, folder: Path) -> None:
        self.store = folder / "disk"
        self.store.mkdir()
        mount = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4m none "$0" && exec "$@"', str(self.store))
        super().__init__(folder, engine, "--store", str(self.store), "--set", "fsync=yes", under=mount)

    @property
    def inside(self) -> Path:
        return Path(f"/proc/{self.process.pid}/root{self.store}")

    def fill(self) -> None:
        fd = os.open(self.inside / "ballast", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, bytes(4096))
        os.close(fd)

    def empty(self) -> None:
        os.truncate(self.inside / "ballast", 0)

    def descriptors(self) -> int:
        """Open files of the store."""
        found = []
        for fd in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                found.append(str(fd.readlink()))
        return sum(FILE in name for name in found)


def small_disks_can_be_made() -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        line = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "none", "/mnt"]
        return subprocess.run(line, capture_output=True, timeout=10).returncode == 0
    return False


@pytest.fixture
async def full_disk(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[OnSmallDisk]:
    if not small_disks_can_be_made():
        pytest.skip("no file system can be mounted in a namespace here")
    disk = OnSmallDisk(engine, tmp_path)
    yield disk
    disk.kill()


@pytest.mark.system
async def test_on_a_full_disk_calls_and_sessions_are_refused_and_all_goes_on_when_there_is_room(
    full_disk: OnSmallDisk, engine: ScriptedEngine, start_gateway: Start, tmp_path: Path
) -> None:
    client = GatewayClient(await full_disk.start())
    names = [new_session_id() for _ in range(3)]
    one, two = await client.create_sessions_async(names[:2])
    for session in (one, two):
        assert await ask(session, "a", "b", "c") == 200
    before = full_disk.descriptors()
    full_disk.fill()
    pad = "x" * 8192  # more than the last page has left
    for _ in range(30):
        assert {await ask(s, "a", "b", "c", "d", pad) for s in (one, two)} == {503}
    assert await asyncio.gather(*(ask(s, "a", "b", pad, str(i)) for i in range(10) for s in (one, two))) == [503] * 20
    with pytest.raises(GatewayError, match="cannot store a session") as caught:
        await client.create_sessions_async([names[2]], metadata={"pad": pad})
    assert caught.value.status == 503
    assert full_disk.descriptors() == before
    assert (await client.health_async())["status"] == "store failing"
    await client.fetch_async([two.session_id])
    full_disk.empty()
    async with asyncio.timeout(30):
        while (await client.health_async())["status"] != "ok":  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.05)
    [three] = await client.create_sessions_async([names[2]])
    for session in (one, three):
        for entries in (("a", "b", "c", "d", "e"), ("a", "b", "c", "d", "e", "f", "g")):
            assert await ask(session, *entries) == 200
    seen = await client.fetch_async(names, close=False)
    assert [len(seen[n].turns) for n in names] == [3, 1, 2]
    assert seen[names[1]].closed
    copy = tmp_path / "copy"
    shutil.copytree(full_disk.inside, copy, ignore=shutil.ignore_patterns("lock", "ballast"))
    full_disk.kill()
    again = GatewayClient((await start_gateway(engine, store_dir=str(copy))).url)
    found = await again.fetch_async(names, close=False)
    assert {n: (turns_of(c), c.closed, len(c.errors)) for n, c in found.items()} == {
        n: (turns_of(c), c.closed, len(c.errors)) for n, c in seen.items()
    }


# -- a disk that refuses now and then


async def test_a_deletion_that_the_disk_refuses_is_not_said_to_be_done(
    engine: ScriptedEngine, start_gateway: Start
) -> None:
    gateway = await start_gateway(engine)
    session = await opened(gateway)
    assert await ask(session, "one") == 200
    with refused(gateway):
        status, _ = await request("POST", f"{gateway.url}/admin/delete", body={"session_ids": [session.session_id]})
    assert status == 503
