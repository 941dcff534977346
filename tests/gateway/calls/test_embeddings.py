"""Embeddings are relayed to a server that has them, and never recorded."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from aiohttp import web

from agentcore_rl_toolkit.gateway import GatewayClient, SessionHandle
from agentcore_rl_toolkit.gateway.testing.engine import error_body
from scripted_engine import Fault, ScriptedEngine

from ..asking import Start, captured, gpt, opened


class EmbeddingEngine(ScriptedEngine):
    async def _answer(self, seen: Any, http: web.BaseRequest) -> web.StreamResponse:
        if seen.path != "/v1/embeddings":
            return await super()._answer(seen, http)
        vectors = [{"object": "embedding", "index": i, "embedding": [0.5, i]} for i in range(len(seen.body["input"]))]
        reply = {"object": "list", "data": vectors, "model": seen.body["model"], "usage": {"prompt_tokens": 2}}
        return await self._json(seen, http, reply)


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_embeddings_are_relayed_and_not_recorded(start_gateway: Start, kind: str) -> None:
    async with EmbeddingEngine() as engine:
        gateway = await start_gateway(engine, engine=kind)
        session = await opened(gateway, model_id="policy", max_turns=1)
        async with gpt(session) as llm:
            made = await llm.embeddings.create(model="e5", input=["a", "b"], encoding_format="float")
        assert [vector.embedding for vector in made.data] == [[0.5, 0], [0.5, 1]]
        assert engine.calls[0].body["model"] == "e5"
        capture = await captured(gateway, session)
        assert (capture.turns, capture.errors) == ([], [])


@pytest.mark.parametrize(
    "fault", [Fault(), Fault(status=400, body=error_body(400, "The model does not support Embeddings API"))]
)
async def test_a_server_without_embeddings_is_404_with_the_way_out(
    engine: ScriptedEngine, client: GatewayClient, session: SessionHandle, fault: Fault
) -> None:
    engine.faults.append(fault)
    async with gpt(session) as llm:
        with pytest.raises(openai.NotFoundError, match="another server"):
            await llm.embeddings.create(model="e5", input="a")
    assert (await captured(client, session)).errors == []


async def test_another_error_of_the_server_is_passed_on(engine: ScriptedEngine, session: SessionHandle) -> None:
    engine.faults.append(Fault(status=400, body=error_body(400, "input is too long")))
    async with gpt(session) as llm:
        with pytest.raises(openai.BadRequestError, match="too long"):
            await llm.embeddings.create(model="e5", input="a")
