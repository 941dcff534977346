"""The same 64 recorded episodes mean the same tokens, masks, logprobs and advantages to every trainer: one advantage a rollout,
and one a token (returns of turns with a discount, and a teacher).

What is expected is worked out here from the recorded turns and records, with none of the package's merging, masking or
statistics. Every backend's native form is read back the way that trainer reads it, into one neutral form per training sequence.
No trainer is installed here: slime's `Sample` is a recorded signature (slime 0.3.1, git 624b824), rLLM's merge is written down
from rLLM git 9beb6e0, verl's, Tinker's and SageMaker's forms are plain data (verl 0.9.1, Tinker SDK 0.38.0, botocore
1.44.8).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.credit import Credit
from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Group, summarize
from agentcore_rl_toolkit.backends.collection.samples import Sample, rollout_samples, to_samples
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.backends.sagemaker.adapter import datum as sagemaker_datum
from agentcore_rl_toolkit.backends.slime.convert import NOTE, to_slime
from agentcore_rl_toolkit.backends.slime.hooks import (
    keep_informative_group,
    normalize_rewards,
    take_token_advantages,
)
from agentcore_rl_toolkit.backends.slime.rollout import outcome_metrics
from agentcore_rl_toolkit.backends.training.batch import to_datum
from agentcore_rl_toolkit.backends.trl.convert import REWARD_KEY, to_trl
from agentcore_rl_toolkit.backends.verl.convert import to_verl
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.trajectory import Turn

from .recorded import (
    BAD_KINDS,
    EXPERT_LAYERS,
    EXPERT_TOP_K,
    GOOD_KINDS,
    Episode,
    Replay,
    recorded_episodes,
    requests_for,
)
from .slime.stand_in import Sample as SlimeSample
from .slime.stand_in import arguments

EPISODES = recorded_episodes()
SHAPE = (EXPERT_LAYERS, EXPERT_TOP_K)


RULES: Any = {
    "credit": "turn",
    "discount": 0.5,
    "normalize": "group",
    "teacher_url": "http://teacher",
    "reward_weight": 2.0,
}
TOKENS = Credit(**RULES)
EXPERTS = {"num_layers": EXPERT_LAYERS, "moe_router_topk": EXPERT_TOP_K}


@dataclass(frozen=True)
class Neutral:
    """One training sequence as a loss sees it. Logprobs and advantages only of trained tokens."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]


CASES = [("score", "task", "episode"), ("mask", "main", "episode"), ("score", "task", "tokens")]


@pytest.fixture(scope="module", params=CASES, ids=lambda param: "-".join(param))
def settings(request: pytest.FixtureRequest) -> Any:
    """What a run makes of rollouts whose policy failed, its rule of what trains, and what has an advantage of its own: every
    table below holds in all cases.
    """
    return request.param


@pytest.fixture(scope="module")
def credit(settings: tuple[str, str, str]) -> Credit:
    return Credit() if settings[2] == "episode" else TOKENS


@pytest.fixture(scope="module")
def policy_failures(settings: tuple[str, str, str]) -> str:
    return settings[0]


@pytest.fixture(scope="module")
def rule(settings: tuple[str, str, str]) -> str:
    return settings[1]


@pytest.fixture(scope="module")
def good_kinds(policy_failures: str) -> tuple[str, ...]:
    return GOOD_KINDS if policy_failures == "score" else tuple(k for k in GOOD_KINDS if k != "policy_failed")


@pytest.fixture(scope="module")
def groups(policy_failures: Any, rule: str, credit: Credit) -> list[Group]:
    episodes = [with_turn_rewards(e, rule) for e in EPISODES] if credit.per_token else EPISODES
    replay = Replay(episodes)
    config = CollectConfig(policy_failures=policy_failures, train=rule, credit=credit.credit)
    found = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway, config=config)
    return [dataclasses.replace(g, rollouts=[taught(r) for r in g.rollouts]) for g in found]


def with_turn_rewards(episode: Episode, rule: str) -> Episode:
    """The same with a reward for each call that trains; the last is the episode's."""
    if episode.kind not in GOOD_KINDS or episode.kind == "policy_failed":
        return episode
    turns = trained_turns(episode, rule)
    rewards = [(len(turn.completion_ids) % 3) / 4 for turn in turns[:-1]] + [reward_of(episode)]
    return dataclasses.replace(episode, record={**(episode.record or {}), "rewards": rewards})


