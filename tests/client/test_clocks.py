"""Each deadline counts what it is named after: no wait for a connection, a slot or the pace, and no time of a paused process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from agentcore_rl_toolkit.client import Deadlines, WatchSettings, rollout
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import RolloutThrottledError
from agentcore_rl_toolkit.store import open_store
from scripted_runtime import ScriptedRuntime
from serving import wait_for as until

from .conftest import MakeClient, script


def test_the_wait_for_a_connection_is_queue_time_and_not_start_time(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    client = make_client(max_pool_connections=2, deadlines=Deadlines(start_s=2.0, confirm_s=0.2))
    items = client.map([script(cold_start_s=1.0)] * 6, timeout=2.0)  # longer than the last look after a deadline
    assert [item.outcome for item in items] == [Outcome.OK] * 6
    assert runtime.runs == 6
    assert max(item.stages["start"] for item in items) < 2.0
    assert max(item.stages["queue"] for item in items) > 1.9


def test_the_wait_for_the_pace_after_a_refusal_is_not_throttling(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    runtime.faults.extend(["429"] * 6)
    client = make_client(tps_limit=4, deadlines=Deadlines(throttle_s=1.0))
    futures = [client.submit(script()) for _ in range(3)]
    assert [future.exception(60) for future in futures] == [None] * 3
    assert runtime.requests["invoke"] == 9
    for future in futures:  # the stages hold the waits of every delivery
        assert sum(future.stages.values()) == pytest.approx(future.elapsed(), rel=0.1)


def test_a_runtime_that_takes_nothing_ends_every_rollout_as_throttled(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    runtime.faults.extend(["429"] * 1000)
    client = make_client(tps_limit=50, deadlines=Deadlines(throttle_s=1.0))
    futures = [client.submit(script()) for _ in range(12)]
    assert [type(future.exception(60)) for future in futures] == [RolloutThrottledError] * 12
    assert client.stats["throttled"] == 12


def test_pauses_after_refusals_are_throttling(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(max_retry_attempts=1000, deadlines=Deadlines(throttle_s=1.0))
    client.invoke(script()).result(60)
    runtime.faults.extend(["429"] * 1000)
    assert isinstance(client.submit(script()).exception(30), RolloutThrottledError)


def test_the_queue_is_throttling_after_the_attempts(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    runtime.faults.extend(["429"] * 1000)
    client = make_client(tps_limit=0.5, max_retry_attempts=2, deadlines=Deadlines(throttle_s=1.9))
    assert isinstance(client.submit(script()).exception(60), RolloutThrottledError)
    assert runtime.requests["invoke"] == 2  # the second one two seconds after the first


def test_refusals_of_the_quota_use_up_no_attempts(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    runtime.faults.extend(["429", "429", "409"])
    assert make_client(max_retry_attempts=2).submit(script()).exception(60) is None


def test_a_record_in_time_counts_although_it_is_noticed_late(make_client: MakeClient) -> None:
    client = make_client(watch=WatchSettings(interval_s=30), deadlines=Deadlines(run_s=1.0, result_s=5))
    began_s = time.monotonic()
    assert client.submit(script(run_s=0.3, result={"n": 1})).result()["n"] == 1
    assert time.monotonic() - began_s < 20


def test_the_deadline_of_the_run_does_not_hold_that_of_the_result(make_client: MakeClient) -> None:
    future = make_client(deadlines=Deadlines(run_s=0.5, result_s=20)).submit(script(hang=True))
    assert future.exception(60) is not None
    assert future.outcome is Outcome.TIMEOUT
    assert future.stages["run"] < 15


def test_the_wait_for_a_reader_is_not_reading(
    make_client: MakeClient, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "READS_AT_ONCE", 1)
    store = open_store(store_url)
    read = store._get

    async def slowly(key: str, max_bytes: int | None) -> bytes:
        await asyncio.sleep(0.7)
        return await read(key, max_bytes)

    store._get = slowly  # type: ignore[method-assign]  # a real store, with the latency of a far one
    client = make_client(watch=WatchSettings(store=store), deadlines=Deadlines(result_s=1.5))
    items = client.map([script(result={"n": 1})] * 3)
    assert [item.outcome for item in items] == [Outcome.OK] * 3


def test_a_paused_process_loses_no_time(runtime: ScriptedRuntime, store_url: str) -> None:
    # Stopped for longer than each deadline: one rollout is started, the other runs.
    program = f"""
from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.client import Deadlines
deadlines = Deadlines(start_s=2, confirm_s=0.1, run_s=2, result_s=1)
with RolloutClient({runtime.arn!r}, {store_url!r}, "e", endpoint_url={runtime.url!r}, deadlines=deadlines) as client:
    running = client.invoke({{"script": {{"run_s": 0.5}}}})
    starting = client.submit({{"script": {{"cold_start_s": 0.5, "run_s": 3.5, "heartbeat": False}}}})
    print(starting.exception(), running.exception())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: runtime.requests["invoke"] == 2, process=process)
            process.send_signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            until(lambda: time.monotonic() > stopped_s + 3)
            process.send_signal(signal.SIGCONT)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert printed == "None None\n"
