"""Placement, loss and drain over real node agents, real processes and real agents, without a cluster manager."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import AgentLoadError, ConfigError, LocalRuntimeError
from agentcore_rl_toolkit.runtime.cluster import bundles, handshake
from agentcore_rl_toolkit.runtime.cluster.link import NodeLink
from agentcore_rl_toolkit.runtime.cluster.machines import AgentAddress, ClusterConfig, Machine
from agentcore_rl_toolkit.runtime.cluster.nodes import Cluster
from agentcore_rl_toolkit.runtime.cluster.ray_nodes import AgentKeeper
from agentcore_rl_toolkit.runtime.config import IsolationConfig, RuntimeConfig, TimeLimits
from agentcore_rl_toolkit.runtime.http.commands import run_command
from agentcore_rl_toolkit.runtime.http.invoke import relay
from agentcore_rl_toolkit.runtime.runtime import Runtime
from agentcore_rl_toolkit.runtime.sessions.table import Session
from agentcore_rl_toolkit.runtime.wire import WireError

from ..conftest import AGENTS, alive

CONFIG = RuntimeConfig(
    isolation=IsolationConfig(tier="none"),
    session_env={"COLOUR": "green"},
    times=TimeLimits(stop_grace_s=2.0, shutdown_grace_s=2.0),
)


class Machines:
    """Machines that are node agents on this one. Which are there is the test's choice."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.keepers: dict[str, AgentKeeper] = {}
        self.starting: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.addresses: dict[str, AgentAddress] = {}
        self.placed: list[str] = []
        self.removing = asyncio.Event()  # what removes an agent waits for it
        self.removing.set()
        self.token = ""
        self.looked = self.overlaps = 0

    async def open(self) -> None:
        assert self.names

    async def machines(self) -> list[Machine]:
        self.looked += 1
        return [Machine(node_id=name, host="127.0.0.1", cpus=1.0) for name in self.names]

    async def place(self, machine: Machine, token: str) -> AgentAddress:
        self.token = token
        self.overlaps += machine.node_id in self.keepers  # the agent that was there has not been removed
        keeper = self.keepers[machine.node_id] = AgentKeeper()
        starting = self.starting[machine.node_id] = asyncio.create_task(
            asyncio.to_thread(keeper.start, machine.host, token, 60.0)
        )
        answer = await asyncio.shield(starting)
        self.placed.append(machine.node_id)
        self.addresses[machine.node_id] = AgentAddress(**answer)
        return self.addresses[machine.node_id]

    async def remove(self, node_id: str) -> None:
        await self.removing.wait()
        if node_id in self.keepers:
            with contextlib.suppress(RuntimeError):
                await self.starting[node_id]  # a start that nobody waits for any more goes on in its thread
            await asyncio.to_thread(self.keepers[node_id].stop)
            del self.keepers[node_id]

    async def close(self) -> None:
        for node_id in list(self.keepers):
            await self.remove(node_id)


class Served:
    """A started runtime over machines, called as its HTTP face would call it."""

    def __init__(self, runtime: Runtime, cluster: Cluster, machines: Machines) -> None:
        self.runtime, self.cluster, self.machines = runtime, cluster, machines

    async def session(self, session_id: str | None = None) -> Session:
        agent = next(iter(self.runtime._agents.values()))
        return await self.runtime.table.acquire(agent, "DEFAULT", session_id or new_session_id())

    async def invoke(self, payload: Any, session_id: str | None = None) -> Any:
        session = await self.session(session_id)
        reply: list[bytes] = []

        async def send(message: dict[str, Any]) -> None:
            reply.append(message.get("body", b""))

        body = [json.dumps(payload).encode()]
        headers = [(b"content-type", b"application/json")]
        await relay(self.runtime.table, session, send, headers=headers, body=body, request_id="r")
        return json.loads(b"".join(reply))

    def node_of(self, session_id: str) -> str:
        [found] = [s for s in self.runtime.table.describe() if s["session_id"] == session_id]
        return str(found["node"])

    def node(self, node_id: str) -> dict[str, Any]:
        [found] = [n for n in self.cluster.nodes() if n["node_id"] == node_id]
        return found

    def ended(self, session_id: str) -> dict[str, Any]:
        [found] = [e for e in self.runtime.table.ended if e["session_id"] == session_id]
        return found


