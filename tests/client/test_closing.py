"""The end of a client: every session is stopped, or reported to the caller and in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from typing import Any, cast

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.aws_errors import Fate
from agentcore_rl_toolkit.client import Deadlines, stops
from agentcore_rl_toolkit.client.ledger import NO_LEDGER, Attempt
from agentcore_rl_toolkit.client.pacing import Pacer
from agentcore_rl_toolkit.client.stops import Stops
from agentcore_rl_toolkit.client.transport import CallError, Transport
from agentcore_rl_toolkit.errors import ConfigError
from scripted_runtime import ScriptedRuntime
from serving import wait_for as until

from .conftest import MakeClient

HANG = {"script": {"hang": True}}


def close(client: RolloutClient, how: str) -> list[str]:
    return asyncio.run(client.aclose()) if how == "async" else client.close()


def test_close_stops_all_sessions_although_the_pace_needs_longer_than_the_deadline(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    client = make_client(deadlines=Deadlines(stop_s=1.0))
    for _ in range(16):
        client.submit(HANG)
    until(lambda: runtime.runs == 16)
    make_client(tps_limit=8)  # the pace of an agent is that of its slowest client
    assert client.close() == []
    assert runtime.live == []


class Stoppable:
    """A runtime whose stops fail, may succeed later, or succeed."""

    def __init__(self) -> None:
        self.pacer, self.ended = Pacer(), list[tuple[str, bool]]()

    def stop(self, session_id: str) -> None:
        if "failing" in session_id:
            raise RuntimeError("a fault that does not pass")
        if "busy" in session_id:
            raise CallError("a fault that may pass", fate=Fate.TRANSIENT)

    def stops(self, stop_s: float, tps: float) -> Stops:
        self.pacer.join(self, tps, None)
        return Stops(cast("Transport", self), self.pacer, stop_s, lambda *end: self.ended.append(end))


async def test_a_drain_waits_for_a_slow_pace_and_gives_up_after_a_failure_without_a_success() -> None:
    runtime = Stoppable()
    stops = runtime.stops(0.2, 2.0)

    async def drain(*session_ids: str) -> None:
        for session_id in session_ids:
            stops.start(session_id, NO_LEDGER)
        async with asyncio.timeout(30):
            await stops.drain()

    await drain("failing")
    await drain("a", "b")  # each waits half a second for its turn, and the failure came before
    assert runtime.ended == [("failing", False), ("a", True), ("b", True)]
    runtime.pacer.join(runtime, 0.001, None)
    await drain("failing, too", "c")
    assert list(stops.left) == ["failing", "failing, too", "c"]
    assert stops.counts == {"stop_failed": 2, "stopped": 2}


async def test_a_stop_is_sent_again_until_its_pauses_reach_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []
    monkeypatch.setattr(stops, "backoff_s", lambda failures, first_s: failed.append(failures) or 0.2)
    async with asyncio.timeout(30):
        assert not await Stoppable().stops(0.5, 1000.0).start("busy", NO_LEDGER)
    assert failed == [1, 2, 3][: len(failed)]


def test_a_stop_that_waits_for_its_next_turn_is_not_late(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(tps_limit=1, deadlines=Deadlines(stop_s=1.1))
    client.invoke(HANG)
    runtime.stop_faults.extend(["429"] * 2)  # the second turn comes after 1 s, and the pauses take 0.75 s
    assert client.close() == []
    assert runtime.live == []


def test_slow_stops_run_beside_each_other(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    for _ in range(24):
        client.submit(HANG)
    until(lambda: runtime.runs == 24)
    runtime.stops_end.clear()
    closing = threading.Thread(target=client.close)
    closing.start()
    until(lambda: runtime.requests["stop"] == 24)
    runtime.stops_end.set()
    closing.join(60)
    assert runtime.live == []


@pytest.mark.parametrize("how", ["sync", "async"])
def test_close_reports_the_sessions_that_it_could_not_stop(
    make_client: MakeClient, runtime: ScriptedRuntime, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    client = make_client()
    futures = [client.invoke(HANG) for _ in range(5)]
    runtime.stop_faults.extend(["403"] * 3)
    left = close(client, how)
    assert len(left) == 3
    assert set(left) == set(runtime.live) < {future.session_id for future in futures}
    (line,) = [r for r in caplog.records if "not stopped" in r.getMessage()]
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("3 sessions")
    assert all(session_id in line.getMessage() for session_id in left)
    assert close(client, how) == left
    assert client.stats["stop_failed"] == 3


def test_a_session_that_could_not_be_stopped_earlier_is_reported_too(
    make_client: MakeClient, runtime: ScriptedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client()
    runtime.stop_faults.append("403")
    future = client.submit({"script": {}})
    future.result(60)
    assert client.flush() == [future.session_id] == client.close()
    (line,) = [r for r in caplog.records if "could not be stopped" in r.getMessage()]
    assert line.levelno == logging.WARNING
    assert "AccessDeniedException" in line.getMessage()


@pytest.mark.parametrize("fault", ["down", "hang"])
def test_close_gives_up_on_a_runtime_that_stops_nothing(make_client: MakeClient, fault: str) -> None:
    with ScriptedRuntime() as runtime:
        client = make_client(endpoint_url=runtime.url, deadlines=Deadlines(stop_s=1.0))
        futures = [client.invoke(HANG) for _ in range(5)]
        if fault == "hang":
            runtime.stops_end.clear()
        else:
            runtime.__exit__()
        began_s = time.monotonic()
        assert sorted(client.close()) == sorted(future.session_id for future in futures)
        assert time.monotonic() - began_s < 30


def test_a_with_block_reports_what_it_leaves_and_keeps_its_own_exception(
    make_client: MakeClient, runtime: ScriptedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.stop_faults.append("403")
    client = make_client()
    future = client.invoke(HANG)
    with pytest.raises(KeyError), client:
        raise KeyError
    assert runtime.live == [future.session_id]
    assert future.session_id in caplog.text


def test_a_second_close_waits_for_the_first(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client()
    client.invoke(HANG)
    runtime.stops_end.clear()
    first = threading.Thread(target=client.close)
    first.start()
    until(lambda: runtime.requests["stop"] == 1)
    second = threading.Thread(target=client.close)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    runtime.stops_end.set()
    second.join(60)
    assert runtime.live == []
    first.join(60)


def test_close_in_a_callback_is_refused_and_the_client_lives_on(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    refused: list[BaseException] = []

    def called(_: object) -> None:
        try:
            client.close()
        except ConfigError as e:
            refused.append(e)

    future = client.submit({"script": {}})
    future.add_done_callback(called)
    until(lambda: refused)
    client.invoke(HANG)
    assert client.close() == []
    assert runtime.live == []


@pytest.mark.parametrize("way", ["batch", "client"])
def test_a_batch_that_is_closed_before_its_first_item_leaves_no_session(
    make_client: MakeClient, runtime: ScriptedRuntime, way: str
) -> None:
    for _ in range(5):
        client = make_client()
        run: Any = iter(client.run_batch([HANG] * 10))
        if way == "batch":
            run.close()
            assert list(run) == []
            client.flush()
        else:
            client.close()
        assert runtime.live == []


def test_a_batch_that_nobody_holds_stops_its_sessions(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    run = iter(client.run_batch([HANG] * 5))
    until(lambda: runtime.runs == 5)
    del run
    until(lambda: runtime.live == [])
    batch = client.run_batch([{"script": {}}, HANG, HANG])
    assert next(batch).success
    until(lambda: runtime.runs == 5 + 3)
    del batch
    until(lambda: runtime.live == [])


def test_only_batches_end_with_their_program_and_a_flush_ends_nothing(
    client: RolloutClient, runtime: ScriptedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    future, _batch = client.invoke(HANG), iter(client.run_batch([HANG]))
    until(lambda: len(runtime.live) == 2)
    began_s = time.monotonic()
    assert client.flush() == []
    assert time.monotonic() - began_s < 30  # and waits for no rollout
    assert (len(runtime.live), len(client.flights()), caplog.text) == (2, 2, "")
    assert client._portal.call(client._dispatcher.close_async(cancel="batches")) == []
    assert runtime.live == [future.session_id]
    assert caplog.messages == [f"1 sessions continue after the end of this process: {future.session_id}"]
    with pytest.raises(ConfigError, match="the client is closed"):
        client.submit(HANG)


@pytest.mark.parametrize(("outcome", "stops"), [("unknown session", 0), (None, 1), ("lost", 0)])
def test_a_session_of_an_earlier_process_is_stopped_when_its_rollout_is_cancelled_at_once(
    client: RolloutClient, runtime: ScriptedRuntime, store_url: str, outcome: str | None, stops: int
) -> None:
    rollout = client._rollout(HANG, None, "i", {})
    if outcome != "unknown session":
        ids: dict[str, Any] = {"session_id": rollout.session_id, "input_id": "i", "key": "exp/i/s.json"}
        rollout.known = Attempt(index=0, attempt=1, bucket=store_url, outcome=outcome, **ids)

    async def cancel_at_once() -> None:
        client._dispatcher.submit(rollout)
        rollout.cancel()

    client._portal.call(cancel_at_once())
    client.flush()
    assert (rollout.cancelled, runtime.requests["stop"]) == (True, stops)


PROGRAM = """
import signal, sys
from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.client import Deadlines
hang = {{"script": {{"hang": True}}}}
def make(tps=100):
    return RolloutClient({arn!r}, {store!r}, "e", endpoint_url={url!r}, tps_limit=tps)
