"""slime's custom generate function over replayed rollouts: what slime gets back, aborts, parameters."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends import chat
from agentcore_rl_toolkit.backends.service import RolloutService
from agentcore_rl_toolkit.backends.slime import generate as module
from agentcore_rl_toolkit.backends.slime import rollout
from agentcore_rl_toolkit.backends.slime.convert import NOTE, flat
from agentcore_rl_toolkit.backends.slime.runner import SlimeRunner
from agentcore_rl_toolkit.backends.slime.settings import ADMIN_KEY, SlimeSettings
from agentcore_rl_toolkit.errors import ConfigError

from ..recorded import Episode, Replay, recorded_episodes
from .stand_in import Sample, arguments

PARAMS = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64, "no_stop_trim": True, "stop": None}

FORKED = ("rewritten", "sub_agent", "side_calls", "compacted")


@pytest.fixture
def episodes() -> list[Episode]:
    return recorded_episodes()


@pytest.fixture
def replay(episodes: list[Episode]) -> Iterator[Replay]:
    made = Replay(episodes, by_input=False)
    module.use(RolloutService(SlimeSettings.from_args(arguments()), made.client, made.gateway))
    yield made
    module.use(None)


async def run(n: int, **more: Any) -> list[Any]:
    samples = [Sample(index=i, group_index=i // 8, prompt=f"p{i}", metadata={"answer": str(i)}) for i in range(n)]
    return [await module.generate(arguments(), s, dict(PARAMS), **more) for s in samples]


async def test_every_kind_of_episode_comes_back_as_slime_samples(replay: Replay, episodes: list[Episode]) -> None:
    for episode, made in zip(episodes[:24], await run(24), strict=True):
        samples = made if isinstance(made, list) else [made]
        assert (len(samples) > 1) == (episode.kind in FORKED)
        for sample in samples:
            assert sample.reward is not None  # slime would call its reward model otherwise
            assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
            assert sample.response_length <= len(sample.tokens)
            assert sample.rollout_id is not None
            assert sample.metadata["answer"]
        if episode.kind in ("truncated", "policy_failed"):
            assert samples[0].status is Sample.Status.TRUNCATED
        elif samples[0].remove_sample:
            assert samples[0].status is Sample.Status.FAILED
        else:
            assert samples[0].status is Sample.Status.COMPLETED
    assert not replay.open_sessions


async def test_an_abort_stops_the_session_and_leaves_the_sample_to_be_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replay([Episode(input_id="a", delay_s=math.inf)], by_input=False)
    module.use(RolloutService(SlimeSettings.from_args(arguments()), replay.client, replay.gateway))
    state = SimpleNamespace(aborted=False)
    slime = ModuleType("slime.rollout.sglang_rollout")
    slime.GenerateState = lambda args: state  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slime.rollout.sglang_rollout", slime)
    task = asyncio.create_task(module.generate(arguments(), Sample(index=0, prompt="p"), dict(PARAMS)))
    await asyncio.sleep(0.1)
    state.aborted = True
    sample = await asyncio.wait_for(task, 60)
    module.use(None)
    assert sample.status is Sample.Status.ABORTED
    assert sample.tokens == []
    assert len(replay.stopped) == 1
    assert not replay.open_sessions


async def test_a_judge_reads_the_whole_group_that_slime_asks_for_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A judge that nobody serves: every rollout of both groups is masked by it."""
    (tmp_path / "rubric.md").write_text("good")
    monkeypatch.setattr(chat, "TRIES", 1)
    named = {"judge": str(tmp_path / "rubric.md"), "judge_url": "http://127.0.0.1:9/v1", "judge_model": "m"}
    args = arguments(**named, n_samples_per_prompt=2)
    replay = Replay(recorded_episodes(4, per_group=2), by_input=False)
    module.use(RolloutService(SlimeSettings.from_args(args), replay.client, replay.gateway))
    samples = [Sample(index=i, group_index=i // 2, prompt="p") for i in range(4)]
    made = await asyncio.gather(*(module.generate(args, s, dict(PARAMS)) for s in samples))
    module.use(None)
    assert len(replay.invoked) == 4
    assert {sample.metadata[NOTE]["mask_reason"] for sample in made} == {"judge"}
    where = {n: getattr(args, n) for n in ("agent_runtime_arn", "s3_bucket", "exp_id", *named)}
    with pytest.raises(ConfigError, match="fully_async"):
        SlimeRunner(**where, model_dir="m", data_path="d", model_type="t", mode="fully_async")


async def test_a_step_of_single_rollouts_makes_few_calls_to_the_gateway(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        call = getattr(replay.gateway, name)

        async def counting(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            await asyncio.sleep(0.01)  # a call takes its time
            return await call(*args, **named)

        monkeypatch.setattr(replay.gateway, name, counting)

    for name in ("create_sessions_async", "fetch_async", "delete_async"):
        counted(name)
    samples = [Sample(index=i, group_index=i // 8, prompt=f"p{i}") for i in range(64)]
    made = await asyncio.gather(*(module.generate(arguments(), s, dict(PARAMS)) for s in samples))
    assert len({sample.session_id for sample in flat(made)}) == 64
    assert not replay.open_sessions
    assert calls["delete_async"] == 1
    assert calls["create_sessions_async"] <= 8
    assert calls["fetch_async"] <= 16


async def test_a_sample_above_max_tokens_masks_its_rollout(replay: Replay) -> None:
    args = arguments(max_tokens=1)
    made = await module.generate(args, Sample(index=0, group_index=0, prompt="p"), dict(PARAMS))
    assert made.remove_sample
    assert made.metadata[NOTE]["mask_reason"] == "too_long"


async def test_a_limit_of_the_age_is_left_to_the_end_of_the_step(episodes: list[Episode]) -> None:
    replay, args = Replay(episodes, by_input=False), arguments(max_staleness=1)
    module.use(RolloutService(SlimeSettings.from_args(args), replay.client, replay.gateway))
    made = await module.generate(args, Sample(index=0, group_index=0, prompt="p"), dict(PARAMS))
    module.use(None)
    assert not made.remove_sample


async def test_a_fork_answers_as_one_sample_where_slime_puts_groups_back(replay: Replay) -> None:
    fork = next(m for m in await run(8) if isinstance(m, list))
    assert fork.status is Sample.Status.COMPLETED
    assert fork.session_id == fork[0].session_id
    assert fork.response_length == sum(s.response_length for s in fork)
    fork.metadata["start_rollout_id"] = 3
    fork.loss_mask = [0] * fork.response_length  # how slime masks old tokens of a partial rollout
    assert [s.loss_mask for s in fork] == [[0] * s.response_length for s in fork]


async def test_a_rollout_whose_call_the_engine_aborted_is_not_trained(episodes: list[Episode]) -> None:
    whole = next(e for e in episodes if e.kind == "multi_turn")
    error = {"status": "partial", "http_status": 502, "type": "partial", "message": "ended", "started_s": 2.0**40}
    cut = replace(whole, turns=whole.turns[:-1], errors=(error,))
    for args, status in (
        (arguments(), Sample.Status.FAILED),
        (arguments(rollout_function_path="slime.rollout.fully_async_rollout.f"), Sample.Status.ABORTED),
    ):
        replay = Replay([cut], by_input=False)
        module.use(RolloutService(SlimeSettings.from_args(args), replay.client, replay.gateway))
        sample = await module.generate(args, Sample(index=0, prompt="p"), dict(PARAMS))
        module.use(None)
        assert sample.status is status
        assert not sample.tokens or sample.remove_sample


async def test_rollouts_that_are_too_old_when_a_step_is_handed_over_are_masked(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_newest", -1)
    samples = [s for m in await run(16) for s in flat(m)]
    live = [s for s in samples if not s.remove_sample]
    assert len({s.metadata[NOTE]["session_id"] for s in live}) < len(live)  # some forked
    fork = next(s for s in live if s.metadata[NOTE]["branches"] > 1)
    for s in live:
        s.weight_versions = ["7", "8"]
    fork.weight_versions = ["5"]
    live[-1].weight_versions = []
    rollout.mask_stale(samples, None)
    assert [s for s in samples if not s.remove_sample] == live
    rollout.mask_stale(samples, 1)
    old = {fork.metadata[NOTE]["session_id"]: "stale", live[-1].metadata[NOTE]["session_id"]: "unknown_version"}
    for s in live:
        reason = old.get(s.metadata[NOTE]["session_id"])
        assert s.remove_sample == (reason is not None)
        assert s.metadata[NOTE]["mask_reason"] == reason
        assert (sum(s.loss_mask) == 0) == (reason is not None)
        assert len(s.loss_mask) == s.response_length
    rollout.mask_stale([], 0)
    later = [s for s in live if not s.remove_sample][:1]
    later[0].weight_versions = ["7"]
    rollout.mask_stale(later, 0)  # version 8 was seen in an earlier step
    assert later[0].remove_sample


def test_the_gateways_key_comes_from_the_environment_of_slimes_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, "of the run's file")
    assert SlimeSettings.from_args(arguments()).gateway_admin_key == "of the run's file"


async def test_an_evaluation_with_pass_rates_keeps_whole_prompts_only(replay: Replay) -> None:
    samples = [s for m in await run(24) for s in flat(m)]
    args = arguments(log_passrate=True, n_samples_per_eval_prompt=4)
    data = {"set": {"rewards": [s.reward for s in samples], "truncated": [False] * len(samples), "samples": samples}}
    rollout._finished(SimpleNamespace(data=data, metrics=None), args, 0, 1.0)
    kept = data["set"]["samples"]
    assert 0 < len(kept) < 24
    assert len(kept) % 4 == 0
    assert not any(s.remove_sample for s in kept)
    assert len({s.index for s in kept}) == len(kept) == len(data["set"]["rewards"])
