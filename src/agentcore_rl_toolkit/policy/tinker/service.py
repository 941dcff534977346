"""A Tinker service for tests: the wire format of SDK 0.38.0 on a loopback port, with a model of your choice behind it.

The unmodified SDK works against it::

    with TinkerServer(ScriptedModel()).running() as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        training = service.create_lora_training_client(base_model=server.model.base_model)

(`running` gives the service a thread and a loop of its own: the SDK waits for the service where it is called).
`ScriptedModel` makes tokens up and learns nothing; `agentcore_rl_toolkit.policy.finetuning.PolicyModel` is a small
network that samples and trains, and ``agentcore-rl policy tinker`` serves it as a process.

What it has: sessions, samplers, sampling with prompt logprobs, forward_backward, optim_step, saving and loading, cancelling.
What it refuses with 404: custom losses, exports, billing, everything that lists or shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..._parsing import parse_json
from ...errors import AgentCoreRLError
from .listening import Answer, Asked, Listener
from .messages import Completion, ForwardBackward, Sampled, write_sample
from .promises import Promise, Promises, refuse
from .runs import PROTOBUF, Runs
from .scripted import ScriptedModel, TinkerModel

__all__ = ["Fault", "SampleCall", "ScriptedModel", "TinkerModel", "TinkerServer"]

API = "/api/v1/"
MAX_SAMPLES, MAX_DEPTH = 10_000, 200


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one sampling request; see `TinkerServer.faults`. `gateway.testing.Fault` will do as well."""

    status: int = 200
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    drop_after: int | None = None
    delay_s: float = 0.0
    gate: asyncio.Event | None = None  # waited for
    edit: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None


@dataclass
class SampleCall:
    """One `asample` as the service saw it."""

    sampler: str
    path: str | None
    body: dict[str, Any]
    headers: dict[str, str]
    prompt_ids: list[int]
    completion_ids: list[list[int]] = field(default_factory=list)
    cancelled: bool = False