"""


def started(runtime: ScriptedRuntime, store_url: str, code: str) -> subprocess.Popen[str]:
    program = PROGRAM.format(arn=runtime.arn, store=store_url, url=runtime.url) + code
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_during_close_reports_what_is_left(runtime: ScriptedRuntime, store_url: str) -> None:
    code = """
client = make()
futures = [client.invoke(hang) for _ in range(6)]
slow = make(tps=0.5)
try:
    print("closing", flush=True)
    client.close()
except KeyboardInterrupt:
    print(*client.close(), flush=True)
    raise
"""
    with started(runtime, store_url, code) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: runtime.requests["stop"] >= 1)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors
    assert set(printed.split()) >= set(runtime.live)
    assert len(printed.split()) >= 3
    assert all(session_id in errors for session_id in printed.split())


def test_a_signal_handler_may_close_the_client_that_is_being_closed(runtime: ScriptedRuntime, store_url: str) -> None:
    code = """
client = make(tps=8)
signal.signal(signal.SIGUSR1, lambda *_: print(len(client.close()), flush=True))
futures = [client.invoke(hang) for _ in range(8)]
print("closing", flush=True)
print(client.close(), flush=True)
"""
    with started(runtime, store_url, code) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until(lambda: runtime.requests["stop"] >= 1)
        process.send_signal(signal.SIGUSR1)
        printed, errors = process.communicate(timeout=120)
    assert printed.splitlines()[-1] == "[]", errors
    assert runtime.live == []


async def test_an_async_block_reports_what_it_leaves(
    make_client: MakeClient, runtime: ScriptedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.stop_faults.append("403")
    async with make_client() as client:
        future = await client.invoke_async(HANG)
    assert future.session_id in caplog.text
    both = await asyncio.gather(client.aclose(), client.aclose())
    assert both == [[future.session_id]] * 2


async def test_a_cancelled_aclose_reports_what_is_left(
    make_client: MakeClient, runtime: ScriptedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client()
    future = await client.invoke_async(HANG)
    runtime.stops_end.clear()
    closing = asyncio.create_task(client.aclose())
    await asyncio.to_thread(until, lambda: runtime.requests["stop"] == 1)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    assert await client.aclose() == [future.session_id]
    assert future.session_id in caplog.text


def test_a_client_that_is_dropped_at_once_finishes_its_rollout(runtime: ScriptedRuntime, store_url: str) -> None:
    for n in range(5):
        future = RolloutClient(runtime.arn, store_url, "e", endpoint_url=runtime.url).submit(
            {"script": {"result": {"n": n}}}
        )
        assert future.result(60)["n"] == n
    until(lambda: runtime.live == [])


def test_dropped_clients_leave_nothing_and_a_program_that_ends_stops_its_batches_and_reports_other_rollouts(
    runtime: ScriptedRuntime, store_url: str
) -> None:
    code = """
import gc, os, threading, time
def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()
make().close()
before = count()
futures = []
for n in range(2):
    client = make()
    futures.append(client.submit({"script": {"run_s": 0.2}}))
    [item] = make().run_batch([{"script": {}}])  # nobody holds this client except its batch
    make()  # was never used
del client, item
assert all(future.result(60) for future in futures)
deadline_s = time.monotonic() + 60
while count() > before and time.monotonic() < deadline_s:
    time.sleep(0.05)
print(before == count())

def drop():
    client = make()  # nobody holds it after this
    future = client.invoke(hang)
    batch = iter(client.run_batch([hang] * 3 + [{"script": {}}] * 20, 4))
    next(batch)
    return future, batch
future, batch = drop()
print(future.session_id)
"""
    with started(runtime, store_url, code) as process:
        printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    left_nothing, session_id = printed.split()
    assert left_nothing == "True"
    assert runtime.live == [session_id]
    assert f"1 sessions continue after the end of this process: {session_id}" in errors
