"""The advantages of tokens: of episodes, of turns, of a teacher; and what is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.credit import Credit, CreditReport, Signal, token_advantages
from agentcore_rl_toolkit.backends.collection.groups import Group, UsableSteps
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.backends.rllm.settings import RllmConfig
from agentcore_rl_toolkit.backends.sagemaker.job import JobConfig
from agentcore_rl_toolkit.backends.slime.runner import SlimeRunner
from agentcore_rl_toolkit.backends.tinker.settings import TinkerConfig
from agentcore_rl_toolkit.backends.trl.settings import TrlConfig
from agentcore_rl_toolkit.backends.verl.settings import translate
from agentcore_rl_toolkit.contract import Cause, Outcome
from agentcore_rl_toolkit.errors import ConfigError, RolloutError

from ..recorded import Episode, Replay, recorded_episodes, requests_for

AGENT = {"agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math", "s3_bucket": "b"}
TALKS = [e for e in recorded_episodes(64) if e.kind == "multi_turn"]


def signal(rollout: str, *returns: float, reward: float) -> Signal:
    """A rollout of turns of two tokens each, with one token of a tool behind each."""
    turns = [(k, 3 * k, 3 * k + 2, value) for k, value in enumerate(returns)]
    return Signal(rollout=rollout, reward=reward, mask=[1, 1, 0] * len(returns), turns=turns)


def test_returns_are_compared_over_the_whole_group_or_at_each_position() -> None:
    signals = [signal("a", 4.0, 1.0, reward=1.0), signal("b", 2.0, reward=0.0)]
    over_group = token_advantages(signals, Credit(credit="turn", normalize="group"), estimator="dr_grpo")
    mean = 7 / 3
    assert over_group[0] == pytest.approx([4 - mean, 4 - mean, 0, 1 - mean, 1 - mean, 0])
    assert over_group[1] == pytest.approx([2 - mean, 2 - mean, 0])
    by_turn = token_advantages(signals, Credit(credit="turn"), estimator="dr_grpo")
    assert by_turn == [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [-1.0, -1.0, 0.0]]
    whole = [dataclasses.replace(s, turns=()) for s in signals]
    assert token_advantages(whole, Credit(), estimator="dr_grpo")[1] == [-0.5, -0.5, 0.0]


def test_turns_that_disagree_with_their_episode_are_counted_and_a_run_is_warned_when_many_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = CreditReport()
    # The second rollout fails, and its turns are rewarded better than those of the first, which succeeds.
    signals = [signal("a", 0.0, 0.0, reward=1.0), signal("b", 1.0, 0.0, reward=0.0)]
    token_advantages(signals, Credit(credit="turn"), report=report)
    with caplog.at_level(logging.WARNING):
        assert report.numbers() == {"turns_against_episode": 0.5}
    assert "50 % of the turns have an advantage with another sign than their rollout" in caplog.text
    assert CreditReport().numbers() == {}, "a share of nothing is absent"


def test_a_teachers_part_stands_alone_or_beside_the_rewards() -> None:
    gaps = {"a": [0.5, -1.0, 0.0], "b": [0.25, 0.25, 0.0]}
    signals = [Signal(rollout=r, reward=float(r == "a"), mask=[1, 1, 0], gaps=g) for r, g in gaps.items()]
    report = CreditReport()
    assert token_advantages(signals, Credit(teacher_url="http://t"), report=report) == list(gaps.values())
    assert report.numbers() == {"kl_teacher": 0.0}
    both = token_advantages(signals, Credit(teacher_url="http://t", reward_weight=2.0), estimator="dr_grpo")
    assert both == [[1.5, 0.0, 0.0], [-0.75, -0.75, 0.0]]
    with pytest.raises(ConfigError, match="without the teacher http://t"):
        token_advantages([signal("a", 1.0, reward=1.0)], Credit(teacher_url="http://t"))


def collected(episodes: list[Episode], **settings: object) -> Group:
    replay = Replay(episodes)
    config = CollectConfig(credit="turn", **settings)  # type: ignore[arg-type]
    (group,) = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway, config=config)
    return group


def talk(rewards: object) -> Episode:
    return Episode(input_id="case", turns=TALKS[0].turns, record={"rewards": rewards, "status_code": 200})


def test_an_agent_that_gives_one_reward_is_told_what_credit_by_turns_needs() -> None:
    calls = len(TALKS[0].turns)
    assert calls > 1
    group = collected([talk(1.0), talk(0.0)])
    assert {(r.outcome, r.cause, r.mask_reason) for r in group.rollouts} == {
        (Outcome.INVALID, Cause.AGENT, "no_reward")
    }
    with pytest.raises(RolloutError, match=rf"one reward and {calls} of the session's model calls .*credit `episode`"):
        UsableSteps().check([group])
    short = collected([talk([0.5] * (calls + 1)), talk([0.0] * calls)])
    assert [r.usable for r in short.rollouts] == [False, True], "a list that does not fit masks its rollout alone"
    assert f"a list of {calls + 1} rewards" in str(short.rollouts[0].error)


def test_rewards_name_their_calls_by_the_ids_of_the_replies() -> None:
    turns = [dataclasses.replace(t, reply_id=f"chatcmpl-{t.index}-x") for t in TALKS[0].turns]

    def episode(named: object) -> Episode:
        record = {"rewards": 1.0, "turn_rewards": named, "status_code": 200}
        return Episode(input_id="case", turns=turns, record=record)

    last = f"msg_{turns[-1].index}-x"  # as the same reply is called in Anthropic's API
    group = collected([episode({last: 1.0}), episode({last: 0.0}), episode({"chatcmpl-none": 1.0})])
    assert [r.usable for r in group.rollouts] == [True, True, False]
    assert "1 model calls that the session did not make, such as 'none'" in str(group.rollouts[2].error)
    good, bad = to_samples([group], estimator="dr_grpo", credit=Credit(credit="turn"))
    rewarded = [A for A, m in zip(good.advantages, good.response_mask, strict=True) if m]
    n = len(turns[-1].completion_ids)
    assert rewarded[-n:] == [0.5] * n
    assert not any(rewarded[:-n]), "calls without a reward of their own are compared with nothing"
    assert bad.advantages == [-A if A else 0.0 for A in good.advantages]
    first = f"resp_{turns[0].index}-x"
    different = collected([episode({first: 1.0}), episode({last: 0.0})])
    samples = to_samples([different], estimator="dr_grpo", credit=Credit(credit="turn"))
    assert [any(s.advantages) for s in samples] == [False, False], "the first call is not compared with the last"


def test_a_list_of_rewards_never_counts_calls_that_do_not_train() -> None:
    turns = TALKS[0].turns
    title = dataclasses.replace(
        turns[0], turn_id="title", index=-1, prompt_ids=[9], completion_ids=[8], logprobs=[-1.0]
    )
    title = dataclasses.replace(title, tag="title", token_weight_versions=None, parent_turn=None)
    turns = [title, *turns]
    record = {"rewards": [0.5] * (len(turns) - 1), "status_code": 200}
    fits = Episode(input_id="case", turns=turns, record=record)
    every = dataclasses.replace(fits, record={"rewards": [0.5] * len(turns), "status_code": 200})
    group = collected([fits, every])
    assert [r.usable for r in group.rollouts] == [True, False], group.rollouts[0].error
    assert "next to `rewards`" in str(group.rollouts[1].error)


def test_a_discount_carries_a_late_reward_back_to_early_turns() -> None:
    calls = len(TALKS[0].turns)
    group = collected([talk([0.0] * (calls - 1) + [1.0]), talk([0.0] * calls)], discount=0.5)
    credit = Credit(credit="turn", discount=0.5)
    good, bad = to_samples([group], estimator="dr_grpo", credit=credit)
    firsts = [s for s, m in zip(good.advantages, [0, *good.response_mask], strict=False) if m == 0 and s]
    assert firsts == pytest.approx([0.5 * 0.5**k for k in range(calls - 1, -1, -1)])
    assert bad.advantages == [-a for a in good.advantages]


def test_the_reward_of_a_policys_failure_is_that_of_its_last_turn() -> None:
    calls = len(TALKS[0].turns)
    failed = {"status_code": 500, "stop_reason": "no", "rewards": -1.0, "_agent": {"cause": "policy"}}
    group = collected([dataclasses.replace(talk(0.0), record=failed), talk([0.0] * calls)])
    bad, good = to_samples([group], estimator="dr_grpo", credit=Credit(credit="turn", discount=0.5))
    firsts = [s for s, m in zip(bad.advantages, [0, *bad.response_mask], strict=False) if m == 0 and s]
    assert firsts == pytest.approx([-0.5 * 0.5**k for k in range(calls - 1, -1, -1)])
    assert good.advantages == [-a for a in bad.advantages]


def test_evaluations_ask_for_no_rewards_of_turns_and_no_teacher() -> None:
    config = CollectConfig(credit="turn", teacher_url="http://t", evaluation=True)
    assert not config.signals.per_token


SLIME = {**AGENT, "exp_id": "x", "model_dir": "m", "data_path": "d", "model_type": "qwen3-4B"}
TRL = {**AGENT, "exp_id": "x", "model": "m", "gateway_url": "http://g", "policy_url": "http://p"}
VERL = [f"agentcore.{k}={v}" for k, v in {**AGENT, "teacher_url": "http://t"}.items()]
TEMPERATURE = "actor_rollout_ref.rollout.temperature"


@pytest.mark.parametrize(
    ("start", "setting"),
    [
        (lambda t: CollectConfig(teacher_url="http://t", sampling_params={"temperature": t}), "sampling_params"),
        (lambda t: translate([*VERL, f"{TEMPERATURE}={t}"], {}), TEMPERATURE),
        (lambda t: SlimeRunner(**SLIME, teacher_url="http://t", rollout_temperature=t), "temperature"),
        (lambda t: TrlConfig(**TRL, teacher_url="http://t", training={"temperature": t}), "training.temperature"),
    ],
)
def test_a_teacher_is_for_temperature_1(start: Callable[[float], object], setting: str) -> None:
    start(1.0)
    for other in (0.1, 10.0):
        with pytest.raises(ConfigError, match=rf"teacher's logprobs .* temperature 1: leave {setting}"):
            start(other)


@pytest.mark.parametrize(("weight", "needed"), [(0.0, False), (0.5, True)])
def test_training_services_need_rewards_only_where_they_count(weight: float, needed: bool) -> None:
    folders = {"model_dir": Path("m"), "data_path": Path("d")}
    config = TinkerConfig(**AGENT, **folders, exp_id="x", base_model="m", teacher_url="http://t", reward_weight=weight)  # type: ignore[arg-type]
    assert config.collect_config().require_reward is needed


def test_a_trainer_that_computes_its_own_advantages_refuses_by_name(tmp_path: Path) -> None:
    given = {"credit": "turn", "teacher_url": "http://t"}
    (tmp_path / "run.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=r"rLLM cannot take credit, teacher_url: .*advantages"):
        RllmConfig.from_file(tmp_path / "run.json")
    with pytest.raises(ConfigError, match=r"a multi-turn RL job cannot take credit, teacher_url: .*advantages"):
        JobConfig.from_values(given, where="run.json")


def test_trainers_are_set_to_take_the_advantages_of_tokens() -> None:
    with pytest.raises(ConfigError, match="use_liger_kernel"):
        TrlConfig(
            **AGENT, exp_id="x", model="m", gateway_url="http://g", policy_url="http://p", credit="turn",
            training={"use_liger_kernel": True},
        )  # fmt: skip
    words = [f"agentcore.{k}={v}" for k, v in {**AGENT, "credit": "turn"}.items()]
    assert "algorithm.adv_estimator=agentcore" in translate(words, {})[1]
    assert "algorithm.adv_estimator=grpo" in translate(words[:2], {})[1]
    with pytest.raises(ConfigError, match="one advantage"):
        translate([*words, "algorithm.adv_estimator=gae"], {})
    runner = SlimeRunner(**AGENT, exp_id="x", model_dir="m", data_path="d", model_type="qwen3-4B", credit="turn")
    assert "take_token_advantages" in " ".join(map(str, runner.flags(1)))
