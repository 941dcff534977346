"""The decorator: which functions it takes, and what agents written for the published toolkit rely on."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import json
import logging
import random
import signal
import threading
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pydantic
import pytest

from agentcore_rl_toolkit import AgentCoreRLApp
from agentcore_rl_toolkit.app import RolloutConfig, engine
from agentcore_rl_toolkit.app.runner import AgentRunner
from agentcore_rl_toolkit.errors import (
    AgentCoreRLError,
    ConfigError,
    ObjectNotFoundError,
    PolicyFailure,
    StoreError,
    StorePermissionError,
)
from agentcore_rl_toolkit.logs import JsonFormatter
from agentcore_rl_toolkit.proof import Proof, check, seal
from agentcore_rl_toolkit.store import ObjectStore, open_store


async def record_of(reply: dict[str, Any], timeout_s: float = 20) -> dict[str, Any]:
    store = open_store(reply["s3_bucket"])
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                record = json.loads(await store.get_async(reply["result_key"]))
            except ObjectNotFoundError:
                await asyncio.sleep(0.005)
                continue
            assert isinstance(record, dict)
            return record


async def run_once(func: Any, payload: dict[str, Any]) -> dict[str, Any]:
    app = AgentCoreRLApp()
    app.rollout_entrypoint(func)
    block = {"exp_id": "e", "input_id": "i", "s3_bucket": f"memory://{uuid.uuid4()}"}
    context = SimpleNamespace(session_id=uuid.uuid4().hex)
    reply = await app.handlers["main"]({**payload, "_rollout": block}, context)
    record = await record_of(reply)
    assert record["_agent"]["session_id"] == context.session_id
    return record


def plain(payload: Any) -> Any:
    return {"got": payload["n"]}


async def plain_async(payload: Any) -> Any:
    await asyncio.sleep(0)
    return {"got": payload["n"]}


async def async_with_context(payload: Any, context: Any) -> Any:
    return {"got": payload["n"] if context.session_id else None}


async def _two(_extra: Any, payload: Any) -> Any:
    return {"got": payload["n"]}


class Callable_:
    async def __call__(self, payload: Any, context: Any) -> Any:
        return {"got": payload["n"] if context.session_id else None}

    def method(self, payload: Any) -> Any:
        return {"got": payload["n"]}


@functools.wraps(plain_async)
def decorated(payload: Any) -> Any:  # sync, though what it wraps is not
    return {"got": payload["n"]}


@dataclasses.dataclass
class Result:
    got: int


class Model(pydantic.BaseModel):
    got: int


@pytest.mark.parametrize(
    "func",
    [
        plain,
        lambda payload, context: {"got": payload["n"] if context.session_id else None},
        lambda payload, request: {"got": payload["n"] if request.session_id else None},
        lambda payload, factor=3: {"got": payload["n"] * factor // 3},
        lambda payload, *args, **options: {"got": payload["n"] if not args and not options else None},
        plain_async,
        async_with_context,
        functools.partial(_two, 1),
        Callable_(),
        Callable_().method,
        lambda payload: plain_async(payload),
        decorated,
        lambda payload: Result(payload["n"]),
        lambda payload: Model(got=payload["n"]),
    ],
)
async def test_every_shape_of_function_works(func: Any) -> None:
    record = await run_once(func, {"n": 7})
    assert record["got"] == 7, record


def test_the_sdk_sees_a_handler_with_payload_and_context() -> None:
    app = AgentCoreRLApp()

    @app.rollout_entrypoint
    def my_agent(payload: Any) -> Any:
        """What it does."""

    assert app.handlers["main"] is my_agent
    assert list(inspect.signature(my_agent).parameters) == ["payload", "context"]
    assert my_agent.__name__ == "my_agent"
    assert my_agent.__doc__ == "What it does."
    assert inspect.iscoroutinefunction(my_agent)


def test_a_function_that_yields_is_refused_by_its_name() -> None:
    def parts(payload: Any) -> Any:
        yield {}

    async def parts_async(payload: Any) -> Any:
        yield {}

    for func in (parts, parts_async):
        with pytest.raises(ConfigError, match=f"^{func.__name__} is a generator: "):
            AgentCoreRLApp().rollout_entrypoint(func)


def test_one_function_is_cancelled_or_all() -> None:
    runner, begun = AgentRunner(), threading.Semaphore(0)

    async def wait() -> None:
        begun.release()
        await asyncio.sleep(60)

    first, second = (runner.start(wait, (), contextvars.copy_context(), "rollout") for _ in range(2))
    assert begun.acquire(timeout=20)
    assert begun.acquire(timeout=20)
    runner.cancel(first)
    assert isinstance(first.exception(20), asyncio.CancelledError)
    assert not second.done()
    runner.cancel()
    assert isinstance(second.exception(20), asyncio.CancelledError)


async def test_fifty_blocking_agents_run_side_by_side() -> None:
    together = threading.Barrier(50)
    app = AgentCoreRLApp()
    app.rollout_entrypoint(lambda _payload: {"order": together.wait(30)})
    url = f"memory://{uuid.uuid4()}"
    replies = [
        await app.handlers["main"](
            {"_rollout": {"exp_id": "e", "input_id": str(i), "s3_bucket": url}}, SimpleNamespace(session_id=None)
        )
        for i in range(50)
    ]
    records = [await record_of(reply) for reply in replies]
    assert {r["order"] for r in records} == set(range(50))


async def test_a_task_that_only_its_own_frame_holds_survives_garbage_collection() -> None:
    import gc

    async def run(payload: Any) -> Any:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.2, future.set_result, 5)
        gc.collect()
        return {"got": await future}

    assert (await run_once(run, {}))["got"] == 5


async def test_an_app_can_be_started_again_after_its_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    app = AgentCoreRLApp()
    handler = app.rollout_entrypoint(lambda payload: {"slept": threading.Event().wait(payload.get("s", 0))})
    url = f"memory://{uuid.uuid4()}"

    async def begin(input_id: str, s: float) -> Any:
        block = {"exp_id": "e", "input_id": input_id, "s3_bucket": url}
        return await handler({"s": s, "_rollout": block}, SimpleNamespace(session_id=None))

    handler_before = signal.getsignal(signal.SIGTERM)
    async with app.router.lifespan_context(app):
        interrupted = await begin("1", 600)
        assert signal.getsignal(signal.SIGTERM) is not handler_before
    assert signal.getsignal(signal.SIGTERM) is handler_before
    assert "CRITICAL" not in {line.levelname for line in caplog.records}
    assert (await record_of(interrupted))["error_type"] == "Interrupted"
    with pytest.raises(AgentCoreRLError, match="no new rollout: the server shut down"):
        await begin("2", 0)
    async with app.router.lifespan_context(app):
        assert (await record_of(await begin("3", 0)))["status_code"] == 200


class PutOnlyClient:
    """A boto3-like client as agents of the published toolkit plug in."""

    def __init__(self, failures: int = 0) -> None:
        self.puts: list[dict[str, Any]] = []
        self.failures = failures
        self.first = threading.Event()

    def put_object(self, **arguments: Any) -> dict[str, Any]:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("not now")
        self.puts.append(arguments)
        self.first.set()
        return {}


@pytest.mark.parametrize("failures", [0, 2])
async def test_a_replaced_s3_client_gets_one_put_per_record(failures: int) -> None:
    app = AgentCoreRLApp()
    assert app.s3_client.meta.service_model.service_name == "s3"
    client = app.s3_client = PutOnlyClient(failures)
    assert app.s3_client is client
    app.rollout_entrypoint(plain)
    block = {"exp_id": "e", "input_id": "i", "s3_bucket": "the-bucket"}
    reply = await app.handlers["main"]({"n": 1, "_rollout": block}, SimpleNamespace(session_id="s" * 40))
    key = f"e/i/{'s' * 40}.json"
    assert reply == {"status": "processing", "s3_bucket": "the-bucket", "result_key": key, "runs_once": True}
    await asyncio.to_thread(client.first.wait, 20)
    await asyncio.sleep(0.05)  # time for a second one, were there one
    (put,) = client.puts
    assert (put["Bucket"], put["Key"], put["ContentType"]) == ("the-bucket", f"e/i/{'s' * 40}.json", "application/json")
    assert json.loads(put["Body"])["got"] == 1


SESSION = "s" * 40
SECRET = "5ec7e7" * 10


class Bench:
    """An app in this process, with a store of its own, whose agent calls `work`."""

    def __init__(self, work: Callable[[], Any] = lambda: {"rewards": 1.0}, **options: Any) -> None:
        self.app, self.work, self.runs = AgentCoreRLApp(), work, 0
        self.app.rollout_entrypoint(self.run, **options)
        self.block: dict[str, Any] = {"exp_id": "e", "input_id": "i", "s3_bucket": f"memory://{uuid.uuid4()}"}
        self.store = open_store(self.block["s3_bucket"])

    def run(self, payload: Any) -> Any:
        self.runs += 1
        return self.work()

    async def deliver(self, session: str = SESSION, **block: Any) -> dict[str, Any]:
        send = {"_rollout": {**self.block, **block}}
        reply: dict[str, Any] = await self.app.handlers["main"](send, SimpleNamespace(session_id=session))
        return reply

    async def end(self) -> None:
        for rollout in list(self.app._engine._live):
            await asyncio.wrap_future(rollout.done)

    async def record(self, session: str = SESSION, **block: Any) -> dict[str, Any]:
        await self.deliver(session, **block)
        await self.end()
        record: dict[str, Any] = json.loads(await self.store.get_async(f"e/i/{session}.json"))
        return record


async def test_the_reply_the_heartbeat_and_the_record_agree() -> None:
    over = threading.Event()
    bench = Bench(
        lambda: {"rewards": 0.5, "waited": over.wait(20), "line": JsonFormatter().format(logging.makeLogRecord({}))}
    )
    reply = await bench.deliver(heartbeat_s=0.01, attempt=3, proof_key=SECRET, train="main")
    known = {"s3_bucket": bench.block["s3_bucket"], "result_key": f"e/i/{SESSION}.json"}
    assert reply == {"status": "processing", **known, "runs_once": True, "heartbeat_s": 0.2, "proof": "hmac-sha256"}
    assert await bench.deliver(heartbeat_s=0.01, attempt=3, proof_key=SECRET) == reply
    beat = json.loads(await bench.store.get_async(f"e/i/{SESSION}.alive"))
    over.set()
    await bench.end()
    assert [item.key for item in await bench.store.list_async()] == [f"e/i/{SESSION}.json"]
    body = await bench.store.get_async(f"e/i/{SESSION}.json")
    assert check(body, f"e/i/{SESSION}.json", SECRET) is Proof.PROVEN
    record = json.loads(body)
    line = json.loads(record.pop("line"))
    assert (line["session_id"], line["input_id"], line["exp_id"]) == (SESSION, "i", "e")
    info = record["_agent"]
    times = [info["started_s"], beat.pop("beat_s"), info["finished_s"]]
    assert beat == {"session_id": SESSION, "attempt": 3, "period_s": 0.2, "started_s": info.pop("started_s")}
    assert times == sorted(times) == [round(time_s, 3) for time_s in times]
    del info["finished_s"], record["_proof"]
    sent = {**bench.block, "heartbeat_s": 0.01, "attempt": 3, "proof_key": "[redacted]", "train": "main"}
    expected = {
        **{"rewards": 0.5, "waited": True, "status_code": 200, "stop_reason": "end_turn", "input_id": "i", **known},
        **{"outcome": "ok", "payload": {"_rollout": sent}},
        "_agent": {"outcome": "ok", "session_id": SESSION, "attempt": 3, "train": "main"},
    }
    assert [*record.items()] == [*expected.items()]  # deployed clients read the first ones
    assert bench.runs == 1


@pytest.mark.parametrize(
    ("asked_s", "own_s", "reply_s"),
    [(None, "", 30.0), (0, "", None), (-1, "", None), (5, "0.5", 5.0), (5, "0", None)],
)
async def test_a_caller_asks_for_heartbeats_and_the_operator_may_turn_them_off(
    asked_s: float | None, own_s: str, reply_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCORE_RL_HEARTBEAT_S", own_s)
    bench = Bench()
    assert (await bench.deliver(heartbeat_s=asked_s)).get("heartbeat_s") == reply_s
    await bench.end()


class Judged(PolicyFailure):
    """A model call to another address."""

    request = SimpleNamespace(url="http://user:key@judge.example/v1/chat")


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def raises(error: BaseException) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


class Odd:
    def model_dump(self) -> Any:
        raise ValueError("no members")


FAILED = {"status_code": 500, "outcome": "agent_error", "cause": "agent", "policy_reward": 0.0, "rewards": None}
LOST = {"status_code": 500, "outcome": "lost", "cause": "infrastructure", "policy_reward": None, "rewards": None}


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (raises(ValueError("why")), {**FAILED, "stop_reason": "why", "error_type": "ValueError"}),
        (raises(Mute()), {**FAILED, "error_type": "Mute"}),
        (raises(ConnectionError("reset")), {**LOST, "stop_reason": "reset", "error_type": "ConnectionError"}),
        (
            raises(PolicyFailure("calls", "no call parses")),
            {**FAILED, "cause": "policy", "failure": "calls", "rewards": 0.0, "policy_reward": None}
            | {"stop_reason": "no call parses"},
        ),
        (
            raises(Judged("calls", "no call parses")),
            {**LOST, "stop_reason": "http://judge.example/v1/chat (not the model's gateway): no call parses"},
        ),
        (
            lambda: 0.5,
            {**FAILED, "outcome": "invalid", "error_type": "InvalidResultError"}
            | {"stop_reason": 'Return value must be a dict, got float: return {"rewards": 0.5}'},
        ),
        (lambda: None, {**FAILED, "outcome": "invalid", "stop_reason": "Return value must be a dict, got NoneType"}),
        (
            lambda: {"x": [1, object()]},
            {**FAILED, "outcome": "invalid"}
            | {"stop_reason": "result[x[1]] is a builtins.object, which has no JSON form; return plain values instead"},
        ),
        (
            lambda: {"text": "x" * 5_001},
            {**FAILED, "outcome": "invalid"}
            | {"stop_reason": "the result is larger than 5000 bytes; store large data elsewhere and return its key"},
        ),
        (Odd, {**FAILED, "stop_reason": "no members", "error_type": "ValueError"}),
        *(
            (lambda code=code: {"status_code": code}, {"outcome": "agent_error", "cause": "agent"})
            for code in (199, 300, True)
        ),
        *((lambda code=code: {"status_code": code}, {"outcome": "ok", "cause": None}) for code in (200, 299)),
    ],
)
async def test_the_record_of_a_failure(
    work: Callable[[], Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCORE_RL_MAX_RECORD_BYTES", "5000")
    record = await Bench(work).record(base_url="http://gateway/v1")
    found = {**record["_agent"], **record}
    assert {name: found.get(name) for name in expected} == expected
    if "error_type" in record:
        assert "runner.py" not in record["traceback"]  # its frame is the first
        assert record["error_type"] in record["traceback"]
        assert [*record][:3] == ["status_code", "stop_reason", "traceback"]  # as deployed clients read them
        levels = {line.levelname for line in caplog.records if "failed" in line.getMessage()}
        assert levels == {"WARNING" if expected.get("cause") == "policy" else "ERROR"}


async def test_a_failure_of_the_policy_without_a_declared_reward_has_none() -> None:
    record = await Bench(raises(PolicyFailure("turns")), on_policy_failure=None).record()
    assert ("rewards" in record, record["_agent"]["cause"]) == (False, "policy")


def unlike(**block: Any) -> bytes:
    return json.dumps({"rewards": 9, "_agent": block}).encode()


@pytest.mark.parametrize(
    ("found", "block", "kept"),
    [
        (unlike(attempt=1), {"attempt": 2}, False),
        (unlike(attempt=2), {"attempt": 2}, True),
        (unlike(attempt="1"), {"attempt": 2}, True),
        (unlike(), {"attempt": 2}, True),
        (b'{"rewards": 9, "_agent": [1]}', {"attempt": 2}, True),
        (b"no record", {"attempt": 2}, True),
        (unlike(attempt=1, text="x" * 14_000), {"attempt": 2}, False),
        (unlike(attempt=1, text="x" * 15_000), {"attempt": 2}, True),
        (b"x" * 15_001, {"attempt": 1, "proof_key": SECRET}, False),
        (unlike(attempt=1), {"attempt": 1, "proof_key": SECRET}, False),
        (seal(unlike(attempt=1), f"e/i/{SESSION}.json", SECRET), {"attempt": 1, "proof_key": SECRET}, True),
        (seal(unlike(attempt=1), f"e/i/{SESSION}.json", SECRET), {"attempt": 2, "proof_key": SECRET}, False),
    ],
)
async def test_a_record_gives_way_to_a_later_attempt_or_if_another_writer_made_it(
    found: bytes, block: dict[str, Any], kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGENTCORE_RL_MAX_RECORD_BYTES", "5000")
    bench = Bench()
    await bench.store.put_async(f"e/i/{SESSION}.json", found)
    await bench.deliver(**block)
    await bench.end()
    assert (await bench.store.get_async(f"e/i/{SESSION}.json") == found) == kept
    foreign = f"security: e/i/{SESSION}.json contained a record that this session did not write; it is replaced"
    assert (foreign in caplog.messages) == ("proof_key" in block and b"_proof" not in found)


@pytest.mark.parametrize(("work", "logged"), [(raises(ValueError("why")), ["rollout failed"]), (lambda: None, [])])
async def test_a_rollout_without_ids_runs_and_only_logs_its_failure(
    work: Callable[[], Any], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(work)
    bench.block = {"base_url": "http://127.0.0.1:1/v1", "model_id": "m"}
    assert await bench.deliver() == {"status": "processing"}
    await bench.end()
    assert bench.runs == 1
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == logged


async def test_a_process_draws_fresh_random_numbers_from_its_first_rollout_on() -> None:
    async def draw() -> list[float]:
        random.seed(7)
        numpy.random.seed(7)
        await Bench().record()
        return [random.random(), numpy.random.random()]

    first, second = await draw(), await draw()
    assert not {*first} & {*second}


async def test_as_many_deliveries_are_recognized_as_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "REMEMBERED", 2)
    bench, runs = Bench(), []
    for name in "abacac":
        await bench.deliver(name * 40)
        await bench.end()
        runs.append(bench.runs)
    assert runs == [1, 2, 2, 3, 4, 4]
    await bench.deliver("c" * 40, attempt=2)
    await bench.end()
    assert bench.runs == 5


async def test_the_first_reason_of_an_interruption_is_the_records() -> None:
    over = threading.Event()
    bench = Bench(lambda: {"over": over.wait(20)})
    await bench.deliver()
    for reason in ("first", "second"):
        bench.app._engine.interrupt(reason)
    await bench.end()
    over.set()
    record = json.loads(await bench.store.get_async(f"e/i/{SESSION}.json"))
    assert (record["stop_reason"], record["error_type"], record["outcome"]) == (
        "interrupted: first",
        "Interrupted",
        "lost",
    )
    with pytest.raises(AgentCoreRLError, match="no new rollout: first"):
        await bench.deliver()


@pytest.mark.parametrize(
    ("bucket", "error", "advice"),
    [
        (
            "file:///r",
            StorePermissionError("EACCES"),
            ". The session cannot write to file:///r (local runtime: --store file:///r)",
        ),
        (
            "memory://r",
            StorePermissionError("EACCES"),
            ". The agent's role needs s3:PutObject, s3:GetObject and s3:DeleteObject on e/* there",
        ),
        ("file:///r", StoreError("EIO"), ""),
    ],
)
async def test_a_rollout_whose_first_heartbeat_is_refused_is_refused_and_runs_when_it_is_delivered_again(
    bucket: str, error: StoreError, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCORE_RL_STORE_CHECK_S", "20")
    refused, begun, ended = [error], asyncio.Event(), asyncio.Event()

    async def put(store: ObjectStore, key: str, body: bytes, **options: Any) -> None:
        await begun.wait()
        if refused:
            raise refused[0]

    async def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        try:
            await asyncio.sleep(60 if refused else 0)
        finally:
            loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(ObjectStore, "put_async", put)
    loop, bench = asyncio.get_running_loop(), Bench(work)
    reply, again = await asyncio.gather(*(bench.deliver(s3_bucket=bucket) for _ in range(2)))
    await asyncio.wait_for(ended.wait(), 20)
    await bench.end()
    expected = {
        **{"status": "refused", "s3_bucket": bucket, "result_key": f"e/i/{SESSION}.json"},
        "error": f"the agent cannot store its record in {bucket}: {error}{advice}",
        "error_type": type(error).__name__,
    }
    assert [reply, again] == [expected, expected]
    refused.clear()
    assert (await bench.deliver(s3_bucket=bucket))["status"] == "processing"
    await bench.end()
    assert bench.runs == 2


def test_save_result_by_hand() -> None:
    url = f"memory://{uuid.uuid4()}"
    config = RolloutConfig(exp_id="e", input_id="i", s3_bucket=url)
    result = {"rewards": [0.5]}
    app = AgentCoreRLApp()
    app.save_result(result, config, "e/i/by-hand.json", {"prompt": "x", "token": "t"})
    app.save_result(result, config.to_dict(), "e/i/again.json")
    record = json.loads(open_store(url).get("e/i/by-hand.json"))
    assert result == {"rewards": [0.5]}
    assert (record["rewards"], record["status_code"], record["result_key"]) == ([0.5], 200, "e/i/by-hand.json")
    assert record["payload"] == {"prompt": "x", "token": "[redacted]"}
    assert "payload" not in json.loads(open_store(url).get("e/i/again.json"))
    with pytest.raises(ConfigError):
        app.save_result(result, {}, "k.json")
    app.save_result(result, {**config.to_dict(), "proof_key": SECRET}, "e/i/proven.json")
    assert check(open_store(url).get("e/i/proven.json"), "e/i/proven.json", SECRET) is Proof.PROVEN


async def test_a_result_by_hand_is_proven_with_the_key_of_its_running_rollout_and_stays() -> None:
    bench, key = Bench(), f"e/i/{SESSION}.json"
    bench.work = lambda: bench.app.save_result({"rewards": 0.25}, bench.block, key) or {"rewards": 1.0}
    assert (await bench.record(proof_key=SECRET))["rewards"] == 0.25
    assert check(await bench.store.get_async(key), key, SECRET) is Proof.PROVEN
