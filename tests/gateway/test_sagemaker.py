"""Sampling by SageMaker Training Sessions: real HTTP between boto3 and the local service, a scripted model behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from unittest import mock

import boto3
import openai
import pytest
from botocore.exceptions import ClientError

pytest.importorskip("torch")

from agentcore_rl_toolkit.backends.sagemaker.local.service import SageMakerApp, running
from agentcore_rl_toolkit.errors import TrainingServiceError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.engines import Piece
from agentcore_rl_toolkit.gateway.engines.sampling_service import Asked
from agentcore_rl_toolkit.gateway.sampling_services.sagemaker import (
    INVALID,
    RUNTIME,
    SESSIONS,
    Caller,
    SageMakerService,
    SessionRuntime,
)
from agentcore_rl_toolkit.gateway.sampling_services.samplers import cut
from agentcore_rl_toolkit.messages.render import Renderer

from ..backends.faulty_service import FaultyApp
from ..backends.scripted_model import ScriptedModel
from .asking import MODEL, captured, gpt, opened

ARN = "arn:aws:sagemaker:us-west-2:123456789012:model-package/run/{}"
HUB = "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/m"


class Recorded(ScriptedModel):
    """`asked` are the samples that it was asked for: path and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first_id, self.last_id = 300, 500
        self.asked: list[tuple[str | None, Mapping[str, Any]]] = []

    def sample(self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]) -> list[Any]:
        self.asked.append((path, params))
        return super().sample(path, prompt_ids, n, params)


@pytest.fixture
def model() -> Recorded:
    made = Recorded()
    made.replies.append({"token_ids": [300, 301]})
    made.saved |= {ARN.format(1): 1, ARN.format(2): 2}
    return made


@pytest.fixture
def service(model: Recorded, monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMakerApp]:
    with running(model, app=FaultyApp) as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        boto3.Session().client("sagemaker").create_training_session(
            TrainingSessionName="run",
            LoraConfig={"Rank": 8, "Alpha": 16},
            RoleArn="arn:aws:iam::123456789012:role/x",
            ModelConfig={"BaseModelArn": HUB},
            OutputConfig={"S3Location": {"Path": "s3://bucket/x"}},
        )
        yield service


@pytest.fixture
async def gateway(service: SageMakerApp) -> AsyncIterator[Gateway]:
    upstream = UpstreamConfig(url=f"{service.url}{SESSIONS}run", engine="sagemaker")
    made = Gateway(GatewayConfig(upstreams=(upstream,), model_dir=str(MODEL), sampler=ARN.format(1)))
    await made.start()
    yield made
    await made.stop(grace_s=0.2)


async def say(gateway: Gateway, **asked: Any) -> tuple[Any, list[Any]]:
    """The answer, and the turns that were recorded."""
    session = await opened(gateway)
    async with gpt(session) as llm:
        message = {"role": "user", "content": "What is 2 + 3?"}
        answer = await llm.chat.completions.create(**{"model": "m", "messages": [message], **asked})
    return answer, (await captured(gateway, session)).turns