def teacher_logprob(token: int) -> float:
    return -token / 200


def taught(rollout: CollectedRollout) -> CollectedRollout:
    """As a teacher leaves it."""
    gaps = {
        index: [
            0.0 if lp is None else teacher_logprob(token) - lp
            for token, lp in zip(s.token_ids[s.prompt_length :], s.logprobs[s.prompt_length :], strict=True)
        ]
        for index, s in enumerate(rollout.trajectory.sequences if rollout.trajectory else ())
    }
    return dataclasses.replace(rollout, teacher_gaps=gaps)


def trained_turns(episode: Episode, rule: str) -> list[Turn]:
    """The turns of the task; under "main", those of its first conversation that offers tools, or of the first."""
    roles = {role: [t for t in episode.turns if t.turn_id.startswith(role)] for role in ("main", "sub")}
    if rule == "main":
        roles = {"main": roles["main"]}
    return sorted((t for turns in roles.values() for t in turns), key=lambda t: t.index)


def branches(episode: Episode, rule: str) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """(tokens, mask, logprobs of the ones, places of their turns) of an episode: a prompt that continues a branch extends it, any
    other opens one.
    """
    made: list[tuple[list[int], list[int], list[float], list[int]]] = []
    for place, turn in enumerate(trained_turns(episode, rule)):
        prompt, sampled = list(turn.prompt_ids), list(turn.completion_ids)
        continued = [b for b in made if prompt[: len(b[0])] == b[0]]
        branch = max(continued, key=lambda b: len(b[0])) if continued else ([], [], [], [])
        if not continued:
            made.append(branch)
        tokens, mask, logprobs, places = branch
        mask += [0] * (len(prompt) - len(tokens)) + [1] * len(sampled)
        tokens += prompt[len(tokens) :] + sampled
        logprobs += [lp for lp in turn.logprobs if lp is not None]
        places += [place] * len(sampled)
    return made


def returns_of(episode: Episode, rule: str) -> list[float]:
    """The return of each turn: its reward, and half of the next turn's return."""
    turns = len(trained_turns(episode, rule))
    rewards = (with_turn_rewards(episode, rule).record or {})["rewards"]
    rewards = rewards if isinstance(rewards, list) else [0.0] * (turns - 1) + [reward_of(episode)]
    return [sum(r * 0.5**k for k, r in enumerate(rewards[turn:])) for turn in range(turns)]


def reward_of(episode: Episode) -> float:
    """The reward as the recorder wrote it down: a number, a list whose last counts, or a dict."""
    rewards = (episode.record or {})["rewards"]
    if isinstance(rewards, list):
        return float(rewards[-1])
    return float(rewards["reward"] if isinstance(rewards, dict) else rewards)


@pytest.fixture(scope="module")
def expected(groups: list[Group], good_kinds: tuple[str, ...], rule: str, credit: Credit) -> dict[str, list[Neutral]]:
    """By session: what should be trained, from the recorded episodes alone."""
    sessions = [r.session_id for g in groups for r in g.rollouts]
    found: dict[str, list[Neutral]] = {s: [] for s in sessions}
    for start in range(0, len(EPISODES), 8):
        good = [i for i in range(start, start + 8) if EPISODES[i].kind in good_kinds]
        rewards = {i: [reward_of(EPISODES[i])] * len(EPISODES[i].turns) for i in good}
        pool = [each[0] for each in rewards.values()]
        if credit.per_token:
            rewards = {i: returns_of(EPISODES[i], rule) for i in good}
            pool = [value for each in rewards.values() for value in each]
        mean, spread = statistics.fmean(pool), statistics.stdev(pool)
        for i in good:
            for tokens, mask, logprobs, places in branches(EPISODES[i], rule):
                advantages = [(rewards[i][place] - mean) / (spread + 1e-6) for place in places]
                if credit.per_token:
                    sampled = [token for token, m in zip(tokens, mask, strict=True) if m]
                    gaps = [teacher_logprob(token) - lp for token, lp in zip(sampled, logprobs, strict=True)]
                    advantages = [gap + 2.0 * A for gap, A in zip(gaps, advantages, strict=True)]
                found[sessions[i]].append(Neutral(tuple(tokens), tuple(mask), tuple(logprobs), tuple(advantages)))
    return found


