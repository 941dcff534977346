"""The torch client: its math against hand-computed numbers and autograd, and its agreement with the built-in engine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.backends.collection.groups import CollectedRollout, Group, GroupRequest
from agentcore_rl_toolkit.backends.collection.samples import rollout_samples
from agentcore_rl_toolkit.backends.training import torch_client
from agentcore_rl_toolkit.backends.training.batch import Datum, to_datum
from agentcore_rl_toolkit.backends.training.client import Adam, Loss, Passed
from agentcore_rl_toolkit.backends.training.loop import update
from agentcore_rl_toolkit.backends.training.metrics import Sums, group_metrics
from agentcore_rl_toolkit.backends.training.settings import LoopSettings
from agentcore_rl_toolkit.backends.training.torch_client import (
    Batch,
    TorchClient,
    TorchSettings,
    load_model,
    token_logprobs,
)
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.errors import CaptureError
from agentcore_rl_toolkit.policy import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory


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


def datum(prompt: list[int], completion: list[int], **changes: Any) -> Datum:
    tokens = [*prompt, *completion]
    context, n = len(prompt) - 1, len(completion)
    made = Datum(
        tokens=tokens[:-1],
        target_tokens=tokens[1:],
        logprobs=[0.0] * context + [-1.0] * n,
        advantages=[0.0] * context + [1.0] * n,
        mask=[0] * context + [1] * n,
        fresh=[False] * context + [True] * n,
    )
    return replace(made, **changes)


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}


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


async def updated(
    model: Any, folder: Path, *groups: Group, rate: float = 1.0, version: int = 0, minibatches: int = 1, **more: Any
) -> dict[str, Any]:
    """The metrics of one step of plain gradient descent."""
    client = TorchClient(model, 0, TorchSettings(**more), run_dir=folder)
    client.optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    how = LoopSettings(
        steps=9,
        groups=1,
        rollouts=2,
        learning_rate=rate,
        beta2=0.99,
        max_grad_norm=1.0,
        loss_options=CLIP,
        minibatches=minibatches,
    )
    try:
        return await update(client, groups, how, version)
    finally:
        await client.close("success")


async def test_training_makes_the_rewarded_token_likelier_and_ignores_failed_rollouts(tmp_path: Path) -> None:
    model = Bigram()
    rollouts = group(rollout(1.0, [2]), rollout(0.0, [3]), rollout(0.0, [4], outcome=Outcome.LOST))
    metrics = await updated(model, tmp_path, rollouts) | group_metrics([rollouts])
    after = torch.softmax(model.table[1], -1).tolist()
    assert after[2] > 1 / 8 > after[3]
    assert after[4] == pytest.approx(after[5]), "a lost rollout must leave its token as unlikely as one never sampled"
    assert [metrics[f"{name}_tokens"] for name in ("sampled", "usable", "gradient")] == [3, 2, 2]
    assert metrics["logprob_gap"] < 1e-6
    assert metrics["entropy"] == pytest.approx(math.log(8))
    assert metrics["ratio_max"] == pytest.approx(1.0)


async def test_training_refuses_tokens_that_another_model_sampled(tmp_path: Path) -> None:
    model = Bigram()
    with torch.no_grad():
        model.head.weight[2, 1] = 0.01  # the weights are no longer those that gave log(1/8)
    with pytest.raises(CaptureError, match="compute different models"):
        await updated(model, tmp_path, group(rollout(1.0, [2]), rollout(0.0, [3])))


async def test_tokens_of_older_weights_are_trained_and_prove_no_agreement(tmp_path: Path) -> None:
    model = Bigram()
    with torch.no_grad():
        model.head.weight[2, 1] = 0.1  # version 1; the rollouts were sampled from version 0
    metrics = await updated(model, tmp_path, group(rollout(1.0, [2]), rollout(0.0, [3])), version=1)
    assert metrics["logprob_gap"] is None
    assert model.table[1, 2] > 0.1 > 0 > model.table[1, 3]
    assert metrics["kl_sampler"] > 0


def test_a_call_that_continued_with_new_weights_proves_no_agreement() -> None:
    """Its last tokens are from the weights in training, computed with the cache of older ones."""
    second: dict[str, Any] = {"weight_version_first": 1, "weight_version_last": 1}
    turns = [replace(turn(0, [1], [2, 3]), weight_version_last=1), replace(turn(1, [1, 2, 3, 4], [5]), **second)]
    held = replace(rollout(1.0, [2]), trajectory=build_trajectory("s", turns))
    [sample] = rollout_samples(held)
    assert sample.weight_versions == [0, 1, None, 1]
    assert to_datum(sample, version=1).fresh == [False, False, False, True]
    assert to_datum(sample, version=0).fresh == [False] * 4


async def test_the_numbers_of_a_step_are_those_of_all_its_minibatches(tmp_path: Path) -> None:
    """With a learning rate of 0 nothing changes between them."""
    groups = group(*(rollout(float(token == 2), [token] * 3) for token in (2, 3, 4, 5)))
    found = []
    for minibatches in (1, 4):
        model = Bigram()
        with torch.no_grad():
            model.head.weight[2, 1], model.head.weight[3, 3] = 2.0, 2.0  # other weights than those that sampled
        metrics = await updated(model, tmp_path, groups, rate=1e-30, version=1, minibatches=minibatches)
        found.append([metrics[name] for name in ("loss", "kl_sampler", "clip_fraction", "entropy")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][2] > 0


async def test_groups_without_spread_cost_nothing_and_change_no_gradient(tmp_path: Path) -> None:
    async def weights_after(*groups: Group) -> torch.Tensor:
        model = Bigram()
        await updated(model, tmp_path, *groups)
        return model.head.weight.detach()

    telling = group(rollout(1.0, [2]), rollout(0.0, [3]))
    equal = group(rollout(1.0, [4]), rollout(1.0, [4]))
    # The tokens of the second group count in the mean.
    torch.testing.assert_close(await weights_after(telling, equal), await weights_after(telling) / 2)
    assert not (await weights_after(equal)).any()


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
async def test_trainer_and_engine_agree_at_the_runs_temperature(
    policy: Engine, temperature: float, tmp_path: Path
) -> None:
    model, _ = load_model(TorchSettings())
    group = sampled(policy, temperature=temperature)
    metrics = await updated(model, tmp_path, group, rate=1e-30, temperature=temperature)
    assert metrics["gradient_tokens"] == 48
    assert metrics["logprob_gap"] < 1e-4


async def test_tokens_of_a_cut_distribution_do_not_count_as_another_model(policy: Engine, tmp_path: Path) -> None:
    model, _ = load_model(TorchSettings())
    metrics = await updated(model, tmp_path, sampled(policy, top_p=0.5), rate=1e-30)
    assert (metrics["gradient_tokens"], metrics["logprob_gap"]) == (48, None)


@pytest.mark.parametrize("changes", [{}, {"final_logit_softcapping": 3.0}])
def test_logprobs_of_the_sampled_tokens_equal_those_of_the_whole_model(
    changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from agentcore_rl_toolkit.policy import load_policy

    model, _ = load_policy()
    if changes:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 99, "head_dim": 8}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, **changes, num_attention_heads=4, pad_token_id=0)).eval()
        model.lm_head.weight.data *= 100
    monkeypatch.setattr(torch_client, "HEAD_TOKENS", 7)
    ids = [list(range(20, 40)), list(range(50, 58))]
    batch = Batch.of([datum(row[:5], row[5:]) for row in ids], 0)
    rows: list[int] = []  # of each call of the output head
    hook = model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[-2]))
    logprobs_BT, entropies_BT = token_logprobs(model, batch)
    hook.remove()
    assert (rows[0], max(rows), sum(rows)) == (0, 7, int(batch.mask_BT.sum()))
    whole_BTV = torch.log_softmax(model(input_ids=batch.token_ids_BT).logits.float(), -1)
    expected_BT = whole_BTV.gather(2, batch.targets_BT[..., None])[..., 0] * batch.mask_BT
    torch.testing.assert_close(logprobs_BT, expected_BT)
    torch.testing.assert_close(entropies_BT, -(whole_BTV.exp() * whole_BTV).sum(-1) * batch.mask_BT)
    logprobs_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("config", "temperature", "scale"),
    [({}, 1.0, 1.0), ({"logit_scale": 0.5}, 1.0, 0.5), ({"logits_scaling": 4.0}, 1.0, 0.25), ({}, 0.5, 2.0)],
)
def test_logits_are_scaled_as_the_model_and_the_temperature_say(
    config: dict[str, float], temperature: float, scale: float
) -> None:
    hidden_NV, chosen_N = torch.arange(12.0).reshape(3, 4).sin(), torch.tensor([0, 1, 3])
    found = torch_client.of_head(torch.nn.Identity(), SimpleNamespace(**config), hidden_NV, chosen_N, temperature)
    whole_NV = torch.log_softmax(hidden_NV * scale, -1)
    torch.testing.assert_close(found[0], whole_NV[[0, 1, 2], [0, 1, 3]])
    torch.testing.assert_close(found[1], -(whole_NV.exp() * whole_NV).sum(-1))


@pytest.mark.parametrize(("pad", "expected"), [(0, 0), (None, 7)])
def test_padding_is_the_end_of_texts_without_a_token_for_it(pad: int | None, expected: int) -> None:
    assert torch_client.pad_id_of(SimpleNamespace(pad_token_id=pad, eos_token_id=7)) == expected


def test_matrices_multiply_in_bfloat16_and_everything_kept_is_float32(tmp_path: Path) -> None:
    batch = Batch.of([datum(list(range(20, 30)), list(range(30, 60)))], 0)
    found = {}
    for dtype in ("float32", "bfloat16"):
        model, _ = load_model(TorchSettings(dtype=dtype))
        optimizer: Any = TorchClient(model, 0, TorchSettings(), run_dir=tmp_path).optimizer
        logprobs_BT, _ = token_logprobs(model, batch)
        logprobs_BT.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        kept = [t for p in model.parameters() for t in (p, p.grad, optimizer.state[p]["exp_avg"])]
        assert {t.dtype for t in (logprobs_BT, *kept)} == {torch.float32}
        found[dtype] = logprobs_BT[0, 9:].detach()
    gap = (found["float32"] - found["bfloat16"]).abs().mean()
    assert 1e-4 < gap < 0.03


def test_pieces_of_a_batch_hold_so_many_tokens_with_their_padding() -> None:
    lengths = [9, 3, 4, 20, 3, 5]
    pieces = [[lengths[place] for place in piece] for piece in torch_client.at_once(lengths, 12)]
    assert pieces == [[3, 3, 4], [5], [9], [20]]  # a longer one is a piece of its own


async def test_results_keep_their_order_however_the_batch_is_cut(tmp_path: Path) -> None:
    data = [datum([20], list(range(30, 30 + n))) for n in (9, 3, 20, 5)]
    found = []
    for tokens_at_once in (8, 1000):
        client = TorchClient(
            load_model(TorchSettings())[0], 0, TorchSettings(tokens_at_once=tokens_at_once), run_dir=tmp_path
        )
        passed = await client.forward_backward(data, Loss(), 37.0)
        await client.close("success")
        assert passed.logprobs is not None
        assert [len(row) for row in passed.logprobs] == [9, 3, 20, 5]
        found.append([*passed.metrics.values(), *(lp for row in passed.logprobs for lp in row)])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


async def test_the_penalty_pulls_the_policy_back_to_the_model_at_the_start(tmp_path: Path) -> None:
    dtype: Any = "bfloat16"
    data, adam = [datum([20, 21], [30, 31, 32])], Adam(learning_rate=1e-4, beta1=0.0, beta2=0.9, grad_clip_norm=0.0)
    divergence = {}
    for penalty in (1e-9, 100.0):
        client = TorchClient.open(TorchSettings(kl_penalty=penalty, dtype=dtype, threads=1), None, run_dir=tmp_path)
        for _ in range(8):
            passed = await client.forward_backward(data, Loss(name="importance_sampling"), 3.0)
            await client.step(adam)
        divergence[penalty] = passed.metrics["kl_start"]
        await client.save(6)
        await client.close("success")
    assert 0 < divergence[100.0] < 0.5 * divergence[1e-9]
    resumed = TorchClient.open(
        TorchSettings(kl_penalty=100.0, dtype=dtype, threads=1), "checkpoint-000006.pt", run_dir=tmp_path
    )
    again = await resumed.forward_backward(data, Loss(name="importance_sampling"), 3.0)
    await resumed.close("success")
    assert again.metrics["kl_start"] > 0.5 * divergence[100.0], "the start is the model's, not the checkpoint's"


async def test_a_client_continues_from_its_checkpoint_and_keeps_that_of_the_step_before(tmp_path: Path) -> None:
    data, adam = [datum([20, 21], [30, 31, 32])], Adam(learning_rate=1e-3, beta1=0.9, beta2=0.99, grad_clip_norm=1.0)

    async def stepped(client: TorchClient) -> list[float]:
        passed = await client.forward_backward(data, Loss(), 3.0)
        await client.step(adam)
        assert passed.logprobs is not None
        return list(passed.logprobs[0])

    client = TorchClient.open(TorchSettings(threads=1), None, run_dir=tmp_path)
    for step in (1, 2, 3):
        await stepped(client)
        name = await client.save(step)
    await client.save(3)  # as a run that was killed after it had saved the third step, and resumed from the second
    assert sorted(name for name in os.listdir(tmp_path) if "checkpoint" in name) == ["checkpoint-000002.pt", name]
    expected = [await stepped(client) for _ in range(2)]
    await client.close("success")
    resumed = TorchClient.open(TorchSettings(threads=1), name, run_dir=tmp_path)
    assert [await stepped(resumed) for _ in range(2)] == expected  # optimizer and weights, bit for bit
    await resumed.close("success")


def test_gradient_checkpointing_changes_no_gradient() -> None:
    batch = Batch.of([datum(list(range(20, 30)), list(range(30, 60)))], 0)
    gradients = []
    for on in (False, True):
        model, _ = load_model(TorchSettings(gradient_checkpointing=on))
        token_logprobs(model, batch)[0].sum().backward()  # type: ignore[no-untyped-call]
        assert any(module.training for module in model.modules()) is on
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_adapters_count_twice_their_rank_unless_it_is_set() -> None:
    assert (TorchSettings().lora_rank, TorchSettings(lora_rank=4).alpha) == (0, 8)
    assert TorchSettings(lora_rank=4, lora_alpha=4).alpha == 4


async def test_the_penalty_holds_for_groups_with_equal_rewards(tmp_path: Path) -> None:
    client = TorchClient.open(TorchSettings(kl_penalty=1.0, threads=1), None, run_dir=tmp_path)
    client.max_logprob_gap = None
    with torch.no_grad():
        moved = client.model.get_output_embeddings().weight
        moved.mul_(1.01)
        before = moved.clone()
    how = LoopSettings(steps=2, groups=1, rollouts=2, learning_rate=1e-3)
    found = await update(client, [group(rollout(1.0, [2]), rollout(1.0, [3]))], how, 1)
    await client.close("success")
    assert found["kl_start"] > 0
    assert (found["gradient_tokens"], found["groups_that_differ"]) == (0, 0)
    assert not torch.equal(before, moved)


def test_means_of_a_step_count_each_token_once() -> None:
    sums = Sums(Loss())
    for tokens, kl in ((1, 1.0), (99, 0.0)):
        passed = Passed(metrics={"loss": 0.0, "kl_start": kl}, logprobs=[[-1.0] * tokens], entropies=[[0.0] * tokens])
        sums.add([datum([1], [2] * tokens)], passed, {}, 2, check_gap=False)
    assert sums.metrics()["kl_start"] == pytest.approx(0.01)
    assert sums.metrics()["entropy"] == 0.0, "the policy is certain of each token, which is not unknown"
