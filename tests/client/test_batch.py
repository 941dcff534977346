"""Batches: order, limits, failures as data, leaving early, resume."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.client import BatchProgress, Deadlines, WatchSettings
from agentcore_rl_toolkit.client.batch import _traceback_of as traceback_of
from agentcore_rl_toolkit.client.batch import error_line, print_progress
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import (
    AgentError,
    ConfigError,
    RolloutLostError,
    StorePermissionError,
)
from agentcore_rl_toolkit.store import ObjectStore
from scripted_runtime import ScriptedRuntime
from serving import wait_for as until

from .conftest import MakeClient


def rows(n: int, **what: Any) -> list[dict[str, Any]]:
    return [{"script": {"result": {"n": i}, **what}} for i in range(n)]


def test_every_row_gives_one_item_with_its_ids(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    items = list(client.run_batch(rows(20), 10, input_ids=[f"i{n // 5}" for n in range(20)]))
    assert sorted(item.index for item in items if item.index is not None) == list(range(20))
    for item in items:
        assert item.success
        assert item.outcome is Outcome.OK
        assert item.result is not None
        assert item.result["n"] == item.index
        assert item.input_id == f"i{(item.index or 0) // 5}"
        assert item.session_id in runtime.sessions
        assert item.error is None
        assert (item.elapsed or 0) > 0
        assert "run" in item.stages
    client.flush()
    assert runtime.live == []
    assert runtime.runs == 20


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n\n b"), "ValueError: a | b"),
        (KeyError(), "KeyError: "),
        (AgentError("the agent failed: 'x'", error_type="KeyError"), "KeyError: the agent failed: 'x'"),
        (AgentError("KeyError: 'x'", error_type="KeyError"), "KeyError: 'x'"),
        (RolloutLostError(""), "RolloutLostError"),
        (RolloutLostError("x" * 1000), "x" * 1000),
        (RolloutLostError("x" * 1001), "x" * 997 + "..."),
    ],
)
def test_an_error_is_one_line_with_the_class_that_the_agent_raised(error: Exception, line: str) -> None:
    assert error_line(error) == line.strip()


def test_a_traceback_is_the_agents_or_that_of_an_error_that_was_raised_or_has_a_cause() -> None:
    raised, caused, agent_error = (
        ValueError("raised"),
        ValueError("caused"),
        AgentError("x", agent_traceback="of the agent"),
    )
    with contextlib.suppress(ValueError):
        raise raised
    caused.__cause__ = KeyError("cause")
    assert (traceback_of(raised) or "").splitlines()[-1] == "ValueError: raised"
    assert (traceback_of(caused) or "").splitlines()[0] == "KeyError: 'cause'"
    assert (traceback_of(agent_error), traceback_of(ValueError("made"))) == ("of the agent", None)


def test_never_more_than_the_limit_at_once(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    running, open_store = [], runtime.store_for  # at each start, which opens the store

    def count(url: str) -> ObjectStore:
        records = len(list(Path(url.removeprefix("file://")).glob("exp/*/*.json")))
        running.append(len(runtime.sessions) - records)
        return open_store(url)

    runtime.store_for = count
    list(client.run_batch(rows(16, run_s=0.05), 4))
    assert len(running) == 16
    assert 1 <= max(running) <= 4


def test_denied_record_fails_that_item_alone(make_client: MakeClient, store_url: str) -> None:
    from agentcore_rl_toolkit.store import open_store

    real = open_store(store_url)
    original = real._get

    async def get(key: str, max_bytes: int | None) -> bytes:
        if "/denied/" in key:
            raise StorePermissionError("403", key=key)
        return await original(key, max_bytes)

    real._get = get  # type: ignore[method-assign]  # one key of a real store refuses
    client = make_client(watch=WatchSettings(store=real))
    items = client.map(rows(3), 3, input_ids=["a", "denied", "b"])
    assert [item.success for item in items] == [True, False, True]
    assert isinstance(items[1].exception, StorePermissionError)
    assert items[1].outcome is Outcome.INVALID


@pytest.mark.parametrize("how", ["break", "raise"])
def test_leaving_early_stops_every_session(client: RolloutClient, runtime: ScriptedRuntime, how: str) -> None:
    batch = client.run_batch([{"script": {"hang": n > 0}} for n in range(10)], 6)

    with contextlib.suppress(KeyError):
        for _ in batch:
            if how == "break":
                break
            raise KeyError("user code")
    client.flush()
    assert runtime.live == []
    assert runtime.runs <= 8  # nothing new was started for the rows that were left


async def test_leaving_an_async_batch_early_stops_every_session(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    async for _ in client.run_batch_async([{"script": {"hang": n > 0}} for n in range(6)], 6):
        break
    await asyncio.to_thread(client.flush)
    assert runtime.live == []


async def test_cancelled_consumer_stops_every_session(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    async def consume() -> None:
        async for _ in client.run_batch_async([{"script": {"hang": True}}] * 4, 4):
            raise AssertionError("nothing finishes here")

    task = asyncio.create_task(consume())
    await asyncio.to_thread(until, lambda: runtime.runs == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as kept:
        await task
    await asyncio.to_thread(client.flush)
    assert runtime.live == []
    del kept


def test_ctrl_c_stops_every_session_although_its_traceback_is_kept(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    def interrupt() -> None:
        until(lambda: runtime.runs == 3)
        # To this thread, the signal wakes nobody, as one that comes just before the main thread falls asleep.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt) as kept:
        list(client.run_batch([{"script": {"hang": True}}] * 3))
    client.flush()
    assert runtime.live == []
    del kept


def test_progress_hook_sees_every_item(client: RolloutClient) -> None:
    seen: list[BatchProgress] = []
    client.map([{"script": {"fail": "x"}}, *rows(4)], 2, progress=seen.append)
    assert [p.done for p in seen] == [1, 2, 3, 4, 5]
    assert seen[-1].ok == 4
    assert seen[-1].outcomes["agent_error"] == seen[-1].causes["agent"] == 1
    assert 0 < seen[-1].elapsed_s < 60
    assert "5/5 done, 4 ok" in str(seen[-1])


def test_a_batch_logs_its_progress_and_prints_it_on_request(
    client: RolloutClient,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with caplog.at_level(logging.INFO, "agentcore_rl_toolkit.client"):
        client.map(rows(3), 1, log_interval=0.001, progress=True)
        logged = [r.getMessage() for r in caplog.records if r.getMessage().startswith("batch: ")]
        assert [line.partition(",")[0] for line in logged] == [f"batch: {n}/3 done" for n in (1, 2, 3)]
        assert [line.partition(",")[0] for line in capsys.readouterr().err.split("\n")] == [
            *(f"{n}/3 done" for n in (1, 2, 3)),
            "",
        ]
        caplog.clear()
        client.map(rows(3), 1, log_interval=0)
        client.map(rows(1))  # the usual interval is 30 s
    assert not [r for r in caplog.records if r.getMessage().startswith("batch: ")]
    outcomes = {"ok": 1, "lost": 2, "agent_error": 1}
    about: dict[str, Any] = {"causes": {"policy": 1}}
    progress = BatchProgress(total=None, done=4, ok=1, running=5, elapsed_s=6.7, outcomes=outcomes, **about)
    text = "4 done, 1 ok, 1 agent_error, 2 lost (1 the policy's), 5 running, 7 s"
    assert str(progress) == text
    progress = BatchProgress(total=1, done=0, ok=0, running=1, elapsed_s=0.0, outcomes={})
    assert str(progress) == "0/1 done, 0 ok, 1 running, 0 s"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for done in (0, 1):
        print_progress(dataclasses.replace(progress, done=done))
    assert capsys.readouterr().err == "0/1 done, 0 ok, 1 running, 0 s\r1/1 done, 0 ok, 1 running, 0 s\n"


def test_each_payload_may_have_its_own_entries_for_the_agent(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    items = client.map([*rows(1, run_s=0.3), *rows(1)], overrides=[{"temperature": 0.1}, None])  # the first ends last
    blocks = [runtime.sessions[item.session_id or ""].payload["_rollout"] for item in items]
    assert [block.get("temperature") for block in blocks] == [0.1, None]
    with pytest.raises(ConfigError, match="overrides has 1 entries for 2 payloads"):
        client.run_batch(rows(2), overrides=[{}])


def test_a_batch_runs_once_has_no_length_and_takes_next(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    batch = client.run_batch(rows(3), 2)
    with pytest.raises(TypeError):
        len(batch)  # type: ignore[arg-type]
    assert next(batch).success
    assert len(list(batch)) == 2
    with pytest.raises(StopIteration):
        next(batch)
    with pytest.raises(ConfigError, match="runs once"):
        list(batch)
    assert runtime.runs == 3


def test_a_batch_takes_inputs_when_there_is_room_and_holds_twice_its_limit(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    taken, threads = list[int](), set[str]()

    def endless() -> Iterator[dict[str, Any]]:
        for n in itertools.count():
            taken.append(n)
            threads.add(threading.current_thread().name)
            yield {"script": {"result": {"n": n}}}

    batch = client.run_batch(endless(), 4)
    assert next(batch).success
    until(lambda: client.stats.get("ok", 0) >= 8)  # finished, and not taken by this slow consumer
    client.flush()
    assert len(taken) <= 2 * 4 + 1
    assert [next(batch).success for _ in range(20)] == [True] * 20
    batch.close()
    client.flush()
    assert len(taken) <= 21 + 2 * 4 + 1
    assert threads == {"agentcore-rl-call"}  # it may block
    assert runtime.live == []


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyError("row 1"), KeyError),
        (SystemExit("row 1"), SystemExit),
        (concurrent.futures.CancelledError("row 1"), concurrent.futures.CancelledError),
    ],
    ids=repr,
)
def test_an_iterable_that_raises_ends_its_batch_and_no_other_rollout(
    client: RolloutClient, runtime: ScriptedRuntime, error: BaseException, raised: type[BaseException]
) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield {"script": {"hang": True}}
        raise error

    other = client.submit({"script": {"hang": True}})
    with pytest.raises(raised, match="row 1"):
        list(client.run_batch(broken(), 2))

    async def collect() -> list[Any]:
        return [item async for item in client.run_batch_async(broken(), 2)]

    with pytest.raises(raised, match="row 1"):
        asyncio.run(collect())
    assert not other.done()
    assert client.submit(rows(1)[0]).result(60)["n"] == 0
    other.cancel()
    client.flush()
    assert runtime.live == []
    with pytest.raises(ConfigError, match="without a length"):
        client.run_batch(broken())


def test_a_row_that_its_owner_changes_afterwards_is_sent_as_it_was(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    row: dict[str, Any] = {"script": {}}

    def one_row_again_and_again() -> Iterator[dict[str, Any]]:
        for row["n"] in range(20):
            yield row

    client.map(one_row_again_and_again(), 10)
    futures = []
    for row["n"] in range(20, 40):
        futures.append(client.submit(row))
    concurrent.futures.wait([future._done for future in futures], 60)
    assert sorted(session.payload["n"] for session in runtime.sessions.values()) == [*range(40)]


def test_wrong_settings_end_a_batch_that_has_started_all_its_rollouts(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    runtime.faults.append("404")
    with pytest.raises(ConfigError, match="every rollout would fail like its first ones"):
        list(client.run_batch([{"script": {"cold_start_s": 3.0, "hang": True}}] * 3))
    client.flush()
    assert runtime.live == []


def test_a_progress_hook_that_raises_anything_else_is_logged(
    client: RolloutClient, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(progress: BatchProgress) -> None:
        raise ValueError("not the batch's")

    assert [item.success for item in client.run_batch(rows(2), progress=hook)] == [True, True]
    assert caplog.text.count("the progress hook of a batch raised") == 2


@pytest.mark.parametrize("fault", ["403", "404", "refused store"])
def test_wrong_settings_end_a_batch_at_its_first_answers(
    client: RolloutClient, runtime: ScriptedRuntime, fault: str
) -> None:
    reply = {"status": "refused", "error": "s3://b does not exist"} if fault == "refused store" else None
    runtime.faults.extend([] if reply else [fault] * 1000)
    batch, items = client.run_batch([{"script": {"reply": reply}}] * 500, 4), []
    with pytest.raises(ConfigError, match="every rollout would fail like its first ones") as caught:
        items.extend(batch)
    assert 1 <= len(items) <= 12
    codes = {"403": "AccessDeniedException", "404": "ResourceNotFoundException", "refused store": "StoreRefused"}
    assert caught.value.code == codes[fault]
    assert isinstance(caught.value.__cause__, RolloutLostError if reply else ClientError)
    assert runtime.requests["invoke"] <= 12


def test_a_runtime_that_cannot_be_reached_ends_a_batch(make_client: MakeClient) -> None:
    client = make_client(endpoint_url="http://127.0.0.1:9", max_retry_attempts=1, deadlines=Deadlines(stop_s=0.5))
    items: list[Any] = []
    with pytest.raises(ConfigError, match="could not be reached") as caught:
        items.extend(client.run_batch(rows(50), 4))
    assert 1 <= len(items) <= 12
    assert caught.value.code == "EndpointConnectionError"


def test_a_refusal_after_a_success_is_one_items_failure(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    runtime.faults.extend([None, "403"])
    items = client.map(rows(4), 1)
    assert [item.success for item in items] == [True, False, True, True]
    assert items[1].exception is not None
    assert items[1].exception.code == "AccessDeniedException"  # type: ignore[attr-defined]
    assert isinstance(items[1].exception.__cause__, ClientError)


def test_a_refusal_while_others_run_ends_none_of_them(client: RolloutClient, runtime: ScriptedRuntime) -> None:
    """No rollout has ended yet, but the runtime has accepted some: the settings are right."""
    runtime.faults.extend([None, None, "403"])
    prepared = itertools.count()

    async def prepare(session_id: str, attempt: int) -> dict[str, Any]:
        if next(prepared) == 2:
            while [flight["stage"] for flight in client.flights()].count("run") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return {}

    items = client.map(rows(5, run_s=1.0), 3, prepare=prepare)
    assert sorted(item.success for item in items) == [False, True, True, True, True]


def test_throttling_bursts_lose_nothing_and_run_nothing_twice(make_client: MakeClient) -> None:
    with ScriptedRuntime(faults=["429", None] * 8, max_sessions=8) as strict:
        client = make_client(endpoint_url=strict.url)
        items = client.map(rows(24, run_s=0.05))
        assert all(item.success for item in items)
        assert strict.runs == 24
        assert client.stats["refused"] > 0
        client.flush()
        assert strict.live == []


FEW_FILES = """
import resource, sys
from agentcore_rl_toolkit import RolloutClient
url, arn, store = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
row = {"script": {"cold_start_s": 1.0, "run_s": 1.0}}
with RolloutClient(arn, store, "exp", endpoint_url=url, tps_limit=2000) as client:
    print(sum(item.success for item in client.map([row] * 80, timeout=60)))