def of_trained(advantages_R: list[float], mask_R: list[int]) -> tuple[float, ...]:
    """Those of trained tokens; the others have none."""
    assert not any(a for a, m in zip(advantages_R, mask_R, strict=True) if not m)
    return tuple(a for a, m in zip(advantages_R, mask_R, strict=True) if m)


def read_core(groups: list[Group], credit: Credit) -> dict[str, list[Neutral]]:
    found: dict[str, list[Neutral]] = {r.session_id: [] for g in groups for r in g.rollouts}
    for sample in to_samples(groups, credit=credit):
        mask = (0,) * len(sample.prompt_ids) + tuple(sample.response_mask)
        logprobs = tuple(lp for lp in sample.response_logprobs if lp is not None)
        found[sample.session_id].append(
            Neutral(tuple(sample.token_ids), mask, logprobs, of_trained(sample.advantages, sample.response_mask))
        )
    return found


def close(found: list[Neutral], wanted: list[Neutral], tolerance: float = 1e-6) -> None:
    def key(n: Neutral) -> tuple[Any, ...]:
        return n.tokens, n.mask

    assert sorted(map(key, found)) == sorted(map(key, wanted))
    for f, w in zip(sorted(found, key=key), sorted(wanted, key=key), strict=True):
        assert f.logprobs == w.logprobs
        assert f.advantages == pytest.approx(w.advantages, abs=tolerance)


def read_slime(groups: list[Group], credit: Credit) -> dict[str, list[Neutral]]:
    """As slime's RolloutManager does: flatten, post-process the rewards, clear the masks of removed samples."""
    found: dict[str, list[Neutral]] = {}
    flat: list[SlimeSample] = []
    args = arguments(**(RULES if credit.per_token else {}))
    for g, group in enumerate(groups):
        for i, rollout in enumerate(group.rollouts):
            base = SlimeSample(group_index=g, index=g * len(group.rollouts) + i)
            flat.extend(to_slime(rollout, base, args=args))
    raw, processed = normalize_rewards(args, flat)
    assert len(raw) == len(processed) == len(flat)
    data: dict[str, Any] = {"teacher_log_probs": [s.teacher_log_probs for s in flat]}
    if credit.per_token:
        take_token_advantages(args, data)
    tokens_of = data.get("advantages") or [[A] * s.response_length for A, s in zip(processed, flat, strict=True)]
    for sample, advantages_R in zip(flat, tokens_of, strict=True):
        assert sample.loss_mask is not None
        assert sample.rollout_log_probs is not None
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        mask = [0] * len(sample.loss_mask) if sample.remove_sample else sample.loss_mask
        found.setdefault(str(sample.session_id), [])
        if not any(mask):
            assert not any(advantages_R)
            continue
        logprobs = tuple(lp for lp, m in zip(sample.rollout_log_probs, mask, strict=True) if m)
        full = (0,) * (len(sample.tokens) - sample.response_length) + tuple(mask)
        advantages = tuple(a for a, m in zip(advantages_R, mask, strict=True) if m)
        found[str(sample.session_id)].append(Neutral(tuple(sample.tokens), full, logprobs, advantages))
    return found


def grpo_of_rows(scores: dict[int, float], epsilon: float = 1e-6) -> dict[int, float]:
    """verl's outcome GRPO (0.9.1): mean and sample standard deviation over sessions with rows; one alone keeps its score."""
    values = list(scores.values())
    mean = sum(values) / len(values) if len(values) > 1 else 0.0
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 1.0
    return {key: (value - mean) / (std + epsilon) for key, value in scores.items()}


def read_verl(groups: list[Group], credit: Credit) -> dict[str, list[Neutral]]:
    """As the V1 trainer does: advantage from the last row of every session, given to all its rows; of tokens, what the manager
    puts into a row's scores.
    """
    found: dict[str, list[Neutral]] = {}
    for group in groups:
        rows = {r.index: to_verl(r, expert_shape=SHAPE) for r in group.rollouts}
        advantages = grpo_of_rows({i: outputs[-1]["reward_score"] for i, outputs in rows.items() if outputs})
        known = {(s.session_id, s.sequence_index): s.advantages for s in to_samples([group], credit=credit)}
        for rollout in group.rollouts:
            found[rollout.session_id] = []
            for output in rows[rollout.index]:
                mask, logprobs = output["response_mask"], output["response_logprobs"]
                given = [advantages[rollout.index]] * len(mask)
                if credit.per_token:
                    given = known[rollout.session_id, output["extra_fields"]["agentcore_branch"]]
                assert len(mask) == len(logprobs) == len(output["response_ids"])
                found[rollout.session_id].append(
                    Neutral(
                        (*output["prompt_ids"], *output["response_ids"]),
                        (0,) * len(output["prompt_ids"]) + tuple(mask),
                        tuple(lp for lp, m in zip(logprobs, mask, strict=True) if m),
                        tuple(a for a, m in zip(given, mask, strict=True) if m),
                    )
                )
    return found


