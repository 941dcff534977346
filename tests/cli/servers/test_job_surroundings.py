"""The surroundings of local jobs, and chats with sessions: real gateways before a scripted model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch")

from agentcore_rl_toolkit.cli.servers.job_surroundings import JobSurroundings
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.policy.training_service.interface import Completion
from agentcore_rl_toolkit.policy.training_service.sagemaker.service import running

from ...policy.training_service.scripted import ScriptedModel
from ...policy.training_service.test_sagemaker import Clients, refused


class Asked(ScriptedModel):
    """`paths_asked` are the weights of its samples, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.last_id = 500
        self.paths_asked: list[str | None] = []

    def sample(self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]) -> list[Completion]:
        self.paths_asked.append(path)
        return super().sample(path, prompt_ids, n, params)


async def test_jobs_at_the_same_time_sample_each_their_own_weights() -> None:
    model = Asked()
    around = JobSurroundings(model, WEIGHTS_DIR)
    await around.use("training", "w1")
    await around.use("evaluation", None)
    for place in ("training", "evaluation"):
        asked = {"messages": [{"role": "user", "content": "2+2"}], "stream": False}
        assert b"choices" in b"".join(
            [piece async for piece in around.chat(place, f"rollout-of-{place}-" + "x" * 33, asked)]
        )
        [example] = await around.sampled(place, f"rollout-of-{place}-" + "x" * 33)
        assert sum(example.inputs["weights"]) == sum(example.inputs["advantages"]) == model.tokens  # of the first turn
    await around.close()
    assert model.paths_asked == ["w1", None]


def test_a_session_chats_whole_and_streamed_by_the_package_that_a_request_names() -> None:
    model = Asked()
    arn = "arn:aws:sagemaker:us-west-2:123456789012:model-package/mine/{}"
    model.saved |= {arn.format(1): 1, arn.format(2): 2}
    body = json.dumps({"messages": [{"role": "user", "content": "2+2"}], "max_tokens": 16}).encode()
    with running(model, around=JobSurroundings(model, WEIGHTS_DIR)) as service:
        clients = Clients(service.url, service.secret)
        clients.create()
        named = {"trainingSessionName": clients.session, "body": body}
        whole = clients.runtime.sample_training_session(**named, modelPackageArn=arn.format(1))["body"].read()
        assert json.loads(whole)["choices"][0]["message"]["role"] == "assistant"
        streamed = clients.runtime.sample_training_session_with_response_stream(**named, modelPackageArn=arn.format(2))
        assert streamed["body"].read().endswith(b"data: [DONE]\n\n")
        assert model.paths_asked == [arn.format(1), arn.format(2)]
        with refused("ValidationException", "does not exist"):
            clients.runtime.sample_training_session(**named, modelPackageArn=arn.format(3))
