"""The life of one session, with a process that the test plays: when it is ready, pinged, idle, and over."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import LocalRuntimeError
from agentcore_rl_toolkit.runtime.agents.agent import Agent
from agentcore_rl_toolkit.runtime.config import RuntimeConfig, TimeLimits
from agentcore_rl_toolkit.runtime.launcher.connection import UpstreamLostError
from agentcore_rl_toolkit.runtime.launcher.place import NETWORK, Place
from agentcore_rl_toolkit.runtime.metrics import Metrics
from agentcore_rl_toolkit.runtime.sessions import session as module
from agentcore_rl_toolkit.runtime.sessions.session import Session, log_name, ping_status, shortened
from agentcore_rl_toolkit.runtime.sessions.table import SessionTable
from agentcore_rl_toolkit.runtime.wire import WireError

ID = new_session_id()


class Process:
    """Runs until it is stopped."""

    pid, cpu_s = 7, 0.5
    lost = False
    death: str | None = None

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.stops: list[float] = []

    def stop(self, grace_s: float) -> None:
        self.stops.append(grace_s)
        self.end(0)

    def end(self, status: int | None) -> None:
        if not self.ended.done():
            self.ended.set_result(status)


class Bench:
    """A table whose launcher and pings are the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, parallel: int = 4, **times: float) -> None:
        self.folder = folder
        self.pings: list[float] = []
        self.answer: Callable[[], tuple[int, bytes]] = lambda: (200, b"{}")
        self.process: Process | None = None
        self.spawned: asyncio.Event | None = None  # spawns wait for it
        self.discarded: list[Place] = []
        self.trouble: Exception | None = None  # discards raise it
        monkeypatch.setattr(Session, "ask", self.ask)
        monkeypatch.setattr(module, "PING_MIN_S", 0.1)
        monkeypatch.setattr(module, "LATE_DEATH_S", 0.01)
        limits = TimeLimits(**{"stop_grace_s": 3.0, "shutdown_grace_s": 2.0, "init_timeout_s": 5.0, **times})
        self.metrics = Metrics()
        self.admitted: list[tuple[str, int]] = []
        config = RuntimeConfig(times=limits, parallel_starts=parallel)
        self.table = SessionTable(self, config, self.metrics, lambda agent, *more: self.admitted.append(more))

    async def ask(self, session: Any = None) -> tuple[int, bytes]:
        self.pings.append(time.monotonic())
        return self.answer()

    def place(self, agent: Agent, name: str, log: str) -> Place:
        return Place(name, self.folder / name, self.folder / log, "")

    async def spawn(self, agent: Agent, place: Place) -> Any:
        if self.spawned is not None:
            await self.spawned.wait()
        self.process = Process()
        return self.process

    async def discard(self, place: Place) -> None:
        self.discarded.append(place)
        if self.trouble is not None:
            raise self.trouble

    def use(self, **options: Any) -> Any:
        agent = Agent(runtime_id="a-0123456789", version=1, name="a", script=Path("a.py"), **options)
        return self.table.open(agent, (agent.runtime_id, "DEFAULT", ID)).in_use()

    async def ending(self) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while not (self.table.ended and self.table.ended[-1]["gone"] and self.discarded):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return self.table.ended[-1]


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    await bench.table.close()


def busy(value: bool) -> tuple[int, bytes]:
    return 200, json.dumps({"status": "HealthyBusy" if value else "Healthy", "time_of_last_update": 1}).encode()


async def test_a_session_is_busy_from_its_first_ping_on(bench: Bench) -> None:
    bench.answer = lambda: busy(True)
    async with bench.use(idle_timeout_s=0.3) as session:
        assert session.busy
    await asyncio.sleep(0)
    assert bench.table.describe()[0]["state"] == "active"


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")], ids=repr
)
async def test_a_session_whose_files_cannot_be_removed_leaves_the_table(bench: Bench, error: Exception) -> None:
    bench.trouble = error
    async with bench.use() as session:
        assert bench.table.sessions_of(session.agent) == [session]
        session.end("stopped", 1.0)
    await bench.ending()
    async with asyncio.timeout(20):
        while bench.table.sessions_of(session.agent):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_an_idle_session_ends_at_its_limit_after_one_more_ping(bench: Bench) -> None:
    async with bench.use(idle_timeout_s=0.6):
        shown = bench.table.describe()[0]
        assert (shown["state"], shown["idle_s"], bench.admitted) == ("active", 0.0, [("DEFAULT", 0)])
    assert bench.table.describe()[0]["state"] == "idle"
    idle_from = time.monotonic()
    ending = await bench.ending()
    assert ending["state"] == "idle"
    assert ending["cause"] == "the session was ended because it was idle for 0.6 s"
    assert 0.55 < time.monotonic() - idle_from < 3
    assert len(bench.pings) == 3  # at its start, once after its last call, and before its end
    assert bench.process is not None
    assert bench.process.stops == [3.0]
    assert (ending["exit_status"], ending["cpu_s"]) == (0, 0.5)
    assert 0.6 <= ending["idle_s"] <= ending["age_s"] < 20
    assert ending["start_s"] < 20
    times = {name: ending[name] for name in ("gone_unix_s", "age_s", "idle_s", "start_s")}
    assert times == {name: round(value, 4 if name == "start_s" else 3) for name, value in times.items()}
    assert (bench.metrics.starts["+Inf"], bench.metrics.session_cpu_s) == (1, 0.5)