def shifted_back(first: int, *, target_tokens: Any, mask: Any, logprobs: Any, advantages: Any, **_: Any) -> Neutral:
    logprobs, advantages = of_trained(logprobs, mask), of_trained(advantages, mask)
    return Neutral((first, *target_tokens), (0, *mask), logprobs, advantages)


def read_primitives(groups: list[Group], credit: Credit) -> dict[str, list[Neutral]]:
    found: dict[str, list[Neutral]] = {r.session_id: [] for g in groups for r in g.rollouts}
    for sample in to_samples(groups, credit=credit):
        datum = to_datum(sample)
        assert datum is not None
        assert len({len(value) for value in dataclasses.asdict(datum).values()}) == 1
        assert datum.tokens[1:] == datum.target_tokens[:-1]
        found[sample.session_id].append(shifted_back(datum.tokens[0], **vars(datum)))
    return found


def read_sagemaker(groups: list[Group], credit: Credit) -> dict[str, list[Neutral]]:
    """The wire form of a training session: ``weights`` are the mask, and stand beside the advantages."""
    found: dict[str, list[Neutral]] = {r.session_id: [] for g in groups for r in g.rollouts}
    for sample in to_samples(groups, credit=credit):
        shifted = to_datum(sample)
        assert shifted is not None
        datum = sagemaker_datum(shifted)
        [chunk] = datum["modelInput"]["chunks"]
        inputs = {name: tensor["data"] for name, tensor in datum["lossFnInputs"].items()}
        assert all(t["shape"] == [len(chunk["tokens"])] == [len(t["data"])] for t in datum["lossFnInputs"].values())
        found[sample.session_id].append(shifted_back(chunk["tokens"][0], mask=inputs["weights"], **inputs))
    return found


READERS: dict[str, Callable[[list[Group], Credit], dict[str, list[Neutral]]]] = {
    "core": read_core,
    "slime": read_slime,
    "verl": read_verl,
    "primitives": read_primitives,
    "sagemaker": read_sagemaker,
}


@pytest.fixture(scope="module", params=sorted(READERS))
def read(request: pytest.FixtureRequest, groups: list[Group], credit: Credit) -> dict[str, list[Neutral]]:
    return READERS[request.param](groups, credit)


def test_a_backend_trains_what_was_recorded(
    groups: list[Group],
    expected: dict[str, list[Neutral]],
    read: dict[str, list[Neutral]],
    good_kinds: tuple[str, ...],
) -> None:
    for rollout, episode in zip((r for g in groups for r in g.rollouts), EPISODES, strict=True):
        close(read[rollout.session_id], expected[rollout.session_id])
        assert bool(expected[rollout.session_id]) == (episode.kind in good_kinds), episode.kind


def test_trl_trains_the_longest_branch_of_the_same(groups: list[Group], expected: dict[str, list[Neutral]]) -> None:
    output, _ = to_trl(groups, num_generations=8, filler_id=0)
    rollouts = [r for g in groups for r in g.rollouts]
    for i, rollout in enumerate(rollouts):
        wanted = expected[rollout.session_id]
        if not wanted:
            assert output[REWARD_KEY][i] is None
            continue
        best = max(wanted, key=lambda n: sum(n.mask))
        prompt, mask = output["prompt_ids"][i], output["env_mask"][i]
        assert tuple(prompt + output["completion_ids"][i]) == best.tokens
        assert (0,) * len(prompt) + tuple(mask) == best.mask
        assert tuple(lp for lp in output["logprobs"][i] if lp is not None) == best.logprobs


