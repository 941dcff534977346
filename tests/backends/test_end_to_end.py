"""The real math agent on the local runtime, through the gateway, with the built-in policy, into every backend's form.

What arrives is checked against the policy itself: recomputing the logprobs of the received tokens with the shipped weights must
give the recorded ones. One rollout of the group fails on purpose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends.collection.collect import collect, collect_async
from agentcore_rl_toolkit.backends.collection.groups import Group, GroupRequest
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.backends.trl.convert import REWARD_KEY, to_trl
from agentcore_rl_toolkit.backends.verl.convert import to_verl
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.errors import RolloutLostError
from agentcore_rl_toolkit.gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from agentcore_rl_toolkit.gateway.config import Limits
from agentcore_rl_toolkit.policy.word_problems import problems
from scripted_engine import ScriptedEngine
from serving import serving

from .math_agent import math_agent

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]
ROLLOUTS = 6


@dataclass(frozen=True)
class Place:
    client: RolloutClient
    gateway: GatewayClient
    gateway_url: str
    folder: Path
    arn: str
    runtime_url: str

    @property
    def records(self) -> str:
        return f"file://{self.folder / 'records'}"

    def payload(self, marker: str) -> dict[str, str]:
        (problem,) = problems("train", 1, seed=3)
        return {
            "prompt": problem.prompt,
            "answer": problem.answer,
            "fail_marker": str(self.folder / "marks" / f"{marker}.failed"),
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("e2e")
    (folder / "marks").mkdir()
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            environment.setenv(name, "local")
        policy = stack.enter_context(serving(folder, "policy", "serve"))
        upstream = ("--upstream", policy["url"], "--engine", "policy", "--store", str(folder / "turns"))
        gateway = stack.enter_context(serving(folder, "gateway", "serve", *upstream))
        served = (
            "--agent",
            math_agent(folder),
            "--store",
            str(folder / "records"),
            "--writable",
            str(folder / "marks"),
        )
        runtime = stack.enter_context(serving(folder, "runtime", "serve", *served))
        client = stack.enter_context(
            RolloutClient(
                runtime["agents"]["math"],
                f"file://{folder / 'records'}",
                "e2e",
                tps_limit=200,
                model_id="policy",
                endpoint_url=runtime["url"],
            )
        )
        made = stack.enter_context(GatewayClient(gateway["url"]))
        yield Place(client, made, gateway["url"], folder, runtime["agents"]["math"], runtime["url"])


@pytest.fixture(scope="module")
def group(place: Place) -> Group:
    request = GroupRequest(input_id="one", payload=place.payload("first"), n=ROLLOUTS)
    config = CollectConfig(rollout_timeout_s=90)
    (found,) = collect([request], client=place.client, gateway=place.gateway, config=config)
    return found


def test_the_injected_failure_is_masked_and_the_group_does_not_see_it(group: Group) -> None:
    outcomes = [r.outcome for r in group.rollouts]
    assert sorted(outcomes) == sorted([Outcome.AGENT_ERROR] + [Outcome.OK] * (ROLLOUTS - 1))
    failed = group.rollouts[outcomes.index(Outcome.AGENT_ERROR)]
    assert failed.traceback is not None
    assert "injected failure" in failed.traceback
    assert failed.trajectory is not None
    assert failed.trajectory.report.sampled_tokens > 0  # there was something to train on
    samples = to_samples([group], estimator="dr_grpo")
    assert {s.session_id for s in samples} == {r.session_id for r in group.rollouts if r.usable}
    assert sum(s.advantage for s in samples if s.sequence_index == 0) == pytest.approx(0.0, abs=1e-9)


def test_what_was_received_is_what_the_policy_sampled(group: Group) -> None:
    import torch

    from agentcore_rl_toolkit.policy import load_policy

    model, _ = load_policy()
    checked = 0
    for sample in to_samples([group]):
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
        start = len(sample.prompt_ids)
        for t, (mask, recorded) in enumerate(zip(sample.response_mask, sample.response_logprobs, strict=True)):
            if mask:
                assert recorded is not None
                assert float(logprobs_TV[start + t - 1, sample.response_ids[t]]) == pytest.approx(recorded, abs=1e-3)
                checked += 1
    assert checked == sum(r.trajectory.report.sampled_tokens for r in group.usable if r.trajectory is not None)


async def test_an_engine_that_stays_away_is_never_the_agents_failure(place: Place, group: Group) -> None:
    payload = place.payload("first")  # whose failure is behind it
    async with ScriptedEngine() as engine:
        gateway = Gateway(GatewayConfig(upstreams=(UpstreamConfig(url=engine.url),), limits=Limits(outage_s=0.2)))
        await gateway.start()
        await engine.stop()  # and is away for longer than calls wait
        try:
            (found,) = await collect_async(
                [GroupRequest(input_id="outage", payload=payload, n=2)],
                client=place.client,
                gateway=GatewayClient(gateway.url),
                config=CollectConfig(rollout_timeout_s=90),
            )
        finally:
            await gateway.stop(grace_s=0.2)
    for rollout in found.rollouts:
        assert (rollout.outcome, rollout.cause, rollout.mask_reason) == (Outcome.LOST, Cause.INFRASTRUCTURE, "outcome")
        assert isinstance(rollout.error, RolloutLostError)
        assert "all engines have been down" in (rollout.traceback or "")
        assert rollout.score is None
        assert to_verl(rollout) == []
    assert to_trl([found], num_generations=2, filler_id=0)[0][REWARD_KEY] == [None, None]
