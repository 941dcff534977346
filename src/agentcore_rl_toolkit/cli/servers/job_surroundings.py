"""The surroundings of local multi-turn RL jobs: a gateway in token mode before the model, data by URL, agents by boto3."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...backends.collection.credit import turns_of
from ...client.data import read_rows
from ...client.transport import Transport
from ...errors import AgentCoreRLError, GatewayError
from ...gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from ...gateway.client.one import SessionHandle
from ...gateway.engines import Piece
from ...gateway.engines.errors import upstream_error
from ...gateway.engines.sampling_service import Asked
from ...gateway.http.client import stream
from ...messages.errors import RequestError
from ...policy.training_service.interface import Example
from ...policy.training_service.model import PolicyModel
from ...policy.training_service.sagemaker import wire
from ...store import open_store
from ...trajectory import TrainingSequence, build_trajectory

AT_ONCE = 96  # the most rollouts that a job runs at once
REPLY_S = 600.0
BASE = "base"  # the path of the weights that the model began with
CODES = {400: "ValidationException", 429: "ThrottlingException"}


class ModelSampler:
    """A gateway's `Sampler` and `SamplingService` over a model in this process."""

    def __init__(self, model: PolicyModel, path: str = BASE, threads: ThreadPoolExecutor | None = None) -> None:
        self._model, self._path = model, None if path == BASE else path
        self._threads = threads or ThreadPoolExecutor(AT_ONCE, "job-sample")

    async def open(self, path: str) -> ModelSampler:
        return ModelSampler(self._model, path, self._threads)

    async def sample(self, asked: Asked) -> list[Piece]:
        params = {
            "max_tokens": asked.max_tokens,
            "stop": asked.stop_token_ids or None,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k or 0,
            "seed": asked.seed,
        }
        sample = functools.partial(self._model.sample, self._path, asked.prompt, asked.n, params)
        done = await asyncio.get_running_loop().run_in_executor(self._threads, sample)
        return [
            Piece(choice=i, ids=c.ids, logprobs=list(c.logprobs), finish_reason=c.stop_reason)
            for i, c in enumerate(done)
        ]

    def for_agent(self, error: Exception) -> RequestError:
        return upstream_error(400, str(error).encode())

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(kw_only=True)
class Served:
    """The weights that one job samples, behind a gateway of their own. ``sessions`` are the rollouts that run, by trajectory."""

    gateway: Gateway
    client: GatewayClient
    version: int = 0
    sessions: dict[str, SessionHandle] = field(default_factory=dict)


class JobSurroundings:
    """See `policy.training_service.sagemaker.jobs.Surroundings`. Agents are where boto3 finds AgentCore: on this machine,
    AWS_ENDPOINT_URL_BEDROCK_AGENTCORE names the local runtime.
    """

    def __init__(self, model: PolicyModel, model_dir: Path) -> None:
        self._model, self._model_dir = model, model_dir
        self._served: dict[str, Served] = {}
        self._agent = functools.cache(_agent)
        self._threads = ThreadPoolExecutor(AT_ONCE, "job-invoke")

    async def prompts(self, uri: str) -> list[str]:
        place, _, prefix = uri.rpartition("/")
        store = open_store(place)
        rows: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            for found in await store.list_async(prefix):
                file = Path(folder) / Path(found.key).name
                file.write_bytes(await store.get_async(found.key))
                rows += read_rows(file)
        texts = [row.get("prompt", next(iter(row.values()))) for row in rows]
        return [text if isinstance(text, str) else json.dumps(text) for text in texts]

    async def invoke(self, arn: str, qualifier: str, session_id: str, payload: Mapping[str, Any]) -> Any:
        body, run = json.dumps(payload).encode(), asyncio.get_running_loop().run_in_executor
        try:
            return json.loads(await run(self._threads, self._agent(arn, qualifier).invoke, session_id, body))
        except (AgentCoreRLError, ValueError) as e:
            raise ConnectionError(str(e)) from e

    async def stop(self, arn: str, qualifier: str, session_id: str) -> None:
        with contextlib.suppress(AgentCoreRLError):  # an idle session ends by itself
            stop = self._agent(arn, qualifier).stop
            await asyncio.get_running_loop().run_in_executor(self._threads, stop, session_id)

    async def use(self, place: str, path: str | None) -> None:
        if place not in self._served:
            key = secrets.token_urlsafe(24)
            upstream = UpstreamConfig(url="http://in-process.invalid", engine="sagemaker")
            config = GatewayConfig(upstreams=(upstream,), model_dir=str(self._model_dir), admin_key=key)
            gateway = Gateway(config, connect=lambda: ModelSampler(self._model))
            await gateway.start()
            self._served[place] = Served(gateway=gateway, client=GatewayClient(gateway.url, admin_key=key))
        served = self._served[place]
        served.version += 1
        await served.client.set_weight_version_async(served.version, sampler=path or BASE)

    async def leave(self, place: str) -> None:
        if (served := self._served.pop(place, None)) is not None:
            await served.client.aclose()
            await served.gateway.stop()

    async def chat(self, place: str, trajectory_id: str, request: Mapping[str, Any]) -> AsyncIterator[bytes]:
        served = self._served[place]
        session = served.sessions.get(trajectory_id)
        try:
            if session is None:
                (session,) = await served.client.create_sessions_async([trajectory_id], train="all")
                served.sessions[trajectory_id] = session
            url = f"{session.base_url}/chat/completions"
            async for piece in stream("POST", url, body=request, key=session.api_key, timeout_s=REPLY_S):
                yield piece
        except GatewayError as e:
            raise wire.RefusedError(e.message, code=CODES.get(e.status or 0, "InternalServerException")) from e

    async def sampled(self, place: str, trajectory_id: str, temperature: float) -> list[Example]:
        served = self._served[place]
        served.sessions.pop(trajectory_id, None)
        captured = (await served.client.fetch_async([trajectory_id]))[trajectory_id]
        trajectory = build_trajectory(trajectory_id, captured.turns, train="all", temperature=temperature)
        turns = [[0] * len(sequence.token_ids) for sequence in trajectory.sequences]
        for number, (index, begin, end) in enumerate(turns_of(trajectory, captured).values(), 1):
            turns[index][begin:end] = [number] * (end - begin)
        both = zip(trajectory.sequences, turns, strict=True)
        return [_example(sequence, turns_T) for sequence, turns_T in both if sequence.trained_tokens]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for place in list(self._served):
            await self.leave(place)


def _agent(arn: str, qualifier: str) -> Transport:
    wide: dict[str, Any] = {"pool_connections": AT_ONCE, "read_timeout_s": 900.0}
    return Transport(arn, region=arn.split(":")[3], endpoint_url=None, qualifier=qualifier, **wide)


def _example(sequence: TrainingSequence, turns_T: list[int]) -> Example:
    """Position i predicts token i + 1."""
    logprobs = [0.0 if lp is None else lp for lp in sequence.logprobs[1:]]
    inputs: dict[str, list[Any]] = {"target_tokens": sequence.token_ids[1:], "logprobs": logprobs}
    inputs |= {"weights": [float(m) for m in sequence.loss_mask[1:]], "advantages": turns_T[1:]}
    return Example(tokens=sequence.token_ids[:-1], inputs=inputs)