async def test_the_first_ping_after_a_call_comes_after_an_interval(bench: Bench) -> None:
    async with bench.use(idle_timeout_s=12.0):  # a sixtieth of it is the interval
        before = len(bench.pings)
    ended_s = time.monotonic()
    async with asyncio.timeout(20):
        while len(bench.pings) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert bench.pings[-1] - ended_s >= 0.199


async def test_calls_and_busy_pings_keep_a_session(bench: Bench) -> None:
    async with bench.use(idle_timeout_s=0.3):
        await asyncio.sleep(0.6)
        bench.answer = lambda: busy(True)
        assert bench.table.ended_total == {}
        assert len(bench.pings) == 1  # none while a call runs
    await asyncio.sleep(0.7)
    assert bench.table.describe()[0]["state"] == "active"
    assert bench.table.describe()[0]["idle_s"] == 0.0
    bench.answer = lambda: busy(False)
    free_from = time.monotonic()
    assert (await bench.ending())["state"] == "idle"
    assert time.monotonic() - free_from > 0.25


async def test_the_last_ping_before_the_limit_decides(bench: Bench) -> None:
    async with bench.use(idle_timeout_s=0.5):
        pass
    async with asyncio.timeout(20):
        while len(bench.pings) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    bench.answer = lambda: busy(True)
    await asyncio.sleep(0.8)
    assert bench.table.ended_total == {}


@pytest.mark.parametrize("error", [UpstreamLostError("nobody"), KeyError("of a kind that nobody foresaw")])
async def test_a_ping_that_fails_keeps_no_session(bench: Bench, error: Exception) -> None:
    def fail() -> Any:
        raise error

    async with bench.use(idle_timeout_s=0.2):
        bench.answer = fail
    assert (await bench.ending())["state"] == "idle"


@pytest.mark.parametrize(
    ("answers", "warning"),
    [
        ([b'{"status": "HealthyBusy"}', b"{}", b"{}"], "then ignores HealthyBusy"),
        ([b'{"time_of_last_update": 1}', b'{"time_of_last_update": 2}'], "then never ends the session as idle"),
        ([b'{"time_of_last_update": 1}', b'{"time_of_last_update": 1}'], None),
        ([b"{}", b"{}"], None),
        ([b'{"status": "HealthyBusy", "time_of_last_update": 1}', b'{"time_of_last_update": 2}'], None),
    ],
)
async def test_a_ping_that_agentcore_takes_otherwise_is_warned_of_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, answers: list[bytes], warning: str | None
) -> None:
    async with bench.use(idle_timeout_s=0.3):
        left = [*answers, answers[-1]]
        bench.answer = lambda: (200, left.pop(0) if len(left) > 1 else left[0])
    assert (await bench.ending())["state"] == "idle"
    assert caplog.text.count("its response to /ping") == (0 if warning is None else 1)
    assert warning is None or warning in caplog.text


async def test_the_maximum_lifetime_ends_a_session_under_a_call(bench: Bench) -> None:
    began = time.monotonic()
    async with bench.use(max_lifetime_s=0.4):
        ending = await bench.ending()
    assert (ending["state"], ending["inflight"]) == ("max_lifetime", 1)
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize(
    ("status", "lost", "death", "state", "cause"),
    [
        (3, False, None, "crashed", "the session's process ended with status 3"),
        (0, False, None, "crashed", "the session's process ended with status 0"),
        (-9, False, None, "crashed", "the session's process was killed by SIGKILL"),
        (-99, False, None, "crashed", "the session's process was killed by signal 99"),
        (None, False, None, "crashed", "the session's process has ended"),
        (137, False, "out of memory", "crashed", "out of memory"),
        (None, True, "node n was lost", "lost", "node n was lost"),
    ],
)
async def test_a_process_that_ends_ends_its_session(
    bench: Bench, status: int | None, lost: bool, death: str | None, state: str, cause: str
) -> None:
    async with bench.use() as session:
        assert bench.process is not None
        assert await session.death() is None
        bench.process.lost, bench.process.death = lost, death
        bench.process.end(status)
        await asyncio.wait_for(session.closed.wait(), 20)
        assert await session.death() == cause
    ending = await bench.ending()
    assert (ending["state"], ending["cause"], ending["exit_status"]) == (state, cause, status)
    assert bench.table.sessions == {}
    assert bench.table.ended_total == {state: 1}


