"""Single rollouts: results, timeouts, cancellation, retries, compatibility with callers of the published client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit._servers import keys
from agentcore_rl_toolkit.aws_errors import Fate
from agentcore_rl_toolkit.client import Deadlines, RolloutFuture, WatchSettings, as_completed, rollout
from agentcore_rl_toolkit.client.transport import CallError, Transport
from agentcore_rl_toolkit.client.watcher import Watcher
from agentcore_rl_toolkit.contract import Outcome, new_session_id
from agentcore_rl_toolkit.errors import (
    AgentError,
    ConfigError,
    ContractError,
    InvalidResultError,
    RolloutCancelledError,
    RolloutLostError,
    RolloutTimeoutError,
)
from agentcore_rl_toolkit.store import open_store
from scripted_runtime import ARN, ScriptedRuntime
from serving import busy_credentials
from serving import wait_for as until

from .conftest import MakeClient, script

# ---- results


def test_result_is_the_stored_record_and_the_session_is_stopped(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    assert client.stats == {"store_requests": 0}
    began_s = time.monotonic()
    future = client.invoke(script(run_s=0.1, result={"rewards": [0.0, 1.0], "note": "ä"}), input_id="in/1")
    record = future.result(timeout=60)
    assert record["rewards"] == [0.0, 1.0]
    assert record["note"] == "ä"
    assert future.result() == record
    assert future.outcome is Outcome.OK
    assert future.exception() is None
    assert future.result_key == f"exp/in/1/{future.session_id}.json"
    assert set(future.stages) == {"queue", "start", "run", "result"}
    assert 0 < sum(future.stages.values()) <= future.elapsed() + 0.01
    assert future.elapsed() <= time.monotonic() - began_s
    client.flush()
    assert runtime.live == []
    assert client.stats["store_requests"] >= 2  # a listing, and the record


def test_payload_and_rollout_block_arrive_as_the_published_client_sends_them(
    make_client: MakeClient, runtime: ScriptedRuntime, store_url: str
) -> None:
    client = make_client(base_url="http://gw", model_id="m", temperature=0.5)
    session_id = new_session_id()
    client.invoke(
        {"prompt": "p", "_rollout": {"mine": 1}}, session_id, "i1", api_key="k", sampling_params={"top_p": 1}
    ).result(60)
    sent = runtime.sessions[session_id].payload
    assert sent["prompt"] == "p"
    block = sent["_rollout"]
    assert "mine" not in block
    assert "s3_region" not in block  # the store is a folder
    assert {
        k: block[k] for k in ("exp_id", "input_id", "s3_bucket", "base_url", "model_id", "temperature", "api_key")
    } == {
        "exp_id": "exp",
        "input_id": "i1",
        "s3_bucket": store_url,
        "base_url": "http://gw",
        "model_id": "m",
        "temperature": 0.5,
        "api_key": "k",
    }
    assert block["sampling_params"] == {"top_p": 1}
    assert block["attempt"] == 1


def test_failed_agent_returns_its_record_by_default(client: RolloutClient) -> None:
    future = client.invoke(script(fail="boom"))
    assert future.result(60)["status_code"] == 500
    assert future.outcome is Outcome.AGENT_ERROR
    error = future.exception()
    assert isinstance(error, AgentError)
    assert "boom" in str(error)
    assert (error.session_id, error.input_id, error.key) == (future.session_id, future.input_id, future.result_key)


def test_unusable_record_is_invalid_not_a_result(make_client: MakeClient) -> None:
    client = make_client(on_failure="raise")
    for raw in ("not json", "[1]", '{"rewards": NaN}', '{"rewards": "high"}', ""):
        future = client.invoke(script(raw=raw))
        with pytest.raises(InvalidResultError):
            future.result(60)
        assert future.outcome is Outcome.INVALID


def test_sync_and_async_mix_on_one_client(client: RolloutClient) -> None:
    async def both() -> list[dict[str, Any]]:
        first = await client.invoke_async(script(run_s=0.05, result={"n": 1}))
        second = client.submit(script(run_s=0.05, result={"n": 2}))
        return [await first, await second.result_async(timeout=60)]

    third = client.invoke(script(run_s=0.05, result={"n": 3}))
    assert [r["n"] for r in asyncio.run(both())] == [1, 2]
    assert asyncio.run(_await(third))["n"] == 3
    assert third.result()["n"] == 3


async def _await(future: RolloutFuture) -> dict[str, Any]:
    return await future


# ---- timeouts


def test_timeout_zero_looks_once_and_leaves_the_rollout_alone(client: RolloutClient) -> None:
    future = client.invoke(script(run_s=0.3, result={"ok": True}))
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    assert not future.done()
    assert future.result(timeout=None)["ok"] is True
    assert future.result(timeout=0)["ok"] is True


def test_timeout_ends_the_rollout_and_stops_its_session(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    future = client.invoke(script(hang=True))
    began_s = time.monotonic()
    with pytest.raises(RolloutTimeoutError) as caught:
        future.result(timeout=0.3)
    assert time.monotonic() - began_s > 0.25
    assert caught.value.stage == "run"
    assert future.outcome is Outcome.TIMEOUT
    until(lambda: runtime.live == [])


def test_the_error_of_a_timeout_names_the_limit_that_passed(
    make_client: MakeClient, runtime: ScriptedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(deadlines=Deadlines(run_s=0.3))
    (item,) = client.run_batch([script(hang=True)], timeout=300)
    assert "deadline run_s=0.3 passed (stage: run, " in str(item.error)
    (item,) = make_client().run_batch([script(hang=True)], timeout=0.4)
    assert "Timeout after 0.4s" in str(item.error)
    runtime.faults.append("drop")
    (item,) = make_client().run_batch([script()], timeout=0.4)
    assert "Timeout after 0.4s (stage: run, " in str(item.error)
    assert "could not be counted" not in caplog.text  # without `turns_of`


@pytest.mark.parametrize("loops", [True, False])
def test_a_deadline_during_model_calls_is_the_agents_failure_and_not_tried_again(
    make_client: MakeClient, runtime: ScriptedRuntime, loops: bool
) -> None:
    counts = itertools.count(100)

    async def turns_of(session_id: str) -> int:
        assert session_id in runtime.sessions
        return next(counts) if loops else 7

    client = make_client(turns_of=turns_of, retries=1, deadlines=Deadlines(run_s=0.4))
    future = client.submit(script(hang=True))
    error = future.exception(60)
    if loops:
        assert isinstance(error, AgentError)
        assert "after 101 calls" in str(error)
        assert (future.cause, future.attempt, runtime.runs) == ("agent", 1, 1)
    else:
        assert isinstance(error, RolloutTimeoutError)
        assert (future.cause, future.attempt, runtime.runs) == ("infrastructure", 2, 2)


def test_a_count_of_turns_that_never_comes_delays_no_deadline(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def turns_of(session_id: str) -> int:
        await asyncio.Event().wait()
        return 1

    monkeypatch.setattr(rollout, "COUNT_S", 0.1)
    client = make_client(turns_of=turns_of, deadlines=Deadlines(run_s=0.4))
    assert isinstance(client.submit(script(hang=True)).exception(20), RolloutTimeoutError)


def test_turns_are_counted_before_a_deadline_only(make_client: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    for run_s in (None, 100.0):
        client = make_client(turns_of=lambda session_id: 1 // 0, deadlines=Deadlines(run_s=run_s))
        assert client.submit(script(run_s=0.1)).exception(60) is None
    assert "could not be counted" not in caplog.text


def test_the_state_of_what_runs_is_shown(client: RolloutClient) -> None:
    future = client.invoke(script(hang=True), input_id="x")
    (flight,) = client.flights()
    ids = {"session_id": future.session_id, "input_id": "x", "attempt": 1, "stage": "run", "trouble": None}
    assert flight.items() >= ids.items()
    assert 0 <= flight["stage_s"] <= flight["total_s"] <= future.elapsed()
    assert 28_860 < flight["left_s"] < 28_920
    future.cancel()
    until(lambda: client.flights() == [])
    batch = client.run_batch([script(hang=True)], timeout=50)
    thread = threading.Thread(target=next, args=(batch, None))
    thread.start()
    (left_s,) = until(lambda: [flight["left_s"] for flight in client.flights() if flight["stage"] == "run"])
    assert 0 < left_s <= 50
    batch.close()
    thread.join()


def test_waits_never_end_a_rollout(client: RolloutClient) -> None:
    slow, quick = client.submit(script(run_s=1.0)), client.submit(script(fail="boom"))
    assert slow.wait(timeout=0.05) is False
    with pytest.raises(RolloutTimeoutError):
        slow.exception(timeout=0.05)
    assert quick.wait(60)
    with pytest.raises(TimeoutError, match=r"^1 of 2 rollouts are not over after 0\.05 s$"):
        list(as_completed([slow, quick], timeout=0.05))
    assert (slow.done(), slow.ok) == (False, False)
    assert list(as_completed([slow, quick])) == [quick, slow]
    assert slow.wait() is True
    assert (slow.ok, quick.ok, quick.result()["status_code"]) == (True, False, 500)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_waits_of_a_forked_child_are_refused(client: RolloutClient) -> None:
    running, ended = client.invoke(script(hang=True)), client.submit(script(result={"n": 1}))
    assert ended.wait(60)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # ends this process if a wait does not end
        waits: list[Callable[[], object]] = [running.result, running.wait, running.exception]
        for wait in (*waits, lambda: list(as_completed([ended, running]))):
            try:
                wait()
                os._exit(1)
            except ConfigError as e:
                if "make one in the child" not in str(e):
                    os._exit(2)
        os._exit(0 if ended.result()["n"] == 1 and list(as_completed([ended])) == [ended] else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_as_completed_has_ended_rollouts_in_the_order_of_their_ends(client: RolloutClient) -> None:
    futures = []
    for _ in range(8):
        futures.append(client.submit(script()))
        assert futures[-1].wait(60)
    running = client.submit(script(hang=True))
    completed = as_completed([running, *reversed(futures), futures[0]])
    assert list(itertools.islice(completed, 8)) == futures
    running.cancel()
    assert list(completed) == [running]


# ---- cancellation


def test_cancel_ends_the_rollout_once_and_stops_its_session(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    future = client.invoke(script(hang=True))
    assert future.cancel() is True
    assert future.done()
    assert future.outcome is Outcome.CANCELLED
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=0)
    assert isinstance(future.exception(timeout=0), RolloutCancelledError)
    assert future.cancel() is False
    assert future.cancelled
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(60)
    assert future.outcome is Outcome.CANCELLED
    until(lambda: runtime.live == [])
    assert runtime.requests["stop"] == 1


def test_what_ends_first_stands_for_the_future_the_counts_and_the_callbacks_alike(client: RolloutClient) -> None:
    received: list[Outcome | None] = []
    futures = [client.submit(script(run_s=0.02 * (n % 7))) for n in range(60)]
    for future in futures:
        future.add_done_callback(lambda f: received.append(f.outcome))
    won = {}
    for n, future in enumerate(futures):
        time.sleep(0.001 * (n % 5))
        won[future] = future.cancel()
        assert future.done()  # cancelled by this, or over before
    until(lambda: len(received) == len(futures))
    for future in futures:
        assert (future.outcome is Outcome.CANCELLED) == won[future]
    assert received.count(Outcome.CANCELLED) == sum(won.values()) == client.stats.get("cancelled", 0)
    assert received.count(Outcome.OK) == client.stats.get("ok", 0)


def test_cancel_during_a_cold_start_stops_the_session_that_comes_of_it(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    future = client.submit(script(cold_start_s=0.5, hang=True))
    until(lambda: runtime.requests["invoke"] == 1)
    future.cancel()
    assert isinstance(future.exception(60), RolloutCancelledError)
    assert runtime.runs == 0
    until(lambda: runtime.runs == 1 and runtime.live == [])


async def test_cancelling_invoke_async_ends_its_rollout(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    task = asyncio.create_task(client.invoke_async(script(cold_start_s=0.4, hang=True)))
    await asyncio.to_thread(until, lambda: runtime.requests["invoke"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: runtime.runs == 1 and runtime.live == [])


def test_close_cancels_what_runs_and_leaves_no_session(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client()
    futures = [client.invoke(script(hang=True)) for _ in range(5)]
    client.close()
    client.close()
    assert {f.outcome for f in futures} == {Outcome.CANCELLED}
    assert runtime.live == []
    with pytest.raises(ConfigError):
        client.invoke(script())


# ---- refusals and unclear answers


def test_refusals_are_waited_out_and_the_agent_runs_once(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    runtime.faults.extend(["429", "402", "409"])
    assert client.invoke(script(result={"n": 1})).result(60)["n"] == 1
    assert runtime.requests["invoke"] == 4
    assert runtime.runs == 1


def test_expired_credentials_are_renewed_and_the_invoke_is_sent_again(
    make_client: MakeClient, runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # the session is made from the environment
    runtime.faults.extend(["expired"] * 3)  # more often than an unreachable runtime is asked
    client = make_client(max_retry_attempts=2)
    before = client.agentcore_client
    assert client.submit(script(result={"n": 1})).result(60)["n"] == 1
    assert client.agentcore_client is not before
    assert runtime.runs == 1


def test_an_outage_of_a_runtime_that_was_reached_before_is_waited_out(
    make_client: MakeClient, runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds without a network cost a batch of 300 a sixth of its rollouts."""
    client, send, outage = make_client(max_retry_attempts=1, deadlines=Deadlines(start_s=3)), Transport.invoke, [3]

    def invoke(transport: Transport, session_id: str, payload: bytes) -> bytes:
        if outage[0] > 0:
            outage[0] -= 1
            raise CallError("no route", fate=Fate.TRANSIENT)
        return send(transport, session_id, payload)

    monkeypatch.setattr(Transport, "invoke", invoke)
    with pytest.raises(RolloutLostError, match="in 1 attempts"):  # the address may be wrong
        client.invoke(script())
    outage[0] = 0
    client.invoke(script()).result(60)
    outage[0] = 3
    assert client.submit(script(result={"n": 1})).result(60)["n"] == 1
    outage[0] = 10_000
    with pytest.raises(RolloutLostError, match="could not be reached for 3 s: no route"):
        client.submit(script()).result(60)
    assert len(runtime.sessions) == 2