@asynccontextmanager
async def served(
    *names: str, config: RuntimeConfig = CONFIG, agent: Path = AGENTS / "bare.py", **settings: Any
) -> AsyncIterator[Served]:
    machines = Machines(*names)
    cluster = Cluster(config, machines, ClusterConfig(**{"poll_s": 0.1, "join_timeout_s": 30.0, **settings}))
    runtime = Runtime(config, cluster=cluster)
    try:
        await runtime.start([("probe", agent)])
        yield Served(runtime, cluster, machines)
    finally:
        await runtime.close()
        assert not machines.keepers


async def until(condition: Any, *, within_s: float = 30.0) -> Any:
    async with asyncio.timeout(within_s):
        while not (value := condition()):  # noqa: ASYNC110  # polls other processes
            await asyncio.sleep(0.02)
        return value


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Agents' code is unpacked here. Outside the system's temporary folder nothing is needed: sessions are plain processes."""
    monkeypatch.setenv("AGENTCORE_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


async def test_sessions_spread_and_keep_their_node_and_leave_nothing() -> None:
    async with served("a", "b") as s:
        await until(lambda: len(s.cluster._open_links()) == 2)
        ids = [new_session_id() for _ in range(4)]
        first = [await s.invoke({"do": "echo", "x": 1}, i) for i in ids]
        nodes = [s.node_of(i) for i in ids]
        assert sorted(nodes) == ["a", "a", "b", "b"]
        again = [await s.invoke({"do": "echo"}, i) for i in ids]
        assert [r["pid"] for r in again] == [r["pid"] for r in first]
        assert [r["calls"] for r in again] == [2] * 4
        where = await s.invoke({"do": "where"}, ids[0])
        assert where["env"]["COLOUR"] == "green"
        assert not [k for k in where["env"] if k.startswith("RAY_")]
        assert s.node("a")["sessions"] == 2
        pids = [r["pid"] for r in first] + [a.pid for a in s.machines.addresses.values()]
    assert not [pid for pid in pids if alive(pid)]


async def test_a_remote_session_has_the_variables_that_are_its_own() -> None:
    async with served("a") as s:
        s.runtime.table.variables_of = lambda session: {"AWS_ACCESS_KEY_ID": f"KEY{session.directory.name}"}
        keys = [(await s.invoke({"do": "where"}, new_session_id()))["env"]["AWS_ACCESS_KEY_ID"] for _ in range(2)]
        numbers = [session.directory.name for session in s.runtime.table.sessions.values()]
        assert keys == [f"KEY{number}" for number in numbers]
        assert len(set(keys)) == 2


async def test_output_of_a_remote_session_can_be_read_during_and_after_it(tmp_path: Path) -> None:
    async with served("a") as s:
        sid = new_session_id()
        await s.invoke({"do": "print", "text": "a line of the agent"}, sid)
        [session] = s.runtime.table.sessions.values()
        assert b"a line of the agent" in await session.process.read_log(0)
        memory, cpu_s = await session.process.usage()
        assert memory > 2**20
        assert cpu_s >= 0
        s.runtime.table.stop(session.key)
        await until(lambda: s.ended(sid).get("exit_status") is not None)
        assert "a line of the agent" in session.log_path.read_text()
        assert s.ended(sid)["cpu_s"] > 0


async def test_command_runs_beside_the_remote_session_and_is_killed_on_its_timeout() -> None:
    async with served("a") as s:
        session = await s.session()
        sent: list[bytes] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))

        await run_command(session, "echo out; echo err >&2; pwd; exit 3", 20, send)
        output = b"".join(sent)
        assert b"out" in output
        assert b"err" in output
        assert b'"exitCode": 3' in output
        sent.clear()
        await run_command(session, "head -c 3000000 /dev/zero | tr '\\0' x", 20, send)
        assert b"".join(sent).count(b"x") >= 3_000_000
        sent.clear()
        await run_command(session, "sleep 100", 0.3, send)
        assert b"TIMED_OUT" in b"".join(sent)
        s.runtime.table.release(session)


async def test_killed_node_loses_its_sessions_only_and_its_id_starts_anew_elsewhere() -> None:
    async with served("a", "b") as s:
        await until(lambda: len(s.cluster._open_links()) == 2)
        ids = [new_session_id() for _ in range(4)]
        before = {i: await s.invoke({"do": "echo"}, i) for i in ids}
        on_a, on_b = ([i for i in ids if s.node_of(i) == n] for n in "ab")
        calls = {i: asyncio.create_task(s.invoke({"do": "sleep", "s": 5}, i)) for i in ids}
        await until(lambda: all(d["inflight"] for d in s.runtime.table.describe()))
        s.machines.names.remove("a")
        os.kill(s.machines.addresses["a"].pid, signal.SIGKILL)
        for i in on_a:
            with pytest.raises(WireError, match="node a is lost") as raised:
                await calls[i]
            assert raised.value.status == 424
            assert s.ended(i)["state"] == "lost"
            assert "node a is lost" in s.ended(i)["error"]
        for i in on_b:
            assert (await calls[i])["calls"] == 2
        fresh = await s.invoke({"do": "echo"}, on_a[0])
        assert fresh["calls"] == 1
        assert s.node_of(on_a[0]) == "b"
        assert s.node("a")["state"] == "lost"
        await until(lambda: not any(alive(before[i]["pid"]) for i in on_a))


async def test_silent_node_is_lost_within_its_limit_and_calls_do_not_hang() -> None:
    async with served("a", "b", silence_s=1.5) as s:
        await until(lambda: len(s.cluster._open_links()) == 2)
        ids = [new_session_id() for _ in range(2)]
        for i in ids:
            await s.invoke({"do": "echo"}, i)
        [on_a] = [i for i in ids if s.node_of(i) == "a"]
        call = asyncio.create_task(s.invoke({"do": "sleep", "s": 60}, on_a))
        await until(lambda: any(d["inflight"] for d in s.runtime.table.describe()))
        s.machines.names.remove("a")
        pid = s.machines.addresses["a"].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(30):
                with pytest.raises(WireError, match=r"silent|left the cluster"):
                    await call
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: not alive(pid))  # it ends itself: its router has hung up


async def test_agent_that_died_on_a_live_machine_is_placed_again() -> None:
    async with served("a") as s:
        await s.invoke({"do": "echo"})
        os.kill(s.machines.addresses["a"].pid, signal.SIGKILL)
        await until(lambda: s.machines.placed == ["a", "a"] and s.cluster._open_links())
        assert (await s.invoke({"do": "echo"}))["calls"] == 1


async def test_nothing_is_placed_where_the_agent_before_is_still_being_removed() -> None:
    """Else its removal would take the new agent with it."""
    async with served("a") as s:
        s.machines.removing.clear()
        os.kill(s.machines.addresses["a"].pid, signal.SIGKILL)
        await until(lambda: not s.cluster._open_links())
        looked = s.machines.looked
        await until(lambda: s.machines.looked >= looked + 3)
        s.machines.removing.set()
        await until(s.cluster._open_links)
        assert s.machines.placed == ["a", "a"]
        assert not s.machines.overlaps


async def test_draining_node_gets_no_sessions_and_goes_when_empty() -> None:
    async with served("a", "b") as s:
        await until(lambda: len(s.cluster._open_links()) == 2)
        ids = [new_session_id() for _ in range(2)]
        for i in ids:
            await s.invoke({"do": "echo"}, i)
        [on_a] = [i for i in ids if s.node_of(i) == "a"]
        assert s.cluster.drain("a")["state"] == "draining"  # type: ignore[index]
        assert s.cluster.drain("nowhere") is None
        for _ in range(3):
            new = new_session_id()
            await s.invoke({"do": "echo"}, new)
            assert s.node_of(new) == "b"
        assert (await s.invoke({"do": "echo"}, on_a))["calls"] == 2
        assert s.node_of(on_a) == "a"
        pid = s.machines.addresses["a"].pid
        [key] = [k for k in s.runtime.table.sessions if k[2] == on_a]
        s.runtime.table.stop(key)
        await until(lambda: s.node("a")["state"] == "drained" and not alive(pid))
        await asyncio.sleep(0.3)
        assert s.machines.placed == ["a", "b"] or s.machines.placed == ["b", "a"]  # it does not come back by itself


async def test_full_cluster_refuses_and_a_joining_node_makes_room() -> None:
    async with served("a", sessions_per_node=2) as s:
        for _ in range(2):
            await s.invoke({"do": "echo"})
        with pytest.raises(WireError, match="no room") as raised:
            await s.invoke({"do": "echo"})
        assert raised.value.status == 402
        s.machines.names.append("b")
        await until(lambda: len(s.cluster._open_links()) == 2)
        new = new_session_id()
        await s.invoke({"do": "echo"}, new)
        assert s.node_of(new) == "b"


async def test_agent_that_does_not_load_shows_its_traceback() -> None:
    with pytest.raises(AgentLoadError, match="Traceback"):
        async with served("a", agent=AGENTS / "broken.py"):
            pytest.fail("it was served")


async def test_machine_whose_agent_does_not_start_is_shown_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Machines.place
    broken = {"b"}

    async def some(self: Machines, machine: Machine, token: str) -> AgentAddress:
        if machine.node_id in broken:
            raise LocalRuntimeError("no room for the agent")
        return await place(self, machine, token)

    monkeypatch.setattr(Machines, "place", some)
    async with served("a", "b") as s:
        await until(lambda: s.node("b")["state"] == "failed")
        assert s.node("b")["reason"] == "no room for the agent"
        assert (await s.invoke({"do": "echo"}))["calls"] == 1
        broken.clear()
        await until(lambda: s.node("b")["state"] == "ready")


async def test_cluster_without_machines_says_so() -> None:
    class Nothing(Machines):
        async def machines(self) -> list[Machine]:
            return []

    cluster = Cluster(CONFIG, Nothing("x"), ClusterConfig(join_timeout_s=0.3, poll_s=0.1))
    try:
        with pytest.raises(ConfigError, match="no node of the cluster"):
            await cluster.start()
    finally:
        await cluster.close()


async def test_agent_answers_only_who_holds_its_token() -> None:
    async with served("a") as s:
        session = await s.session()
        address = s.machines.addresses["a"]
        for token, purpose in (
            ("wrong", {"kind": "session", "id": session.process.id}),
            ("wrong", {"kind": "control"}),
            (s.machines.token, {"kind": "control"}),  # there is one router
            (s.machines.token, {"kind": "session", "id": "no such session"}),
        ):
            sock = await handshake.dial(address.host, address.port, token, purpose)
            sock.setblocking(True)
            sock.settimeout(10)
            try:
                assert await asyncio.to_thread(_first_byte, sock) == b""
            finally:
                sock.close()
        s.runtime.table.release(session)
        assert (await s.invoke({"do": "echo"}, session.id))["calls"] == 1


def _first_byte(sock: socket.socket) -> bytes:
    try:
        sock.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return sock.recv(1)
    except ConnectionError:
        return b""


def test_mac_belongs_to_one_nonce_and_one_purpose() -> None:
    nonce, other = handshake.new_nonce(), handshake.new_nonce()
    line = handshake.opening("t", nonce, {"kind": "control"})
    assert handshake.verify("t", nonce, line) == {"kind": "control"}
    assert handshake.verify("t", other, line) is None
    assert handshake.verify("u", nonce, line) is None
    assert handshake.verify("t", nonce, line.replace(b"control", b"session")) is None
    for broken in (
        b"",
        b"{}",
        b"[]",
        b'{"for": 1, "mac": "x"}',
        b'{"for": "{}", "mac": "\xc3\xa9"}',
        b"\xff",
        b"[" * 4096,
    ):
        assert handshake.verify("t", nonce, broken) is None


async def test_unreachable_agent_is_an_error_in_time() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(LocalRuntimeError, match="no answer in time"):
            await handshake.dial("127.0.0.1", listener.getsockname()[1], "t", {}, timeout_s=0.2)


def test_bundle_is_keyed_by_content_and_leaves_environments_out(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    for name in (
        "agent.py",
        "prompts/system.txt",
        ".git/config",
        "__pycache__/x.pyc",
        "env/pyvenv.cfg",
        "env/lib/big.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    bundle = bundles.pack(folder)
    os.utime(folder / "agent.py", (1, 1))
    assert bundles.pack(folder).key == bundle.key
    target = bundles.unpack(bundle.data, bundle.key, tmp_path / "code")
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()) == [
        "agent.py",
        "prompts/system.txt",
    ]
    assert bundles.unpack(bundle.data, bundle.key, tmp_path / "code") == target
    (folder / "agent.py").write_text("changed")
    assert bundles.pack(folder).key != bundle.key


def test_folder_too_large_to_send_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAX_BUNDLE_BYTES", 10)
    (tmp_path / "data").write_bytes(b"x" * 11)
    with pytest.raises(ConfigError, match="too much to send"):
        bundles.pack(tmp_path)


def test_capacity_follows_cores_memory_and_configuration() -> None:
    machine = Machine(node_id="a", host="h", cpus=2.0, memory_bytes=1024 * 2**20)
    assert ClusterConfig().capacity(machine, None) == 12  # 0.8 GiB by 64 MiB
    assert ClusterConfig().capacity(machine, 2**20) == 100  # 50 a core
    assert ClusterConfig(sessions_per_node=7).capacity(machine, None) == 7
    assert ClusterConfig().capacity(Machine(node_id="a", host="h", cpus=0.01), None) == 1
    with pytest.raises(ConfigError):
        ClusterConfig(sessions_per_node=0)


class NoMachines:
    """A provider that fails, in ways of its own, before it answers."""

    def __init__(self) -> None:
        self.failures: list[Exception] = [ValueError("an answer of another form"), KeyError("nodes")]
        self.answered = asyncio.Event()

    async def machines(self) -> list[Machine]:
        if self.failures:
            raise self.failures.pop()
        self.answered.set()
        return []


async def test_a_provider_that_fails_in_its_own_way_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    provider: Any = NoMachines()
    cluster = Cluster(CONFIG, provider, ClusterConfig(poll_s=0.01))
    watching = asyncio.create_task(cluster._watch())
    try:
        await asyncio.wait_for(provider.answered.wait(), 30)
    finally:
        watching.cancel()
    assert "an answer of another form" in caplog.text


async def test_a_node_that_says_what_none_says_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    address = AgentAddress(host="127.0.0.1", port=1, pid=1)
    link = NodeLink(Machine(node_id="n", host="127.0.0.1", cpus=1.0), address, "token", capacity=1, silence_s=9.0)
    answer = asyncio.StreamReader()
    answer.feed_data(b'{"ev": "started"}\n')  # of which session, it does not say
    await asyncio.wait_for(link._read(answer), 30)
    assert link.lost is not None
    assert "KeyError" in link.lost
    assert "cannot be understood" in caplog.text