"""


def test_a_client_leaves_descriptors_for_its_store(runtime: ScriptedRuntime, store_url: str) -> None:
    words = [sys.executable, "-c", FEW_FILES, runtime.url, runtime.arn, store_url]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout == "80\n", done.stderr


# ---- ledger and resume


def test_resume_collects_what_is_done_and_sends_only_the_rest(
    make_client: MakeClient, runtime: ScriptedRuntime, tmp_path: Path
) -> None:
    ledger = str(tmp_path / "l.jsonl")
    batch = rows(10)
    first = make_client()
    done = []
    for item in first.run_batch(batch, 2, ledger=ledger, resume=True):
        done.append(item.index)
        if len(done) == 4:
            break
    first.close()
    runs = runtime.runs
    second = make_client()
    items = second.map(batch, 4, ledger=ledger, resume=True)
    assert [item.index for item in items] == list(range(10))
    assert all(item.success for item in items)
    assert [item.result["n"] for item in items if item.result is not None] == list(range(10))
    finished = [s for s in runtime.sessions.values() if s.record_at_s is not None]
    # each row has one record, except those whose session was cancelled after it had already stored one
    assert len({json.dumps(s.payload["script"]) for s in finished}) == 10
    assert runtime.runs - runs <= 10 - 4
    second.close()
    assert runtime.live == []
    again = make_client()
    before = runtime.runs
    assert all(item.success for item in again.map(iter(batch), 4, ledger=ledger, resume=True))
    assert runtime.runs == before
    assert again.stats == {"store_requests": 10}  # one for each record, and nothing is counted twice


def test_resume_keeps_failures_unless_told_to_try_them_again(
    make_client: MakeClient, runtime: ScriptedRuntime, tmp_path: Path
) -> None:
    ledger = tmp_path / "l.jsonl"
    client = make_client(deadlines=Deadlines(confirm_s=0.2))
    runtime.faults.append("drop")
    batch = rows(3)
    assert [item.outcome for item in client.map(batch, 1, ledger=ledger)] == [Outcome.LOST, Outcome.OK, Outcome.OK]
    kept = client.map(batch, 1, ledger=ledger, resume=True)
    assert [item.outcome for item in kept] == [Outcome.LOST, Outcome.OK, Outcome.OK]
    assert kept[0].exception is not None
    assert runtime.runs == 2
    retried = client.map(batch, 1, ledger=ledger, resume="retry_failed")
    assert [item.success for item in retried] == [True, True, True]
    assert retried[0].attempt == 2
    assert runtime.runs == 3


def test_a_crash_between_two_attempts_costs_no_attempt(
    make_client: MakeClient, runtime: ScriptedRuntime, tmp_path: Path
) -> None:
    ledger, batch = tmp_path / "l.jsonl", rows(1)
    runtime.faults.append("424")
    first = make_client()
    copies: list[bytes] = []

    def prepare(session_id: str, attempt: int) -> dict[str, Any]:
        copies.append(ledger.read_bytes())  # the ledger as a crash at this moment leaves it
        return {}

    assert first.map(batch, ledger=ledger, retries=1, prepare=prepare)[0].success
    first.close()
    ledger.write_bytes(copies[1])
    (item,) = make_client().map(batch, ledger=ledger, resume=True)
    assert (item.success, item.attempt) == (True, 2)


def raising(cause: str, **more: Any) -> dict[str, Any]:
    return {"script": {"fail": "cut", "cause": cause, **more}}


RAMBLES = raising("policy", failure="tokens", result={"rewards": 0.0})


def test_an_item_says_whose_failure_it_is(client: RolloutClient) -> None:
    batch = [RAMBLES, raising("infrastructure"), raising("agent"), {"script": {"fail": "as published"}}]
    batch += [{"script": {"raw": "no json"}}, {"script": {"result": {"rewards": 1.0}}}, raising("of a later version")]
    items = client.map(batch, 4)
    assert [item.outcome for item in items] == [
        Outcome.AGENT_ERROR,
        Outcome.LOST,
        *[Outcome.AGENT_ERROR] * 2,
        Outcome.INVALID,
        Outcome.OK,
        Outcome.AGENT_ERROR,
    ]
    causes = ["policy", "infrastructure", "agent", "agent", "agent", None, "agent"]
    assert [item.cause for item in items] == causes
    assert [item.failure for item in items] == ["tokens", *[None] * 6]
    assert [item.success for item in items] == [False] * 5 + [True, False]
    assert (items[0].error or "").startswith("the policy failed: cut")
    assert items[0].result is not None
    assert items[0].result["rewards"] == 0.0
    assert (items[1].error or "").startswith("the infrastructure failed the agent: cut")
    assert items[1].traceback == "RuntimeError: cut"
    stats = client.stats
    assert (stats["cause_policy"], stats["cause_infrastructure"], stats["cause_agent"]) == (1, 1, 4)


def test_what_the_infrastructure_did_to_an_agent_is_tried_again_and_the_policys_failure_is_not(
    client: RolloutClient, runtime: ScriptedRuntime
) -> None:
    items = client.map([raising("infrastructure"), RAMBLES, raising("agent")], 1, retries=2)
    assert [item.attempt for item in items] == [3, 1, 1]
    assert runtime.runs == 5


def test_a_resumed_run_does_not_give_the_policy_a_second_try(
    client: RolloutClient, runtime: ScriptedRuntime, tmp_path: Path
) -> None:
    ledger = tmp_path / "l.jsonl"
    batch = [RAMBLES, raising("agent")]
    first = client.map(batch, 1, ledger=ledger)
    again = client.map(batch, 1, ledger=ledger, resume="retry_failed")
    assert [item.attempt for item in again] == [1, 2]
    assert [(item.cause, item.failure) for item in again] == [(item.cause, item.failure) for item in first]
    assert runtime.runs == 3


def test_a_ledger_is_kept_where_it_is_asked_for(
    client: RolloutClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, files in (({}, []), ({"ledger": "mine"}, ["mine"]), ({"ledger": "mine", "resume": True}, ["mine"])):
        client.map(rows(1), **options)  # type: ignore[arg-type]
        assert [path.name for path in tmp_path.iterdir() if path.name in ("mine", "runs")] == files
    client.map(rows(1), resume=True)
    assert (tmp_path / "runs" / "exp" / "ledger.jsonl").is_file()


def test_resume_with_other_rows_is_refused(client: RolloutClient, tmp_path: Path) -> None:
    ledger = tmp_path / "l.jsonl"
    client.map(rows(2), ledger=ledger)
    with pytest.raises(ConfigError, match="row 0 is not the one"):
        client.map(rows(2, run_s=0.01), ledger=ledger, resume=True)
    with pytest.raises(ConfigError, match="row 0 has input id 'a', the ledger"):
        client.map(rows(2), ledger=ledger, resume=True, input_ids=["a", "b"])
    assert all(item.success for item in client.map(rows(2), ledger=ledger, resume=True))