def test_credentials_that_expire_after_long_throttling_are_renewed(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    runtime.faults.extend(["429"] * 3 + ["expired"])
    future = make_client(deadlines=Deadlines(start_s=0.8)).submit(script(result={"n": 1}))
    assert future.result(60)["n"] == 1


def test_credentials_that_stay_expired_end_the_rollout_at_the_deadline_of_the_start(
    make_client: MakeClient, runtime: ScriptedRuntime
) -> None:
    runtime.faults.extend(["expired"] * 1000)
    error = make_client(deadlines=Deadlines(start_s=1.0)).submit(script()).exception(60)
    assert isinstance(error, RolloutLostError)
    assert error.code == "ExpiredTokenException"
    assert isinstance(error.__cause__, ClientError)
    assert runtime.requests["invoke"] > 2


def test_a_source_of_credentials_that_is_busy_is_asked_again(
    make_client: MakeClient, runtime: ScriptedRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy_credentials(tmp_path, monkeypatch, busy=3)
    future = make_client().submit(script())
    assert future.exception(60) is None
    assert (future.attempt, runtime.requests["invoke"]) == (1, 1)


def test_a_local_runtime_that_was_started_again_with_a_new_key_is_found(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    path = keys.leave(keys.RUNTIME, runtime.url, "AKONE:first")
    try:
        client.invoke(script()).result(60)
        keys.leave(keys.RUNTIME, runtime.url, "AKTWO:second")
        runtime.faults.append("403")  # the signature is of the first key
        assert client.submit(script(result={"n": 1})).result(60)["n"] == 1
    finally:
        keys.forget(path)


def test_a_second_rollout_with_the_ids_of_one_in_flight_is_refused(client: RolloutClient) -> None:
    session_id = new_session_id()
    first = client.submit(script(run_s=0.3, result={"n": 1}), session_id, "i")
    with pytest.raises(ConfigError, match="has a rollout in flight"):
        client.submit(script(), session_id, "i")
    assert first.result(60)["n"] == 1
    assert client.submit(script(), session_id, "i").result(60)["n"] == 1  # its record is there already


def test_answer_lost_after_the_agent_started_finds_the_running_session(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    runtime.faults.append("drop_after")
    assert client.invoke(script(run_s=0.3, result={"n": 1})).result(60)["n"] == 1
    assert runtime.requests["invoke"] == 1
    assert runtime.runs == 1


def test_a_record_that_no_round_has_seen_is_looked_for(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(watch=WatchSettings(interval_s=60), deadlines=Deadlines(confirm_s=2.0))
    runtime.faults.append("drop_after")
    assert client.submit(script(run_s=0.1, heartbeat=False, result={"n": 1})).result(30)["n"] == 1


def test_answer_lost_and_nothing_started_is_lost_and_stopped(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(deadlines=Deadlines(confirm_s=0.4))
    runtime.faults.append("drop")
    future = client.invoke(script())
    error = future.exception(60)
    assert isinstance(error, RolloutLostError)
    assert str(error).startswith("the reply to the invoke was lost, and no heartbeat or record appeared within 0.4 s")
    assert (error.code, type(error.__cause__).__name__) == ("ConnectionClosedError", "ConnectionClosedError")
    client.flush()
    assert runtime.requests["stop"] == 1
    assert runtime.runs == 0


def test_agent_that_answers_rubbish_raises_from_invoke(client: RolloutClient) -> None:
    for reply, error in (({"error": "no such tool"}, AgentError), ({"status": "done"}, InvalidResultError)):
        with pytest.raises(error):
            client.invoke(script(reply=reply))


def test_agent_whose_store_refuses_is_lost_at_once_with_the_agents_own_words(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    text = "the agent cannot store its record in s3://b: no access. The agent's role needs s3:PutObject"
    reply = {"status": "refused", "error": text, "error_type": "StorePermissionError"}
    future = client.submit(script(run_s=60, reply=reply))
    error = future.exception(60)
    assert isinstance(error, RolloutLostError)
    assert str(error) == text
    assert future.outcome is Outcome.LOST
    client.flush()
    assert runtime.live == []


def test_unreachable_runtime_is_lost_after_the_attempts(store_url: str) -> None:
    client = RolloutClient(ARN, store_url, "e", 2, endpoint_url="http://127.0.0.1:9", tps_limit=100)
    with client, pytest.raises(RolloutLostError, match="could not be reached in 2 attempts"):
        client.invoke(script())


def test_bucket_and_key_layout_of_the_agent_are_followed(client: RolloutClient) -> None:
    client.store.put("odd/place.json", b'{"n": 1}')
    client._dispatcher.stores["another-bucket"] = client.store
    reply = {"status": "processing", "s3_bucket": "another-bucket", "result_key": "odd/place.json"}
    assert client.invoke(script(reply=reply)).result(60)["n"] == 1


# ---- loss and retries


FAST_LOSS = WatchSettings(heartbeat_s=0.1, lost_after_s=0.6)


def test_dead_session_is_lost_within_the_silence_limit(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(watch=FAST_LOSS)
    future = client.invoke(script(run_s=60, die_at_s=0.3))
    with pytest.raises(RolloutLostError):
        future.result(30)  # the usual limit is 35 s
    client.flush()
    assert runtime.live == []


@pytest.mark.parametrize(
    ("period_s", "settings", "silence_s", "promised"),
    [
        (30.0, {}, 95, True),
        (None, {}, 35, False),
        (0, {}, 35, False),
        (math.inf, {"heartbeat_s": 1}, 8, False),
        ("often", {"heartbeat_s": 1}, 8, False),
        (0.5, {"lost_after_s": 2}, 2, True),
    ],
)
def test_a_session_is_lost_after_three_heartbeats_and_five_seconds(
    make_client: MakeClient,
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
    period_s: Any,
    settings: dict[str, Any],
    silence_s: float,
    promised: bool,
) -> None:
    seen, add = [], Watcher.add

    def note(watcher: Watcher, *ids: str, **options: Any) -> Any:
        seen.append(options)
        return add(watcher, *ids, **options)

    monkeypatch.setattr(Watcher, "add", note)
    client = make_client(watch=WatchSettings(**settings))
    client.store.put("exp/own/p.json", b"{}")
    reply = {"status": "processing", "s3_bucket": store_url, "result_key": "exp/own/p.json", "heartbeat_s": period_s}
    client.invoke(script(reply=reply)).result(60)
    assert seen == [{"expects_life": promised, "silence_s": silence_s}]


def test_retry_runs_another_session_and_keeps_the_input(
    make_client: MakeClient, runtime: ScriptedRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agentcore_rl_toolkit.client")
    client = make_client(watch=FAST_LOSS, retries=1, deadlines=Deadlines(confirm_s=0.2))
    runtime.faults.append("drop")  # the first attempt is never heard of
    runtime.stops_end.clear()  # and its stop delays no retry
    future = client.submit(script(result={"n": 1}), input_id="x")
    assert future.result(60)["n"] == 1
    assert future.attempt == 2
    assert future.input_id == "x"
    assert runtime.sessions[future.session_id].payload["_rollout"]["attempt"] == 2
    ends = [record.getMessage() for record in caplog.records if " ended as " in record.getMessage()]
    assert [end.partition(":")[0] for end in ends] == ["attempt ended as lost, trying again"]
    runtime.stops_end.set()
    client.flush()
    assert runtime.live == []


def test_prepare_gives_every_attempt_its_own_address(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(deadlines=Deadlines(confirm_s=0.2))
    runtime.faults.append("drop")
    asked: list[tuple[str, int]] = []

    async def prepare(session_id: str, attempt: int) -> dict[str, Any]:
        asked.append((session_id, attempt))
        return {"base_url": f"http://gw/sessions/{session_id}/v1"}

    (item,) = client.run_batch([script()], retries=1, prepare=prepare)
    assert [attempt for _, attempt in asked] == [1, 2]
    assert len({session_id for session_id, _ in asked}) == 2
    assert item.session_id in runtime.sessions[item.session_id].payload["_rollout"]["base_url"]


class OwnError(Exception):
    """An exception with fields like those of our errors."""

    outcome, failure, cause = "solved", 3, "mine"


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("this exception has no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (OwnError("no address"), "OwnError: no address"),
        (Mute(), "Mute:"),
    ],
    ids=["KeyError", "SystemExit", "OwnError", "Mute"],
)
def test_an_exception_of_prepare_is_the_end_of_its_rollout_only(
    client: RolloutClient, runtime: ScriptedRuntime, error: BaseException, text: str
) -> None:
    def prepare(session_id: str, attempt: int) -> dict[str, Any]:
        raise error

    (item,) = client.run_batch([script()], prepare=prepare)
    assert (item.outcome, item.cause, item.failure, runtime.runs) == (Outcome.LOST, "infrastructure", None, 0)
    assert text in str(item.error)
    assert client.submit(script()).result(60)


def test_a_prepare_that_fails_is_a_failed_attempt(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    async def prepare(session_id: str, attempt: int) -> dict[str, Any]:
        if attempt == 1:
            raise KeyError("x")
        return {}

    (item,) = client.run_batch([script()], retries=1, prepare=prepare)
    assert (item.outcome, item.attempt, runtime.runs) == (Outcome.OK, 2, 1)


def test_a_prepare_that_never_returns_ends_its_rollout(make_client: MakeClient) -> None:
    async def prepare(session_id: str, attempt: int) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    client = make_client(deadlines=Deadlines(start_s=0.2))
    (item,) = client.run_batch([script()], prepare=prepare)
    assert (item.outcome, item.error) == (Outcome.LOST, "prepare timed out (limit: start_s=0.2)")


def test_sys_exit_in_a_subscriber_or_a_callback_ends_nothing(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    client.subscribe(lambda event, fields: sys.exit("subscriber"))
    future = client.submit(script(run_s=0.1))
    future.add_done_callback(lambda _: sys.exit("callback"))
    assert future.result(60)
    assert client.submit(script()).result(60)
    client.flush()
    assert runtime.live == []


def test_one_record_is_the_result_of_one_rollout(client: RolloutClient, store_url: str) -> None:
    reply = {"status": "processing", "s3_bucket": store_url, "result_key": "exp/own/p.json"}
    first = client.invoke(script(reply=reply, hang=True))
    until(lambda: first.stage == "run")
    second = client.invoke(script(reply=reply, hang=True))
    assert isinstance(second.exception(60), InvalidResultError)
    assert "another rollout in flight" in str(second.exception())
    open_store(store_url).put("exp/own/p.json", b'{"rewards": 1.0}')
    assert first.result(60)["rewards"] == 1.0


def test_a_payload_that_is_not_json_or_too_deep_for_it_is_invalid(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, object()):
        future = client.submit({"x": value})
        with pytest.raises(ConfigError, match="cannot be sent"):
            future.result(60)
        assert (future.outcome, runtime.requests["invoke"]) == (Outcome.INVALID, 0)


# ---- arguments


def test_unusable_ids_are_refused_at_the_call(client: RolloutClient) -> None:
    for session_id, input_id in (("short", "i"), (None, "../x"), (None, "a//b"), ("s" * 257, "i")):
        with pytest.raises(ContractError):
            client.invoke(script(), session_id, input_id)


def test_ids_of_the_published_package_are_sent_and_handed_back_as_they_are(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    assert len(client.submit(script(), input_id="").input_id) == 36  # type: ignore[arg-type]  # a UUID
    ids: list[tuple[str | None, Any]] = [(None, 7), (None, 0), ("s" * 249, "bed"), (None, "x" * 255)]
    ids.append(("session of 2026-01-01 / no. #7 & 50% " + "?" * 9, "é日 \"q\" 'q' 100% a?b#c&d \\ e"))
    for session_id, input_id in ids:
        future = client.invoke(script(result={"rewards": 1.0}), session_id, input_id)
        assert future.result(60)["rewards"] == 1.0
        assert (future.input_id, future.session_id) == (input_id, session_id or future.session_id)
        assert future.result_key == f"exp/{input_id}/{future.session_id}.json"
        sent = runtime.sessions[future.session_id].payload["_rollout"]["input_id"]
        assert (sent, type(sent)) == (input_id, type(input_id))


def test_caller_of_the_published_client_works_unchanged(
    runtime: ScriptedRuntime, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that rLLM's remote runtime makes, one by one."""
    import uuid

    monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", runtime.url)
    client = RolloutClient(agent_runtime_arn=runtime.arn, s3_bucket=store_url, exp_id="e", tps_limit=100)

    async def episode() -> None:
        future = await client.invoke_async(
            payload={"prompt": "p", **script(result={"rewards": 1.0, "metrics": {"steps": 3}})},
            session_id=str(uuid.uuid4()),
            input_id="task-1",
            base_url="http://gw/sessions/x/v1",
            model_id="m",
            api_key="key",
        )
        result = await future.result_async(timeout=10.0)
        assert result.get("status_code") == 200
        assert result["rewards"] == 1.0
        assert result["metrics"] == {"steps": 3}
        assert future.elapsed() > 0
        late = await client.invoke_async(
            payload=script(hang=True), session_id=str(uuid.uuid4()), input_id="t", base_url="u", model_id="m"
        )
        with pytest.raises(asyncio.TimeoutError):
            await late.result_async(timeout=0.2)
        assert late.elapsed() >= 0.2

    asyncio.run(episode())
    client.close()


# ---- the process around it


def test_ctrl_c_stops_every_session_of_an_async_batch(runtime: ScriptedRuntime, store_url: str) -> None:
    program = f"""
import asyncio
from agentcore_rl_toolkit import RolloutClient
client = RolloutClient({runtime.arn!r}, {store_url!r}, "e", endpoint_url={runtime.url!r}, tps_limit=50)
batch = client.run_batch_async([{{"script": {{"hang": True}}}}] * 8, 8)
async def consume():
    [item async for item in batch]
asyncio.run(consume())
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        try:
            until(lambda: runtime.runs == 8)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert b"KeyboardInterrupt" in errors
    assert runtime.live == []


def test_close_does_not_wait_for_an_invoke_that_hangs(make_client: MakeClient, runtime: ScriptedRuntime) -> None:
    client = make_client(deadlines=Deadlines(stop_s=1.0))
    runtime.faults.append("hang")
    future = client.submit(script(hang=True))
    until(lambda: runtime.runs == 1)
    began_s = time.monotonic()
    client.close()
    assert time.monotonic() - began_s < 30  # an invoke may take five minutes
    assert future.outcome is Outcome.CANCELLED
    assert runtime.live == []


def test_invokes_without_end_keep_neither_their_places_nor_their_sessions(
    make_client: MakeClient, runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "CONNECT_TIMEOUT_S", 0.1)
    client = make_client(max_pool_connections=2, deadlines=Deadlines(start_s=1.0, confirm_s=0.1))
    transport, over = client._dispatcher.transport, threading.Event()
    invoke = transport.invoke

    def drip(session_id: str, body: bytes) -> bytes:
        reply = invoke(session_id, body)
        over.wait()  # boto3's timeout begins again with each byte
        return reply

    transport.invoke = drip  # type: ignore[method-assign]
    dripping = [client.submit(script(hang=True, heartbeat=False)) for _ in range(2)]
    until(lambda: runtime.runs == 2)
    transport.invoke = invoke  # type: ignore[method-assign]
    try:
        assert client.submit(script(result={"n": 1})).result(60)["n"] == 1  # it waits for a place
        for future in dripping:
            assert isinstance(future.exception(60), RolloutLostError)
        until(lambda: runtime.live == [])
        assert client.close() == []
    finally:
        over.set()


def test_ctrl_c_that_another_thread_receives_ends_as_completed(client: RolloutClient) -> None:
    running = client.submit(script(hang=True))
    thread = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    thread.start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(as_completed([running], timeout=40))
    assert time.monotonic() - began_s < 20
    thread.join()


def test_a_rollout_ends_although_a_handler_of_the_log_raises(
    make_client: MakeClient,
    runtime: ScriptedRuntime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("No space left on device")

    logger = logging.getLogger("agentcore_rl_toolkit.client")
    monkeypatch.setattr(logger, "handlers", [Full()])
    caplog.set_level(logging.INFO, logger.name)
    runtime.faults.append("424")
    future = make_client(retries=1).submit(script())
    assert isinstance(future.exception(60), OSError)
    assert future.outcome is Outcome.LOST


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_forked_child_closes_or_drops_the_client_although_threads_held_its_locks(
    make_client: MakeClient, how: str
) -> None:
    client = make_client()
    client.invoke(script()).result(60)
    with client._dispatcher.pacer._lock, client._portal._lock:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            thread = threading.Thread(
                target=client.close if how == "close" else client._dispatcher.abandon, daemon=True
            )
            thread.start()  # the lock is another thread's than that of the fork
            thread.join(20)
            os._exit(thread.is_alive())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