@pytest.mark.parametrize(
    ("reason", "code"), [("stopped", "RetryableConflictException"), ("shutdown", "RuntimeClientError")]
)
async def test_a_stop_while_it_starts_is_a_conflict_to_retry(bench: Bench, reason: str, code: str) -> None:
    bench.spawned = asyncio.Event()
    waiting = asyncio.create_task(bench.use().__aenter__())
    await asyncio.sleep(0.05)
    [key] = bench.table.sessions
    if reason == "stopped":
        assert bench.table.stop(key) is not None
        assert bench.table.stop(key) is None
    else:
        bench.table.sessions[key].end(reason, 1.0)
    with pytest.raises(WireError) as error:
        await waiting
    assert error.value.code == code
    bench.spawned.set()
    assert (await bench.ending())["state"] == reason
    assert bench.process is not None
    assert bench.process.stops == [0.0]
    assert bench.table.ended_total == {reason: 1}


async def test_a_session_that_was_stopped_before_it_was_healthy_has_no_error(bench: Bench) -> None:
    bench.answer = lambda: (503, b"")
    waiting = asyncio.create_task(bench.use().__aenter__())
    async with asyncio.timeout(20):
        while len(bench.pings) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    [session] = bench.table.sessions.values()
    assert session.error == "503"
    session.end("stopped", 1.0)
    with pytest.raises(WireError):
        await waiting
    assert (await bench.ending())["error"] is None


@pytest.mark.parametrize(
    ("answer", "last"),
    [
        ((503, b""), ", the last one was 503$"),
        (OSError("no route"), ", the last one was no route$"),
        (UpstreamLostError(), ", the last one was UpstreamLostError$"),
        (None, r"within 0\.4 s$"),
    ],
)
async def test_a_start_ends_at_its_limit_and_names_the_last_ping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, last: str
) -> None:
    def reply() -> tuple[int, bytes]:
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]  # a status and a body

    bench = Bench(tmp_path, monkeypatch, init_timeout_s=0.4)
    bench.answer = reply
    bench.spawned = asyncio.Event() if answer is None else None
    began = time.monotonic()
    with pytest.raises(WireError, match=rf"completes in 0\.4s\..*{last}") as error:
        await bench.use().__aenter__()
    assert 0.35 < time.monotonic() - began < 3
    assert error.value.status == 424
    if bench.spawned is not None:
        bench.spawned.set()
    assert (await bench.ending())["state"] == "failed_to_start"
    assert bench.metrics.starts["+Inf"] == 0
    assert answer is None or 3 <= len(bench.pings) <= 6  # the pauses grow
    await bench.table.close()


async def test_a_start_that_begins_late_has_the_rest_of_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch, init_timeout_s=1.0)
    bench.spawned = asyncio.Event()
    agent = Agent(runtime_id="a-0123456789", version=1, name="a", script=Path("a.py"))
    began = time.monotonic()
    with pytest.raises(WireError, match=r"completes in 1s\."):
        await bench.table.open(agent, (agent.runtime_id, "DEFAULT", ID), start_delay_s=0.95).in_use().__aenter__()
    assert 0.95 < time.monotonic() - began < 2.7
    bench.spawned.set()
    await bench.ending()
    await bench.table.close()


async def test_a_start_that_fails_has_the_cause_and_the_end_of_its_log(bench: Bench) -> None:
    (bench.folder / f"{ID}.log").write_text("no model weights here")

    def dies() -> Any:
        assert bench.process is not None
        bench.process.end(4)
        raise UpstreamLostError("refused")

    bench.answer = dies
    with pytest.raises(WireError, match=r"^Runtime initialization failed\. .*status 4.*no model weights here"):
        await bench.use().__aenter__()
    ending = await bench.ending()
    assert ending["cause"].startswith("the session did not start: its process ended (status 4)")


@pytest.mark.parametrize(
    ("error", "text", "logged"),
    [(LocalRuntimeError("no room"), "no room", False), (KeyError("a bug"), "KeyError: 'a bug'", True)],
)
async def test_a_spawn_that_fails_is_its_callers_424(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception, text: str, logged: bool
) -> None:
    async def spawn(agent: Agent, place: Place) -> Any:
        raise error

    bench.spawn = spawn  # type: ignore[method-assign]
    with pytest.raises(WireError, match="Runtime initialization failed") as raised:
        await bench.use().__aenter__()
    assert raised.value.message == f"Runtime initialization failed. {text}"
    assert ("Traceback" in caplog.text) is logged
    assert "Exception in callback" not in caplog.text
    assert (await bench.ending())["pid"] is None


