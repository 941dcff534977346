"""The maths of `examples/grpo_loop/train.py`, checked against hand-computed numbers and autograd."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Group, GroupRequest
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import CaptureError, ConfigError
from agentcore_rl_toolkit.policy import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory

from .loading import EXAMPLES, load


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    return load(EXAMPLES / "grpo_loop" / "train.py")


def turn(index: int, prompt: list[int], completion: list[int], logprob: float = -1.0) -> Turn:
    return Turn(
        turn_id=f"t{index}",
        index=index,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[logprob] * len(completion),
        finish_reason="stop",
        weight_version_first=0,
        weight_version_last=0,
    )


def test_batch_holds_the_sampled_ids_and_masks_everything_else(loop: ModuleType) -> None:
    trajectory = build_trajectory("s", [turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3, 4, 5], [6], logprob=-0.5)])
    (sequence,) = trajectory.sequences
    short = build_trajectory("s2", [turn(0, [1], [2])]).sequences[0]
    batch = loop.build_batch([(sequence, [2.0, 2.0, 0.0, 1.0]), (short, [-1.0])], pad_id=9)
    assert batch.token_ids_BT.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 9, 9, 9, 9]]
    assert batch.mask_BT.tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]]
    assert batch.sampled_logprobs_BT.tolist() == [[0, 0, -1, -1, 0, -0.5], [0, -1, 0, 0, 0, 0]]
    assert batch.advantages_BT.tolist() == [[0, 0, 2, 2, 0, 1], [0, -1, 0, 0, 0, 0]]


def make_batch(loop: ModuleType, sampled: list[float], advantage: float):  # type: ignore[no-untyped-def]
    t = len(sampled) + 1
    return loop.Batch(
        token_ids_BT=torch.zeros(1, t, dtype=torch.long),
        mask_BT=torch.tensor([[0.0] + [1.0] * len(sampled)]),
        sampled_logprobs_BT=torch.tensor([[0.0, *sampled]]),
        advantages_BT=torch.tensor([[0.0] + [advantage] * len(sampled)]),
        fresh_BT=torch.ones(1, t),
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected_ratio", "has_gradient"),
    [
        (1.0, 1.5, 1.28, False),  # better and already much likelier: clipped above
        (1.0, 0.5, 0.5, True),  # better but less likely: pulled up without limit
        (-1.0, 0.5, 0.8, False),  # worse and already much less likely: clipped below
        (-1.0, 1.5, 1.5, True),  # worse but likelier: pushed down without limit
    ],
)
def test_clipping_is_one_sided(
    loop: ModuleType, advantage: float, ratio: float, expected_ratio: float, has_gradient: bool
) -> None:
    batch = make_batch(loop, [-1.0], advantage)
    logprobs = torch.tensor([[-1.0 + math.log(ratio)]], requires_grad=True)
    loss, facts = loop.grpo_loss(logprobs, batch, 1.0, loop.Config(clip_low=0.2, clip_high=0.28))
    loss.backward()
    assert loss.item() == pytest.approx(-expected_ratio * advantage, rel=1e-5)
    assert logprobs.grad is not None
    assert bool(logprobs.grad.abs().sum() > 0) is has_gradient
    assert facts["clipped"] == (not has_gradient), "counted where the clipped term is the smaller one"


class Bigram(torch.nn.Module):
    """Predicts the next token from the last one alone: the smallest causal language model."""

    config = SimpleNamespace()

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    @property
    def table(self) -> torch.Tensor:
        return self.head.weight.T

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(torch.nn.functional.one_hot(input_ids, 8).float()))


def rollout(reward: float | None, completion: list[int], outcome: Outcome = Outcome.OK) -> CollectedRollout:
    return CollectedRollout(
        session_id=f"s{completion}",
        input_id="i",
        index=0,
        outcome=outcome,
        reward=reward,
        record={},
        trajectory=build_trajectory("s", [turn(0, [1], completion, logprob=math.log(1 / 8))]),
        mask_reason=None if outcome is Outcome.OK else "outcome",
    )


def group(*rollouts: CollectedRollout) -> Group:
    return Group(input_id="i", rollouts=list(rollouts), request=GroupRequest(input_id="i", payload={}, n=len(rollouts)))


def test_training_makes_the_rewarded_token_likelier_and_ignores_failed_rollouts(loop: ModuleType) -> None:
    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rollouts = group(rollout(1.0, [2]), rollout(0.0, [3]), rollout(0.0, [4], outcome=Outcome.LOST))
    metrics = loop.train_on([rollouts], model, optimizer, 0, loop.Config(minibatches=1), random.Random(0))
    after = torch.softmax(model.table[1], -1).tolist()
    assert after[2] > 1 / 8 > after[3]
    assert after[4] == pytest.approx(after[5]), "a lost rollout must leave its token as unlikely as one never sampled"
    assert metrics["sampled_tokens"] == metrics["trained_tokens"] == 2
    assert metrics["logprob_gap"] < 1e-6


def test_training_refuses_tokens_that_another_model_sampled(loop: ModuleType) -> None:
    model = Bigram()
    with torch.no_grad():
        model.head.weight[2, 1] = 0.01  # the weights are no longer those that gave log(1/8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.table.clone()
    with pytest.raises(CaptureError, match="another model"):
        loop.train_on(
            [group(rollout(1.0, [2]), rollout(0.0, [3]))], model, optimizer, 0, loop.Config(), random.Random(0)
        )
    assert torch.equal(model.table, before)


def test_tokens_of_older_weights_are_trained_and_say_nothing_about_the_agreement(loop: ModuleType) -> None:
    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.head.weight[2, 1] = 0.1  # version 1; the rollouts were sampled from version 0
    old = [group(rollout(1.0, [2]), rollout(0.0, [3]))]
    metrics = loop.train_on(old, model, optimizer, 0, loop.Config(minibatches=1), random.Random(0), version=1)
    assert metrics["logprob_gap"] is None
    assert model.table[1, 2] > 0.1 > 0 > model.table[1, 3]
    assert metrics["kl_sampler"] > 0


def test_the_numbers_of_a_step_are_those_of_all_its_minibatches(loop: ModuleType) -> None:
    """With a learning rate of 0 nothing changes between them."""
    groups = [group(*(rollout(float(token == 2), [token] * 3) for token in (2, 3, 4, 5)))]
    found = []
    for minibatches in (1, 4):
        model = Bigram()
        with torch.no_grad():
            model.head.weight[2, 1], model.head.weight[3, 3] = 2.0, 2.0  # other weights than those that sampled
        config = loop.Config(minibatches=minibatches)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        metrics = loop.train_on(groups, model, optimizer, 0, config, random.Random(0), version=1)
        found.append([metrics[name] for name in ("loss", "kl_sampler", "clip_fraction")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][2] > 0


@pytest.fixture(scope="module")
def policy() -> Iterator[Engine]:
    torch.set_num_threads(1)
    with Engine.from_directory() as engine:
        yield engine


def sampled(policy: Engine, **how: Any) -> Group:
    """Two rollouts of the built-in engine, as the gateway records them."""
    prompt = [20, 21, 22, 23]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **how)
    turns = [
        replace(turn(0, prompt, g.token_ids), logprobs=g.logprobs, sampling=how)
        for g in policy.generate([prompt] * 2, params)
    ]
    temperature = how.get("temperature", 1.0)
    return group(
        *(
            replace(
                rollout(float(i), [1]),
                session_id=f"s{i}",
                trajectory=build_trajectory("s", [t], temperature=temperature),
            )
            for i, t in enumerate(turns)
        )
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_loop_and_engine_agree_at_the_runs_temperature(loop: ModuleType, policy: Engine, temperature: float) -> None:
    config = loop.Config(sampling_params={"temperature": temperature}, max_logprob_gap=1e-4)
    model, tokenizer = loop.load_model(None, config)
    arguments = (model, loop.optimizer_of(model, config), tokenizer.pad_token_id, config, random.Random(0))
    metrics = loop.train_on([sampled(policy, temperature=temperature)], *arguments)
    assert metrics["trained_tokens"] == 48
    assert metrics["logprob_gap"] < 1e-4


def test_tokens_of_a_cut_distribution_do_not_count_as_another_model(loop: ModuleType, policy: Engine) -> None:
    model, tokenizer = loop.load_model(None, loop.Config())
    arguments = (
        model,
        loop.optimizer_of(model, loop.Config()),
        tokenizer.pad_token_id,
        loop.Config(),
        random.Random(0),
    )
    metrics = loop.train_on([sampled(policy, top_p=0.5)], *arguments)
    assert (metrics["trained_tokens"], metrics["logprob_gap"]) == (48, None)


@pytest.mark.parametrize("temperature", [0, -1, math.nan])
def test_greedy_rollouts_cannot_be_trained(loop: ModuleType, temperature: float) -> None:
    with pytest.raises(ConfigError, match="cannot train at temperature"):
        loop.Config(sampling_params={"temperature": temperature})
    with pytest.raises(ConfigError, match="teacher's logprobs are those at temperature 1"):
        loop.Config(teacher_url="http://t", sampling_params={"temperature": 0.7})


@pytest.mark.parametrize("changes", [{}, {"final_logit_softcapping": 3.0}])
def test_what_is_computed_for_the_sampled_tokens_alone_is_what_the_whole_model_says(
    loop: ModuleType, changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from agentcore_rl_toolkit.policy import load_policy

    model, tokenizer = load_policy()
    if changes:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 99, "head_dim": 8}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, **changes, num_attention_heads=4, pad_token_id=0)).eval()
        model.lm_head.weight.data *= 100
    monkeypatch.setattr(loop, "HEAD_TOKENS", 7)
    ids = [list(range(20, 40)), list(range(50, 58))]
    sequences = [build_trajectory("s", [turn(0, row[:5], row[5:])]).sequences[0] for row in ids]
    batch = loop.build_batch([(sequence, ()) for sequence in sequences], tokenizer.pad_token_id)
    logprobs_BT, entropies_BT = loop.token_logprobs(model, batch)
    whole_BTV = torch.log_softmax(model(input_ids=batch.token_ids_BT).logits[:, :-1].float(), -1)
    mask_BT = batch.mask_BT[:, 1:]
    expected_BT = whole_BTV.gather(2, batch.token_ids_BT[:, 1:, None])[..., 0] * mask_BT
    torch.testing.assert_close(logprobs_BT, expected_BT)
    torch.testing.assert_close(entropies_BT, -(whole_BTV.exp() * whole_BTV).sum(-1) * mask_BT)
    logprobs_BT.sum().backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_matrices_multiply_in_bfloat16_and_everything_kept_is_float32(loop: ModuleType) -> None:
    sequence = build_trajectory("s", [turn(0, list(range(20, 30)), list(range(30, 60)))]).sequences[0]
    found = {}
    for dtype in ("float32", "bfloat16"):
        model, tokenizer = loop.load_model(None, loop.Config(dtype=dtype))
        optimizer = loop.optimizer_of(model, loop.Config())
        logprobs_BT, _ = loop.token_logprobs(model, loop.build_batch([(sequence, ())], tokenizer.pad_token_id))
        logprobs_BT.sum().backward()
        optimizer.step()
        kept = [t for p in model.parameters() for t in (p, p.grad, optimizer.state[p]["exp_avg"])]
        assert {t.dtype for t in (logprobs_BT, *kept)} == {torch.float32}
        found[dtype] = logprobs_BT[0, 9:].detach()
    gap = (found["float32"] - found["bfloat16"]).abs().mean()
    assert 1e-4 < gap < 0.03


def test_pieces_of_a_minibatch_hold_so_many_tokens_with_their_padding(loop: ModuleType) -> None:
    rows = [(SimpleNamespace(token_ids=[0] * n), n) for n in (9, 3, 4, 20, 3, 5)]
    pieces = [[n for _, n in piece] for piece in loop.at_once(rows, 12)]
    assert pieces == [[3, 3, 4], [5], [9], [20]]  # one that is longer stands alone


def test_gradient_checkpointing_changes_no_gradient(loop: ModuleType, tmp_path: Path) -> None:
    sequence = build_trajectory("s", [turn(0, list(range(20, 30)), list(range(30, 60)))]).sequences[0]
    gradients = []
    for on in (False, True):
        model, _ = loop.load_model(None, loop.Config(gradient_checkpointing=on))
        loop.token_logprobs(model, loop.build_batch([(sequence, ())], 0))[0].sum().backward()
        assert any(module.training for module in model.modules()) is on
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_groups_without_spread_cost_nothing_and_change_no_gradient(loop: ModuleType) -> None:
    def updated(*groups: Group) -> torch.Tensor:
        model = Bigram()
        loop.train_on(
            groups, model, torch.optim.SGD(model.parameters(), 1.0), 0, loop.Config(minibatches=1), random.Random(0)
        )
        return model.head.weight.detach()

    telling = group(rollout(1.0, [2]), rollout(0.0, [3]))
    equal = group(rollout(1.0, [4]), rollout(1.0, [4]))
    torch.testing.assert_close(updated(telling, equal), updated(telling) / 2)  # its tokens count in the mean
    assert not updated(equal).any()
