"""The decorator: which functions it takes, and what agents written for the published toolkit rely on."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import signal
import threading
import uuid
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from agentcore_rl_toolkit import AgentCoreRLApp
from agentcore_rl_toolkit.app import RolloutConfig
from agentcore_rl_toolkit.errors import AgentCoreRLError, ConfigError, ObjectNotFoundError
from agentcore_rl_toolkit.store import open_store


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


async def test_an_app_can_be_started_again_after_its_shutdown() -> None:
    app = AgentCoreRLApp()
    handler = app.rollout_entrypoint(lambda payload: {"slept": threading.Event().wait(payload.get("s", 0))})
    url = f"memory://{uuid.uuid4()}"

    async def begin(input_id: str, s: float) -> Any:
        block = {"exp_id": "e", "input_id": input_id, "s3_bucket": url}
        return await handler({"s": s, "_rollout": block}, SimpleNamespace(session_id=None))

    handler_before = signal.getsignal(signal.SIGTERM)
    async with app.router.lifespan_context(app):
        interrupted = await begin("1", 600)
    assert signal.getsignal(signal.SIGTERM) is handler_before
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
    client = app.s3_client = PutOnlyClient(failures)
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