class TinkerServer:
    """One service. `calls` are the sampling requests, `requests` all (method, path); `updates` are what was trained on.

    `faults` are taken by the next sampling requests: ``status`` and ``body`` answer `asample`, the others act on the answer
    itself (``drop_after``: every time it is fetched; ``edit`` gets ``{"sequences": [{"tokens", "logprobs",
    "stop_reason"}]}``). `fail(name, ...)` lets the next requests to a route fail with a status. `hold_s` is how long
    `retrieve_future` waits before it says "try again"; `jwt` makes clients exchange their key for a token first.
    """

    def __init__(self, model: TinkerModel, *, hold_s: float = 20.0, jwt: str | None = None) -> None:
        self.model = model
        self.hold_s = hold_s
        self.jwt = jwt
        self.api_key: str | None = None  # the only one that is good; None: any is
        self.cancels = True
        self.faults: deque[Fault] = deque()
        self.calls: list[SampleCall] = []
        self.requests: list[tuple[str, str]] = []
        self.heartbeats: list[str] = []
        self.finished: list[str] = []
        self.samplers: dict[str, str | None] = {}
        self.sessions: set[str] = set()
        self._failing: dict[str, deque[int]] = defaultdict(deque)
        self._name = secrets.token_hex(4)  # saved weights outlive the service: the next one's names must be others
        self._numbers = itertools.count(1)
        self._promises = Promises()
        self._sampling: dict[str, tuple[SampleCall, asyncio.Task[None]]] = {}
        self._runs = Runs(model, self._promises, self._new_sampler)
        self._sampler = ThreadPoolExecutor(64, "tinker-sample")
        self._listener = Listener(self._answer)

    @property
    def url(self) -> str:
        return self._listener.url

    @property
    def updates(self) -> list[ForwardBackward]:
        return self._runs.updates

    @property
    def steps(self) -> list[dict[str, float]]:
        return self._runs.steps

    async def start(self, port: int = 0) -> None:
        await self._listener.start(port=port)

    async def stop(self) -> None:
        await self._listener.stop()
        await self._promises.stop()
        self._runs.stop()
        self._sampler.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> TinkerServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @contextlib.contextmanager
    def running(self) -> Iterator[TinkerServer]:
        """Run in a thread of its own for as long as the block lasts."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="tinker-server", daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.start(), loop).result(10)
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self.stop(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    def fail(self, name: str, *statuses: int) -> None:
        """Let the next requests to ``/api/v1/{name}`` end with these statuses."""
        self._failing[name].extend(statuses)

    def forget_sessions(self) -> None:
        """As when heartbeats stayed away: every session and sampler is unknown from now on."""
        self.sessions.clear()
        self.samplers.clear()

    # -- requests

    async def _answer(self, asked: Asked) -> Answer:
        name = asked.path.rpartition(API)[2]  # whatever path the service's URL has in front of it
        self.requests.append((asked.method, name))
        if self._failing[name]:
            return refuse(self._failing[name].popleft(), "scripted failure")
        key = asked.headers.get("x-api-key", "")
        if name not in ("client/config", "auth/token") and self.jwt is not None and key != self.jwt:
            return refuse(401, "this token is no good", (("www-authenticate", 'Bearer error="invalid_token"'),))
        if not key:
            return refuse(401, "the X-API-Key header is missing")
        if (
            self.api_key is not None
            and key != self.jwt
            and not hmac.compare_digest(key.encode(), self.api_key.encode())
        ):
            return refuse(401, "this is not the TINKER_API_KEY that the service was started with")
        try:
            if name == "asample":
                return await self._asample(asked)
            if name == "retrieve_future":
                return await self._promises.retrieve(_object(asked.body)["request_id"], hold_s=self.hold_s)
            if name == "forward_backward":
                return self._runs.forward_backward(asked.body)
            body = _object(asked.body) if asked.body else {}
            return self._plain(asked.method, name, body)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, AgentCoreRLError) as e:
            return refuse(422, f"{type(e).__name__}: {e}")

    def _plain(self, method: str, name: str, body: dict[str, Any]) -> Answer:
        """Everything that is answered at once, from JSON to JSON."""
        routes: dict[str, Callable[[dict[str, Any]], Any]] = {
            "healthz": lambda _: {"status": "ok"},
            "client/config": lambda _: {"pjwt_auth_enabled": self.jwt is not None},
            "client/dynamic_config": lambda _: {"sample_cancel_enabled": self.cancels},
            "auth/token": lambda _: {"jwt": self.jwt},
            "telemetry": lambda _: {"status": "accepted"},
            "get_server_capabilities": lambda _: {
                "supported_models": [{"model_name": self.model.base_model, "trainable": True, "sampleable": True}]
            },
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_sampling_session": self._create_sampler,
            "cancel_future": self._cancel,
            "create_model": self._create_model,
            "get_info": lambda b: self._runs.info(b["model_id"]),
            "optim_step": self._runs.optim_step,
            "save_weights": self._runs.save,
            "save_weights_for_sampler": self._runs.save_for_sampler,
            "load_weights": self._runs.load,
            "weights_info": lambda b: self._runs.weights_info(b["tinker_path"]),
        }
        made = routes.get(name)
        parts = name.split("/")
        if made is not None:
            answer = made(body)
        elif method == "GET" and parts[0] == "samplers" and parts[1] in self.samplers:
            answer = {
                "sampler_id": parts[1],
                "base_model": self.model.base_model,
                "model_path": self.samplers[parts[1]],
            }
        elif parts[0] == "sessions" and parts[-1] == "finish":
            self.finished.append(parts[1])
            answer = {}
        else:
            answer = refuse(404, f"there is no {method} {API}{name} here")
        return answer if isinstance(answer, Answer) else Answer(body=json.dumps(answer).encode())

    # -- sessions

    def _create_session(self, body: dict[str, Any]) -> dict[str, Any]:
        session = f"{self._name}-{next(self._numbers)}"
        self.sessions.add(session)
        return {"type": "create_session", "session_id": session}

    def _heartbeat(self, body: dict[str, Any]) -> Any:
        if body["session_id"] not in self.sessions:
            return refuse(410, "this session has ended")
        self.heartbeats.append(body["session_id"])
        return {"type": "session_heartbeat"}

    def _create_sampler(self, body: dict[str, Any]) -> Any:
        if body["session_id"] not in self.sessions:
            return refuse(410, "this session has ended")
        path, base = body.get("model_path"), body.get("base_model")
        if path is not None and path not in self.model.paths:
            return refuse(404, f"there are no weights {path!r}")
        if path is None and base != self.model.base_model:
            return refuse(404, f"there is no base model {base!r}")
        return {"type": "create_sampling_session", "sampling_session_id": self._new_sampler(path)}

    def _new_sampler(self, path: str | None) -> str:
        sampler = f"{self._name}-sampler-{next(self._numbers)}"
        self.samplers[sampler] = path
        return sampler

    # -- sampling

    async def _asample(self, asked: Asked) -> Answer:
        body = _object(asked.body)
        if not 1 <= (body.get("num_samples") or 1) <= MAX_SAMPLES:
            raise ValueError(f"num_samples must be 1 to {MAX_SAMPLES}")
        sampler = body["sampling_session_id"]
        if sampler not in self.samplers:
            return refuse(404, f"there is no sampling session {sampler!r}")
        request_id = f"{sampler}:sample:{body['seq_id']}"
        if request_id in self._sampling:  # asked again
            return self._promised(request_id, body)
        fault = self.faults.popleft() if self.faults else Fault()
        if fault.status != 200 or fault.body is not None:
            content = fault.body if fault.body is not None else json.dumps({"detail": "scripted failure"}).encode()
            return Answer(status=fault.status, body=content, headers=fault.headers)
        ids = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        call = SampleCall(sampler, self.samplers[sampler], body, asked.headers, ids)
        self.calls.append(call)
        promise = self._promises.make(request_id, drop_after=fault.drop_after)
        self._sampling[request_id] = call, self._promises.start(self._sample(promise, call, fault))
        return self._promised(request_id, body)

    def _promised(self, request_id: str, body: dict[str, Any]) -> Answer:
        named = [f"{request_id}:{i}" for i in range(body.get("num_samples") or 1)]
        return Answer(body=json.dumps({"request_id": request_id, "sample_sequence_ids": named}).encode())

    async def _sample(self, promise: Promise, call: SampleCall, fault: Fault) -> None:
        loop, body = asyncio.get_running_loop(), call.body
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.gate is not None:
            await fault.gate.wait()
        try:
            n = body.get("num_samples") or 1
            sequences = await loop.run_in_executor(
                self._sampler, self.model.sample, call.path, call.prompt_ids, n, body["sampling_params"]
            )
            prompt = None
            if body.get("prompt_logprobs"):
                prompt = await loop.run_in_executor(
                    self._sampler, self.model.prompt_logprobs, call.path, call.prompt_ids
                )
        except AgentCoreRLError as e:
            promise.fail(str(e))
            return
        except Exception as e:
            promise.broke(e)
            return
        if fault.edit is not None:
            sequences = _edited(sequences, fault)
        call.completion_ids = [s.ids for s in sequences]
        promise.keep(write_sample(sequences, prompt), PROTOBUF)

    def _cancel(self, body: dict[str, Any]) -> dict[str, Any]:
        promise, sampling = self._promises.find(body["request_id"]), self._sampling.get(body["request_id"])
        if promise is not None and sampling is not None:
            call, task = sampling
            call.cancelled = True
            task.cancel()
            promise.fail("cancelled")
        return {}

    def _create_model(self, body: dict[str, Any]) -> Any:
        if body["session_id"] not in self.sessions:
            return refuse(410, "this session has ended")
        return self._runs.create(body)


def _object(body: bytes) -> dict[str, Any]:
    """Raises: ValueError when it is no JSON object."""
    value = parse_json(body, max_depth=MAX_DEPTH)
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")
    return value


def _edited(sequences: Sequence[Completion], fault: Fault) -> list[Sampled]:
    reply: dict[str, Any] = {
        "sequences": [{"tokens": s.ids, "logprobs": s.logprobs, "stop_reason": s.stop_reason} for s in sequences]
    }
    changed: dict[str, Any] = (fault.edit(reply) if fault.edit is not None else None) or reply
    return [
        Sampled(ids=s["tokens"], logprobs=s["logprobs"], stop_reason=s["stop_reason"]) for s in changed["sequences"]
    ]
