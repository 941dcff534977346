"""The bridge: an unmodified OpenAI client, our gateway as a process, and a client with verl's `generate` over a real policy.

The client stands where verl's `FullyAsyncLLMServerClient` does and behaves like it: an update of the weights interrupts a
generation, which then goes on under the new ones. test_real_verl.py runs verl's own.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from agentcore_rl_toolkit.backends.service import RolloutService, ServiceSettings
from agentcore_rl_toolkit.backends.verl.bridge import Bridge
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.policy.engine import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams

POLICY = Path(__file__).parents[3] / "src/agentcore_rl_toolkit/policy/weights"
LAYERS, TOP_K = 2, 3


class PolicyClient:
    """verl's client as far as the bridge calls it. `interrupt` makes the next generation span two weight versions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version = 3
        self.interrupt = False
        self.fail = False
        self.seen: list[SimpleNamespace] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        if self.fail:
            raise RuntimeError("No available servers in load balancer")
        limit, first = sampling_params["max_tokens"], self.version
        ids, logprobs = await self._sample(prompt_ids, sampling_params, 2 if self.interrupt else limit)
        if self.interrupt:
            self.version += 1
            rest = await self._sample([*prompt_ids, *ids], sampling_params, limit - len(ids))
            ids, logprobs = [*ids, *rest[0]], [*logprobs, *rest[1]]
        rows = len(prompt_ids) + len(ids)
        experts = np.arange(rows * LAYERS * TOP_K, dtype=np.int16).reshape(rows, LAYERS, TOP_K)
        output = SimpleNamespace(
            token_ids=ids,
            log_probs=logprobs,
            stop_reason="completed",
            routed_experts=experts,
            extra_fields={"min_global_steps": first, "max_global_steps": self.version},
        )
        self.seen.append(
            SimpleNamespace(request_id=request_id, prompt=prompt_ids, params=sampling_params, output=output)
        )
        return output

    async def _sample(self, prompt: list[int], asked: dict[str, Any], limit: int) -> tuple[list[int], list[float]]:
        params = SamplingParams(max_tokens=limit, stop_token_ids=tuple(asked["stop_token_ids"]), seed=asked.get("seed"))
        (made,) = await asyncio.to_thread(self.engine.generate, [prompt], params)
        return made.token_ids, made.logprobs


class Place:
    def __init__(self, client: PolicyClient, service: RolloutService, bridge: Bridge) -> None:
        self.client, self.service, self.bridge = client, service, bridge
        self.agents: list[openai.OpenAI] = []

    def session(self) -> tuple[str, openai.OpenAI]:
        (handle,) = self.service.gateway.create_sessions([new_session_id()])  # type: ignore[attr-defined]
        self.agents.append(openai.OpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0))
        return handle.session_id, self.agents[-1]

    def turns(self, session_id: str) -> list[Any]:
        return list(self.service.gateway.fetch([session_id])[session_id].turns)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with Engine.from_directory(None, seed=5) as engine:
        client = PolicyClient(engine)
        bridge = Bridge(client)
        settings = ServiceSettings(
            agent_runtime_arn="arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
            s3_bucket="memory://bridge",
            exp_id="bridge",
            model_id="policy",
            gateway_host="127.0.0.1",
            gateway_model=str(POLICY),
            gateway_context_tokens=400,
        )
        service = RolloutService.open(settings, lambda: [bridge.open()], engine="sglang", upstream_key=bridge.key)
        try:
            yield Place(client, service, bridge)
        finally:
            service.close()
            bridge.close()


@pytest.fixture(autouse=True)
def calm(place: Place) -> Iterator[None]:
    place.client.version, place.client.interrupt, place.client.fail = 3, False, False
    place.client.seen.clear()
    yield
    while place.agents:
        place.agents.pop().close()


def say(client: openai.OpenAI, messages: list[dict[str, str]], *, stream: bool = False, limit: int = 12) -> str:
    made = client.chat.completions.create(model="policy", messages=messages, max_tokens=limit, stream=stream, seed=1)  # type: ignore[call-overload]
    if not stream:
        return made.choices[0].message.content or ""
    return "".join(chunk.choices[0].delta.content or "" for chunk in made if chunk.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_recorded_as_verls_client_sampled_it(place: Place, stream: bool) -> None:
    session, client = place.session()
    messages = [{"role": "user", "content": "What is 2 plus 2?"}]
    for question in ("And 3 plus 3?", "And 4 plus 4?"):
        answer = say(client, messages, stream=stream)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    turns, seen = place.turns(session), place.client.seen
    assert len(turns) == len(seen) == 2
    for turn, call in zip(turns, seen, strict=True):
        assert list(turn.prompt_ids) == call.prompt
        assert list(turn.completion_ids) == call.output.token_ids
        assert list(turn.logprobs) == pytest.approx(call.output.log_probs)
        assert (turn.weight_version_first, turn.weight_version_last) == (3, 3)
    assert (
        seen[1].prompt[: len(seen[0].prompt) + len(seen[0].output.token_ids)]
        == seen[0].prompt + seen[0].output.token_ids
    )
    assert seen[0].request_id == seen[1].request_id  # the same server, whose prefix cache is warm
    assert seen[0].params["logprobs"] is True
    assert seen[0].params["max_tokens"] == 12


def test_a_generation_across_an_update_of_the_weights_says_both_versions(place: Place) -> None:
    place.client.interrupt = True
    session, client = place.session()
    say(client, [{"role": "user", "content": "Count."}], stream=True)
    (turn,) = place.turns(session)
    assert (turn.weight_version_first, turn.weight_version_last) == (3, 4)
    assert list(turn.completion_ids) == place.client.seen[0].output.token_ids


def test_expert_routing_reaches_the_turn(place: Place) -> None:
    session, client = place.session()
    say(client, [{"role": "user", "content": "Hi."}])
    (turn,) = place.turns(session)
    rows = len(turn.prompt_ids) + len(turn.completion_ids) - 1
    wanted = np.arange(rows * LAYERS * TOP_K, dtype="<i4").tobytes()
    assert turn.routed_experts == wanted
    assert place.bridge.expert_shape == (LAYERS, TOP_K)


def test_a_failure_of_verls_client_is_an_error_for_the_agent_and_no_turn(place: Place) -> None:
    place.client.fail = True
    session, client = place.session()
    with pytest.raises(openai.APIStatusError):
        say(client, [{"role": "user", "content": "Hello?"}])
    assert place.turns(session) == []


def test_only_the_trainers_own_gateway_is_served(place: Place) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{place.bridge.url}/generate", data=b"{}", timeout=10)
    assert place.client.seen == []