async def test_what_goes_beyond_the_tokens_asked_for_is_cut_counted_and_not_recorded(
    model: Recorded, gateway: Gateway
) -> None:
    model.replies[0] = {"token_ids": list(range(300, 340))}
    answer, [turn] = await say(gateway, max_tokens=5, temperature=0.5, top_p=0.9, seed=3, extra_body={"top_k": 20})
    [(path, params)] = model.asked
    assert path == ARN.format(1)
    wanted = {"max_tokens": 512, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": params["seed"]}
    assert {name: params[name] for name in wanted} == wanted
    renderer = Renderer.from_path(MODEL)
    assert params["stop"] == [renderer.decode([token]) for token in sorted(renderer.stop_token_ids)]
    assert (turn.completion_ids, len(turn.logprobs)) == ([300, 301, 302, 303, 304], 5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert gateway.counters["tokens_cut"] == 35


async def test_an_answer_ends_at_the_models_stop_token_even_if_the_service_goes_on(
    model: Recorded, gateway: Gateway
) -> None:
    stop = min(Renderer.from_path(MODEL).stop_token_ids)
    model.replies[0] = {"token_ids": [300, 301, stop, 302, 303], "finish_reason": "length"}
    answer, [turn] = await say(gateway, max_tokens=600)
    assert (turn.completion_ids, answer.choices[0].finish_reason) == ([300, 301, stop], "stop")
    assert model.asked[0][1]["max_tokens"] == 600


async def test_new_weights_are_named_in_each_request(model: Recorded, gateway: Gateway) -> None:
    await GatewayClient(gateway.url).set_weight_version_async(4, sampler=ARN.format(2))
    _, [turn] = await say(gateway)
    assert [path for path, _ in model.asked] == [ARN.format(2)]
    assert (turn.weight_version_first, turn.weight_version_last) == (4, 4)


async def test_requests_are_sent_again_until_the_service_takes_them(
    service: SageMakerApp, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FaultyApp, "faults", {"throttle": 0.3, "error": 0.2}
    )  # a lost reply would have the sample done twice
    _, [turn] = await say(gateway)
    assert turn.completion_ids == [300, 301]


async def test_what_the_service_refuses_reaches_the_agent_and_a_session_that_ended_is_not_its_fault(
    gateway: Gateway,
) -> None:
    with pytest.raises(openai.BadRequestError):
        await say(gateway, temperature=3.0)
    boto3.Session().client("sagemaker").stop_training_session(TrainingSessionName="run")
    with pytest.raises(openai.InternalServerError) as caught:
        await say(gateway)
    assert "Stopped" not in caught.value.response.text


def failure(code: str, status: int = 400) -> ClientError:
    told: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(told, "poll")


async def test_a_call_with_expired_credentials_is_repeated_with_fresh_ones() -> None:
    client = mock.Mock()
    client.poll.side_effect = [failure("ExpiredTokenException"), "done"]
    caller = Caller(client)
    assert await caller.call("poll") == "done"
    caller.close()


async def test_a_call_is_repeated_while_the_service_throttles() -> None:
    client = mock.Mock()
    client.poll.side_effect = [failure("Other", 429), failure("SomeThrottling"), "done"]
    caller = Caller(client)
    assert await caller.call("poll") == "done"
    caller.close()


async def test_a_resource_whose_name_exists_is_not_made_and_no_failure() -> None:
    client = mock.Mock()
    client.make.side_effect = [failure("ResourceInUse"), {}, failure("Other")]
    caller = Caller(client)
    assert [await caller.create("make") for _ in range(2)] == [False, True]
    with pytest.raises(TrainingServiceError):
        await caller.create("make")
    caller.close()


async def test_an_operation_is_asked_for_until_it_ends() -> None:
    client = mock.Mock()
    client.execute_sampling_operation.return_value = {"operationId": "o"}
    ends = [{"status": "Pending"}, {"status": "InProgress"}, {"status": "Failed", "errorDetails": "why"}]
    client.get_sampling_operation_result.side_effect = ends
    runtime = SessionRuntime(client, "run", poll_s=0.0)
    with pytest.raises(TrainingServiceError, match="operation o ended as Failed: why") as caught:
        await runtime.sample({})
    assert caught.value.code == "Failed"
    runtime.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TrainingServiceError("no", code=INVALID), "invalid_request"),
        (TrainingServiceError("no", code="Failed"), "upstream"),
        (TrainingServiceError("the prompt is too long", code="Failed"), "context_overflow"),
        (TrainingServiceError("the prompt is too long", code="Skipped"), "upstream"),
        (TrainingServiceError("no", code="ThrottlingException"), "rate_limit"),
        (ValueError("the prompt is too long"), "upstream"),
    ],
)
def test_an_agent_learns_what_is_wrong_with_its_request_and_nothing_else(error: Exception, kind: str) -> None:
    assert SageMakerService.for_agent(mock.Mock(), error).kind == kind


@pytest.mark.parametrize(
    ("limits", "kept", "reason", "stopped_by"),
    [
        ({}, "abcdef", "x", None),
        ({"max_tokens": 5}, "abcde", "length", None),
        ({"stop_token_ids": [ord("d"), ord("b")]}, "ab", "stop", None),
        ({"stop": ["ef", "cd"]}, "abcd", "stop", "cd"),
        ({"stop": ["f"]}, "abcdef", "stop", "f"),
        ({"stop": ["a"]}, "a", "stop", "a"),
    ],
)
def test_a_choice_ends_with_the_token_that_completes_a_stop(
    limits: dict[str, Any], kept: str, reason: str, stopped_by: str | None
) -> None:
    piece = Piece(ids=[ord(c) for c in "abcdef"], logprobs=[-0.5] * 6, finish_reason="x")
    asked = Asked(**{"prompt": [], "n": 1, "max_tokens": 6, **limits})
    assert cut(piece, asked, lambda ids: "".join(map(chr, ids))) == 6 - len(kept)
    ended = Piece(ids=[ord(c) for c in kept], logprobs=[-0.5] * len(kept), finish_reason=reason)
    ended.stop_sequence = stopped_by
    assert piece == ended
    piece.logprobs = [-0.5]  # the turn is invalid, and stays invalid
    assert cut(piece, Asked(prompt=[], n=1, max_tokens=1), chr) == 0


def test_the_installed_botocore_knows_the_service() -> None:
    assert RUNTIME in boto3.Session().get_available_services()