def test_every_sampled_token_of_a_good_episode_is_expected_exactly_once(
    expected: dict[str, list[Neutral]], good_kinds: tuple[str, ...], rule: str
) -> None:
    for episode, neutrals in zip(EPISODES, expected.values(), strict=True):
        sampled = sorted(t for turn in trained_turns(episode, rule) for t in turn.completion_ids)
        trained = sorted(t for n in neutrals for t, m in zip(n.tokens, n.mask, strict=True) if m)
        assert trained == (sampled if episode.kind in good_kinds else [])
        forks = {"compacted": 2}.get(episode.kind, 1)
        if episode.kind == "rewritten":
            forks = 3 if rule == "task" else len(branches(episode, rule))
        elif rule == "task" and episode.kind in ("sub_agent", "side_calls"):
            forks = 2
        assert len(neutrals) == (forks if episode.kind in good_kinds else 0)


def test_the_policys_failures_are_counted_apart_whatever_becomes_of_them(groups: list[Group]) -> None:
    kinds = [e.kind for e in EPISODES]
    stats = summarize(groups)
    policy = kinds.count("policy_failed") + kinds.count("policy_unscored")
    assert stats.causes["policy"] == stats.policy_failures["tokens"] == policy
    assert stats.causes["infrastructure"] == sum(map(kinds.count, ("infrastructure", "lost", "no_tokens")))
    assert stats.scored == 64 - stats.causes["infrastructure"] - kinds.count("no_reward")
    logged = outcome_metrics(s for group in groups for r in group.rollouts for s in to_slime(r, SlimeSample(index=0)))
    assert logged["cause/policy"] == logged["policy_failure/tokens"] == policy
    # slime sees rollouts, not groups: its means are over rollouts, those of `summarize` over inputs.
    scores = [(r.score, r.outcome) for group in groups for r in group.rollouts if r.score is not None]
    assert logged["reward_all"] == pytest.approx(statistics.fmean(score for score, _ in scores))
    assert logged["reward_ok"] == pytest.approx(statistics.fmean(score for score, how in scores if how is Outcome.OK))
    assert (logged["scored"], logged["rollouts"]) == (stats.scored, 64)


def test_every_kind_is_in_the_table() -> None:
    kinds = {e.kind for e in EPISODES}
    assert kinds == {*GOOD_KINDS, *BAD_KINDS}
    assert len(EPISODES) == 64


# -- expert routing ----------------------------------------------------------------------------------------------------