async def test_only_so_many_start_at_once_and_their_time_counts_from_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, monkeypatch, parallel=1, init_timeout_s=0.5)
    spawned: list[Place] = []

    async def spawn(agent: Agent, place: Place) -> Any:
        spawned.append(place)
        await asyncio.sleep(0.3)
        return Process()

    bench.spawn = spawn  # type: ignore[method-assign]
    agent = Agent(runtime_id="a-0123456789", version=1, name="a", script=Path("a.py"))
    calls = [bench.table.open(agent, (agent.runtime_id, "DEFAULT", new_session_id())).in_use() for _ in range(3)]
    waiting = [asyncio.create_task(call.__aenter__()) for call in calls]
    await asyncio.sleep(0.1)
    assert [s["state"] for s in bench.table.describe()] == ["starting"] * 3
    assert len(spawned) == 1
    await asyncio.gather(*waiting)
    assert len({place.name for place in spawned}) == 3
    assert [(s["inflight"], s["invocations"]) for s in bench.table.describe()] == [(1, 1)] * 3
    assert bench.table.started_total == 3
    for call in calls:
        await call.__aexit__(None, None, None)
    await bench.table.close()


async def test_a_shutdown_shortens_the_grace_of_a_stopped_session(bench: Bench) -> None:
    async with bench.use():
        pass
    assert bench.process is not None
    bench.process.end = lambda status: None  # type: ignore[method-assign]  # it ignores SIGTERM
    [key] = bench.table.sessions
    bench.table.stop(key)
    closing = asyncio.create_task(bench.table.close())
    await asyncio.sleep(0.05)
    assert bench.process.stops == [3.0, 2.0]
    bench.process.ended.set_result(-9)
    await closing
    assert bench.table.ended[0]["state"] == "stopped"


async def test_endings_are_of_the_sessions_that_were_asked_for(bench: Bench) -> None:
    async with bench.use() as session:
        key = session.key
        assert bench.table.endings(*key[:2], [ID]) == {}
    bench.table.stop(key)
    await bench.ending()
    found = bench.table.endings(*key[:2], [ID, "other"])
    assert found == {
        ID: {"cause": "the session was stopped by a request to its runtime", "gone": True, "log": found[ID]["log"]}
    }
    assert bench.table.endings(key[0], "prod", [ID]) == bench.table.endings("b", key[1], [ID]) == {}


async def test_the_response_to_a_ping_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 104 bytes on macOS

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 203 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))
        writer.close()

    class Reached(Process):
        async def dial(self) -> Any:
            return await NETWORK.connect_unix_socket("s")

    agent = Agent(runtime_id="a-0123456789", version=1, name="a", script=Path("a.py"))
    place = Place("1", tmp_path, tmp_path / "log", "")
    session = Session(("a", "DEFAULT", ID), agent, place, times=TimeLimits(), on_end=lambda _: None)
    session.process = Reached()
    async with await asyncio.start_unix_server(reply, "s"):
        size = 65_536
        assert await session.ask() == (203, bytes(size))
        size += 1
        with pytest.raises(UpstreamLostError, match="more than 65536 bytes"):
            await session.ask()


def test_the_response_to_a_ping_may_be_anything() -> None:
    for body in (b"OK", b"[]", b"{}", b"null"):
        assert ping_status(body) == ("Healthy", None)
    assert ping_status(b'{"status": "HealthyBusy", "time_of_last_update": 5}') == ("HealthyBusy", 5)


def test_the_name_of_a_log_is_no_path_and_one_per_endpoint() -> None:
    assert log_name("a_B-9", endpoint="DEFAULT") == "a_B-9.log"
    assert log_name("a_B-9", endpoint="prod") == "a_B-9.prod.log"
    assert log_name("a" * 128, endpoint="DEFAULT") == f"{'a' * 128}.log"
    for odd in ("../x", "../y", "a" * 129, "\ud800"):
        digest = hashlib.sha256(odd.encode(errors="surrogatepass")).hexdigest()
        assert log_name(odd, endpoint="DEFAULT") == f"id.{digest[:40]}.log"


def test_a_long_cause_keeps_its_beginning_and_end() -> None:
    assert shortened("one\n\n two ") == "one | two"
    assert shortened("x" * 600) == "x" * 600
    assert shortened(f"begin {'x' * 2_000} end") == f"begin {'x' * 194} ... {'x' * 296} end"
