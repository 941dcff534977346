"""The surroundings of local jobs: real gateways before a scripted model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch")

from agentcore_rl_toolkit.cli.servers.job_surroundings import JobSurroundings
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.policy.training_service.interface import Completion

from ...policy.training_service.scripted import ScriptedModel


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
        [example] = await around.sampled(place, f"rollout-of-{place}-" + "x" * 33, 1.0)
        assert sum(example.inputs["weights"]) == sum(example.inputs["advantages"]) == model.tokens  # of the first turn
    await around.close()
    assert model.paths_asked == ["w1", None]