def moe(groups: list[Group]) -> list[tuple[CollectedRollout, Sample, list[int]]]:
    """Rollouts with routing, their sample, and the numbers of each row as the engine sent them with the turn that sampled the
    next token, or read it first.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    found = []
    for rollout, episode in zip(rollouts, EPISODES, strict=True):
        if episode.kind == "moe":
            data, row = b"", 4 * EXPERT_LAYERS * EXPERT_TOP_K
            for turn in episode.turns:
                assert turn.routed_experts is not None
                data += turn.routed_experts[len(data) : (len(turn.prompt_ids) + len(turn.completion_ids) - 1) * row]
            assert (
                data != turn.routed_experts
            )  # the weights moved in between: the last turn says other things of the first
            assert turn.weight_version_last != episode.turns[0].weight_version_last
            (sample,) = rollout_samples(rollout)
            found.append((rollout, sample, [n for (n,) in struct.iter_unpack("<i", data)]))
    assert found
    return found


def flat(nested: Any) -> list[int]:
    return [nested] if isinstance(nested, int) else [n for part in nested for n in flat(part)]


def test_expert_routing_reaches_every_backend_that_replays_it(groups: list[Group]) -> None:
    for rollout, sample, numbers in moe(groups):
        rows = len(sample.token_ids) - 1
        (slime,) = to_slime(rollout, SlimeSample(index=0), args=arguments(use_rollout_routing_replay=True, **EXPERTS))
        (verl,) = to_verl(rollout, expert_shape=SHAPE)
        assert flat(slime.rollout_routed_experts.tolist()) == numbers
        assert flat(verl["routed_experts"]) == numbers
        assert len(slime.rollout_routed_experts) == len(verl["routed_experts"]) == rows


# -- slime's own rules -------------------------------------------------------------------------------------------------


def test_siblings_of_a_forked_episode_share_their_rollout_id(groups: list[Group]) -> None:
    for index, rollout in enumerate(r for g in groups for r in g.rollouts):
        made = to_slime(rollout, SlimeSample(index=index, group_index=0))
        assert {s.rollout_id for s in made} == {index}
        assert len({id(s.metadata) for s in made}) == len(made)


def test_a_masked_rollout_becomes_a_removed_sample_with_its_reason(groups: list[Group]) -> None:
    masked = [r for g in groups for r in g.rollouts if not r.usable]
    for rollout in masked:
        (made,) = to_slime(rollout, SlimeSample(index=1, metadata={"mine": 1}))
        assert made.remove_sample
        assert made.loss_mask == [0]
        assert made.status is SlimeSample.Status.FAILED
        assert made.metadata["mine"] == 1
        assert made.metadata[NOTE]["outcome"] == rollout.outcome.value


def test_a_group_of_equal_usable_rewards_is_dropped_by_the_filter(groups: list[Group]) -> None:
    good = next(r for g in groups for r in g.rollouts if r.usable and r.reward == 1.0)
    bad = next(r for g in groups for r in g.rollouts if not r.usable)
    same = [to_slime(good, SlimeSample(index=i, group_index=0)) for i in range(3)]
    same.append(to_slime(bad, SlimeSample(index=3, group_index=0)))
    assert not keep_informative_group(arguments(), same)
    other = next(r for g in groups for r in g.rollouts if r.usable and r.reward == 0.0)
    same.append(to_slime(other, SlimeSample(index=4, group_index=0)))
    assert keep_informative_group(arguments(), same)


@pytest.mark.parametrize("normalized", [True, False])
def test_the_logged_mean_reward_is_that_of_the_usable_rollouts(groups: list[Group], normalized: bool) -> None:
    flat_samples = [
        s
        for g, group in enumerate(groups)
        for i, r in enumerate(group.rollouts)
        for s in to_slime(r, SlimeSample(index=g * 8 + i, group_index=g))
    ]
    raw, _ = normalize_rewards(arguments(rewards_normalization=normalized), flat_samples)
    usable = [r for group in groups for r in group.rewards if r is not None]
    assert len(usable) < 64 < len(raw), "some rollouts are masked, and some have several samples"
    assert statistics.fmean(raw) == pytest.approx(statistics.fmean(usable)), "slime logs the mean over samples"
    rows, _ = to_trl(groups, num_generations=8, filler_id=0)
    assert statistics.fmean(r for r in rows[REWARD_KEY] if r is not None) == pytest.approx(statistics.fmean(usable))
    assert summarize(groups).reward_mean == pytest.approx(statistics.fmean(usable))


# -- verl's limits -----------------------------------------------------------------------------------------------------


def test_a_rollout_over_verls_limits_is_masked_whole(groups: list[Group]) -> None:
    """Training the short branch of a forked rollout alone would give it the reward that the long one earned."""
    kept, dropped = set(), set()
    for rollout in (r for g in groups for r in g.rollouts if r.usable):
        limits = {"prompt_length": 14, "response_length": 20}
        everything, outputs = to_verl(rollout), to_verl(rollout, **limits)
        fits = all(len(o["prompt_ids"]) <= 14 and len(o["response_ids"]) <= 20 for o in everything)
        assert outputs == (everything if fits else [])
        (kept if fits else dropped).add(len(everything) > 1)
    assert kept
    assert True in dropped  # a forked one


# -- groups with little in them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("usable", [0, 1])
def test_a_group_without_two_usable_rollouts_moves_nothing(groups: list[Group], usable: int) -> None:
    good = [e for e in EPISODES[:8] if e.kind in GOOD_KINDS]
    bad = [e for e in EPISODES if e.kind in BAD_KINDS]
    episodes = [dataclasses.replace(e, input_id="few") for e in [*good[:usable], *bad[: 8 - usable]]]
    replay = Replay(episodes)
    made = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway)
    assert [len(g.usable) for g in made] == [usable]
    for name, read in READERS.items():
        if name == "verl":  # its manager hands such a group over as failed
            continue
        found = read(made, Credit())
        trained = [n for neutrals in found.values() for n in neutrals]
        assert not any(any(n.advantages) for n in trained), name
        assert len(found) == 8 or name == "slime"


def test_weight_versions_become_verls_global_steps(groups: list[Group]) -> None:
    rollouts = [r for g in groups for r in g.rollouts]
    mixed = [r for r, e in zip(rollouts, EPISODES, strict=True) if e.kind == "mixed_versions"]
    for rollout in mixed:
        (output,) = to_verl(rollout)
        steps = output["extra_fields"]
        assert (steps["min_global_steps"], steps["max_global_steps"]) == (3, 4)
