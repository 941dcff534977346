"""GRPO on a deployed agent: the whole loop, one file.

Every step: take groups of rollouts of the same problem, turn their rewards into advantages, and make the sampled tokens
of the better ones more likely. Rollouts run on meanwhile, up to `staleness` weight versions behind; the ratio below is taken
against the logprobs that each token was sampled with, whichever weights those were. The agent runs elsewhere (AgentCore
Runtime, or the local one) and knows nothing of this; its reward comes back through the object store, its tokens through the
model gateway, exactly as sampled. The data set is a list of payloads: what the agent is sent, one input each.

    reward r_i of rollout i in a group of G          advantage A_t = (r_i - mean(r)) / (std(r) + eps), t sampled in rollout i
    ratio  rho_t = pi(token_t) / pi_sampled(token_t)
    loss = - mean over sampled tokens of  min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

`backends/collection/credit.py` has the other advantages: of turns, and those that come from a teacher.

Sources: GRPO, arXiv:2402.03300; the asymmetric clip and the mean over tokens, DAPO, arXiv:2503.14476.
Shapes: _G rollouts of a group, _B sequences of a batch, _T tokens of a sequence, _N sampled tokens of a batch, _V tokens of the
vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import (
    CollectConfig,
    Credit,
    CreditReport,
    Group,
    GroupRequest,
    GroupStream,
    Recording,
    UsableSteps,
    collect_async,
    collect_stream,
    open_recording,
    summarize,
    to_samples,
)
from agentcore_rl_toolkit.backends.collection.groups import trained_temperature
from agentcore_rl_toolkit.backends.collection.places import Places
from agentcore_rl_toolkit.backends.collection.teacher import teacher_at
from agentcore_rl_toolkit.backends.llm_judge import JudgeSettings
from agentcore_rl_toolkit.client.data import read_rows
from agentcore_rl_toolkit.client.evaluation import interval
from agentcore_rl_toolkit.errors import AgentCoreRLError, CaptureError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, load_policy, problems
from agentcore_rl_toolkit.policy.linear import use_onednn
from agentcore_rl_toolkit.policy.loading import placement
from agentcore_rl_toolkit.runs import locked
from agentcore_rl_toolkit.runs.record import tools_of
from agentcore_rl_toolkit.weights import EngineAddress, Publisher
from agentcore_rl_toolkit.weights.publishing import MAX_GAP_OF_BFLOAT16

HEAD_TOKENS = 512  # whose logits are in memory at once
Observer = Callable[[str, dict[str, Any]], None]  # (event name, its facts)
Row = Mapping[str, Any]  # one input: the payload that the agent is sent


@dataclass(frozen=True, kw_only=True)
class Config(Credit):
    steps: int = 13
    groups: int = 8  # inputs a step
    rollouts: int = 8  # rollouts of each input
    learning_rate: float = 6e-4  # two steps of warm-up, then linearly to a twentieth: a constant one ends in forgetting
    clip_low: float = 0.2
    clip_high: float = 0.28
    minibatches: int = 4  # optimizer steps per batch of rollouts
    tokens_at_once: int = 4096  # of a minibatch, with padding; their gradients add up: what memory holds
    gradient_checkpointing: bool = (
        False  # compute activations again in the backward pass: less memory, a third more time
    )
    dtype: str = (
        "float32"  # what matrices are multiplied in, or bfloat16; `train` takes the engine's, to round as it does
    )
    max_grad_norm: float = 1.0
    lora_rank: int = 0  # 0 trains all weights; else adapters of this rank on every linear layer (needs peft)
    lora_alpha: int | None = None  # adapters count alpha / rank; None: twice the rank
    max_logprob_gap: float = 1e-3  # between recorded and recomputed logprobs, at the same weights, in float32
    staleness: int = 0  # weight versions between a rollout's start and its training; 0: nothing runs meanwhile
    hold_calls: bool = False  # change weights between model calls; else those that run go on with the new ones
    eval_every: int = 0  # steps between evaluations; 0: before and after only
    max_concurrent: int = 64  # sessions alive at once
    rollout_deadline_s: float = 120.0  # a rollout that takes longer is masked out, the step goes on
    policy_failures: str = "score"  # out of tokens, turns or context: the agent's reward for that, or "mask" them out
    train_on: str | None = None  # what of a session trains: task, main, all or a tag; None: what the agent says
    # In place of the agent's own, such as limits; in training the whole distribution at temperature 1 where they say no other.
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    judged_by: JudgeSettings | None = None  # a model that scores the rollouts of a group
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_temperature(self.temperature, "sampling_params.temperature")

    @property
    def temperature(self) -> float:
        """What logits are divided by, in the engine and here."""
        return trained_temperature(self.sampling_params)


@dataclass(frozen=True, kw_only=True)
class Services:
    """Where the parts are. `policy_url` serves the model being trained, `model_dir` (None: the built-in one); agents reach
    it through the gateway. `recording` keeps every rollout in the run's folder, for `agentcore-rl view`.
    """

    client: RolloutClient
    gateway: GatewayClient
    policy_url: str
    run_dir: Path
    engine: str = "policy"  # what runs at policy_url: policy, vllm or sglang
    model_dir: Path | None = None
    recording: Recording | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded sequences. Position t holds what is needed to predict token t from the tokens before it."""

    token_ids_BT: torch.Tensor
    mask_BT: torch.Tensor  # 1.0 where the token was sampled by the policy and is trained
    sampled_logprobs_BT: torch.Tensor  # 0.0 only where mask is 0
    advantages_BT: torch.Tensor  # 0.0 where mask is 0
    fresh_BT: torch.Tensor  # 1.0 where the token was sampled from the distribution that is trained


def build_batch(
    rows: Sequence[tuple[Any, Sequence[float]]], pad_id: int, device: Any = "cpu", version: int | None = None
) -> Batch:
    """(TrainingSequence, advantages of its response) pairs to tensors. The ids are the gateway's own: nothing is tokenised here.

    ``version`` is that of the weights about to be trained; None: no token is from older ones.
    """
    T = max(len(sequence.token_ids) for sequence, _ in rows)
    token_ids_BT = torch.full((len(rows), T), pad_id)
    mask_BT, logprobs_BT, advantages_BT, fresh_BT = (torch.zeros(len(rows), T) for _ in range(4))
    for b, (sequence, advantages_R) in enumerate(rows):
        t = len(sequence.token_ids)
        token_ids_BT[b, :t] = torch.tensor(sequence.token_ids)
        mask_BT[b, :t] = torch.tensor(sequence.loss_mask, dtype=torch.float32)
        logprobs_BT[b, :t] = torch.tensor([0.0 if lp is None else lp for lp in sequence.logprobs])
        advantages_BT[b, t - len(advantages_R) : t] = torch.tensor(advantages_R)
        fresh_BT[b, :t] = torch.tensor([version in (None, v) for v in sequence.weight_versions], dtype=torch.float32)
    return Batch(
        token_ids_BT=token_ids_BT.to(device),
        mask_BT=mask_BT.to(device),
        sampled_logprobs_BT=logprobs_BT.to(device),
        advantages_BT=advantages_BT.to(device),
        fresh_BT=fresh_BT.to(device),
    )


def token_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(token_t | tokens before t), and pi's entropy, where the mask is 1: (B, T) -> 2 x (B, T-1), 0.0 elsewhere.

    pi is the policy at this temperature, as agents sample it. Padding is right: it needs no mask. The output head works at these
    positions alone, `HEAD_TOKENS` at a time, and again in the backward pass: the logits of a large vocabulary are what fills
    memory first.
    """
    wanted_BT = batch.mask_BT[:, 1:] > 0
    head, hidden = model.get_output_embeddings(), []

    def keep(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden.append(inputs[0][:, :-1][wanted_BT])
        return (inputs[0][:, :0], *inputs[1:])  # the model itself computes no logits

    hook = head.register_forward_pre_hook(keep)
    try:
        model(input_ids=batch.token_ids_BT, use_cache=False)
    finally:
        hook.remove()
    chosen_N = batch.token_ids_BT[:, 1:][wanted_BT]
    pieces = zip(hidden[0].split(HEAD_TOKENS), chosen_N.split(HEAD_TOKENS), strict=True)
    found = [checkpoint(of_head, head, model.config, *piece, temperature, use_reentrant=False) for piece in pieces]
    logprobs_N, entropies_N = (torch.cat(parts) for parts in zip(*found, strict=True))
    empty_BT = torch.zeros(wanted_BT.shape, device=logprobs_N.device)
    return empty_BT.masked_scatter(wanted_BT, logprobs_N), empty_BT.masked_scatter(wanted_BT, entropies_N)


def of_head(
    head: Any, config: Any, hidden_ND: torch.Tensor, chosen_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the chosen tokens, and entropies, from what goes into the output head."""
    logits_NV = head(hidden_ND).float()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    logits_NV = logits_NV * scale if scale != 1.0 else logits_NV  # Cohere, Granite
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits_NV = cap * torch.tanh(logits_NV / cap)
    logits_NV = logits_NV / temperature if temperature != 1.0 else logits_NV
    logprobs_NV = torch.log_softmax(logits_NV, -1)
    probabilities_NV = logprobs_NV.detach()
    entropies_N = -(probabilities_NV.exp() * probabilities_NV).sum(-1)
    return logprobs_NV.gather(1, chosen_N[:, None])[:, 0], entropies_N


def at_once(rows: Sequence[Any], tokens: int) -> Iterator[list[Any]]:
    """Rows whose first is a sequence, those of about the same length together: as many as `tokens` hold with their padding."""
    piece: list[Any] = []
    for row in sorted(rows, key=lambda row: len(row[0].token_ids)):
        if piece and (len(piece) + 1) * len(row[0].token_ids) > tokens:
            yield piece
            piece = []
        piece.append(row)
    if piece:
        yield piece


def grpo_loss(
    logprobs_BT: torch.Tensor, batch: Batch, tokens: float, config: Config
) -> tuple[torch.Tensor, dict[str, float]]:
    """The clipped loss above, and sums over its tokens that say what the update is like. `tokens`: what its sum is divided by.

    `clipped` counts the tokens that the clip keeps from moving on: their clipped term is the smaller one.
    """
    mask_BT, old_BT = batch.mask_BT[:, 1:], batch.sampled_logprobs_BT[:, 1:]
    log_ratio_BT = (logprobs_BT - old_BT) * mask_BT
    ratio_BT, A_BT = log_ratio_BT.exp(), batch.advantages_BT[:, 1:]
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -(torch.minimum(ratio_BT * A_BT, clipped_BT * A_BT) * mask_BT).sum() / tokens
    k3_BT = ratio_BT - 1 - log_ratio_BT  # estimates KL(sampler || policy in training), token by token
    return loss, {
        "logprob_gap": (log_ratio_BT * batch.fresh_BT[:, 1:]).abs().max().item(),
        "fresh": (mask_BT * batch.fresh_BT[:, 1:]).sum().item(),
        "clipped": ((clipped_BT * A_BT < ratio_BT * A_BT) * mask_BT).sum().item(),
        "kl_sampler": (k3_BT * mask_BT).sum().item(),
        "tokens": mask_BT.sum().item(),
    }


def age(sequence: Any, version: int | None) -> int:
    """How many weight versions ago a sequence's oldest token was sampled; 0 where it is unknown."""
    known = [v for v in sequence.weight_versions if v is not None]
    return version - min(known) if known and version is not None else 0


def train_on(
    groups: Sequence[Group],
    model: Any,
    optimizer: Any,
    pad_id: int,
    config: Config,
    rng: Any,
    recording: Any = None,
    version: int | None = None,
) -> dict:
    """One GRPO update of weight version `version`. Returns its metrics; trains nothing, and says so, without a usable rollout."""
    report, stats = CreditReport(), summarize(groups)
    samples = to_samples(groups, credit=config, report=report)  # of usable rollouts
    if recording is not None:
        recording.advantages(samples)
    trajectories = {rollout.session_id: rollout.trajectory for group in groups for rollout in group.usable}
    trained = stats.trained_tokens
    metrics: dict[str, Any] = {
        "sequences": len(samples),
        "sampled_tokens": stats.sampled_tokens,
        "trainable_tokens": trained,
    }
    metrics |= {
        "logprob_gap": None,
        "loss": None,
        "grad_norm": None,
        "kl_sampler": None,
        "clip_fraction": None,
        **report.numbers(),
    }
    # Equal rewards give no gradient, so nothing is computed for them; their tokens count in what the loss is divided by.
    taught = [sample for sample in samples if any(sample.advantages)]
    metrics["groups_that_differ"] = len({sample.group_index for sample in taught})
    metrics["trained_tokens"] = sum(sample.trained_tokens for sample in taught)
    rows = []  # sequence, advantages, whose sequence it is
    for sample in taught:
        sequence = trajectories[sample.session_id].sequences[sample.sequence_index]
        rows.append((sequence, sample.advantages, (sample.session_id, sample.sequence_index)))
    metrics["computed_tokens"] = sum(len(row[0].token_ids) for row in rows)  # prompts too
    rng.shuffle(rows)
    sums: Counter[str] = Counter()  # over the step
    for minibatch in range(config.minibatches):
        part = rows[minibatch :: config.minibatches]
        if not part:
            continue
        optimizer.zero_grad()
        for piece in at_once(part, config.tokens_at_once):
            batch = build_batch([row[:2] for row in piece], pad_id, next(model.parameters()).device, version)
            for b, (_, _, (session_id, _)) in enumerate(piece):
                if trajectories[session_id].report.other_sampling:
                    batch.fresh_BT[b] = 0.0  # top_p and the like: the engine's logprobs are those of what they left
            logprobs_BT, entropies_BT = token_logprobs(model, batch, config.temperature)
            if recording is not None:
                # Optimizer steps since the sequence's oldest token was sampled.
                ages = [minibatch + config.minibatches * age(row[0], version) for row in piece]
                for b, (_, _, (session_id, index)) in enumerate(piece):
                    known = {"logprobs": logprobs_BT[b], "entropies": entropies_BT[b]}
                    found = {name: of_sampled(values_T, batch.mask_BT[b, 1:]) for name, values_T in known.items()}
                    recording.trained(session_id, index, **found, updates=ages[b])
            # Every token of the step weighs the same, whichever minibatch it falls into.
            loss, facts = grpo_loss(logprobs_BT, batch, trained / config.minibatches, config)
            if (
                minibatch == 0 and facts["fresh"]
            ):  # only here trainer and sampler have the same weights: they must agree to ~1e-5
                metrics["logprob_gap"] = max(metrics["logprob_gap"] or 0.0, facts["logprob_gap"])
                if not facts["logprob_gap"] <= config.max_logprob_gap:
                    raise CaptureError(
                        f"recorded and recomputed logprobs differ by {facts['logprob_gap']}: another model?"
                    )
            loss.backward()
            sums.update({"loss": loss.item() / config.minibatches})
            sums.update({name: facts[name] for name in ("kl_sampler", "clipped", "tokens")})
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        sums.update({"grad_norm": grad_norm.item(), "updates": 1})
    if rows:
        metrics |= {"loss": sums["loss"], "grad_norm": sums["grad_norm"] / sums["updates"]}
        metrics |= {
            "kl_sampler": sums["kl_sampler"] / sums["tokens"],
            "clip_fraction": sums["clipped"] / sums["tokens"],
        }
    return metrics


def engine_of(services: Services) -> EngineAddress:
    return EngineAddress(url=services.policy_url, engine=services.engine, model=services.client.model_id or "policy")


def publish(
    model: Any, version: int, services: Services, probe: Sequence[int] | None = None, temperature: float = 1.0
) -> None:
    """Put the weights in place at the engine, and prove it: engine and trainer must agree on the tokens of a probe's answers.

    ``probe`` are the ids of its prompt. Raises: WeightsError, which ends the run: nothing is trained on other weights' tokens.
    ConfigError where the engine's logprobs are not those of the run's temperature.
    """
    how: dict[str, Any] = {"announce": services.gateway.set_weight_version, "temperature": temperature}
    publisher = Publisher([engine_of(services)], services.run_dir / "weights", **how)
    publisher.publish(model, version, prompt_ids=probe)


def probe_of(groups: Sequence[Group]) -> list[int] | None:
    """A prompt of the policy's own dialogues: the beginning of a usable rollout, up to its first sampled token."""
    for group in groups:
        for rollout in group.usable:
            for sequence in rollout.trajectory.sequences:
                return list(sequence.token_ids[: sequence.loss_mask.index(1)]) if any(sequence.loss_mask) else None
    return None


def compute_in(model: Any, dtype: str) -> None:
    """Let a model, and its output head where that is called alone, multiply matrices in this type."""
    if dtype == "float32":
        use_onednn(model)
        return
    for part in (model, model.get_output_embeddings()):
        part.forward = torch.autocast(model.device.type, torch.bfloat16)(part.forward)


def load_model(model_dir: Path | None, config: Config) -> tuple[Any, Any]:
    """The model to train, on a GPU where there is one, and its tokenizer. Weights and optimizer are float32, whatever `dtype`."""
    model, tokenizer = load_policy(model_dir)
    device, _ = placement(model.num_parameters())
    model = model.to(device)
    compute_in(model, config.dtype)
    if config.gradient_checkpointing:
        from transformers.modeling_layers import GradientCheckpointingLayer

        # newer versions of transformers name it so
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for module in model.modules():  # these layers alone: in training mode others might drop out
            module.training = isinstance(module, GradientCheckpointingLayer)
    if config.lora_rank:
        from peft import LoraConfig, get_peft_model

        alpha = config.lora_alpha or 2 * config.lora_rank
        model = get_peft_model(model, LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules="all-linear"))
    return model, tokenizer


def row_at(place: int, rows: Sequence[Row], config: Config) -> Row:
    """The input at a place of the training: the whole data set again and again, in another order each time."""
    epoch, at = divmod(place, len(rows))
    return rows[order_of(len(rows), config.seed, epoch)[at]]


@functools.lru_cache(maxsize=2)  # shuffling a large data set takes too long to do it for each group
def order_of(rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def collect_config(config: Config) -> CollectConfig:
    return CollectConfig(
        require_reward=config.uses_rewards,
        credit=config.credit,
        teacher_url=config.teacher_url,
        train=config.train_on,
        sampling_params=config.sampling_params,
        max_concurrent=config.max_concurrent,
        rollout_timeout_s=config.rollout_deadline_s,
        policy_failures=config.policy_failures,
        judged_by=config.judged_by,
    )


async def evaluate(
    version: int, held_out: Sequence[Row], services: Services, config: Config, observe: Observer, places: Places
) -> None:
    """One rollout of each held-out input, by this version of the weights."""
    when = {0: "before", config.steps: "after"}.get(version, f"version-{version}")
    requests = [GroupRequest(input_id=f"{when}/{i:04d}", payload=row) for i, row in enumerate(held_out)]
    observe("rollouts_started", {"phase": when, "total": len(requests)})
    recording = services.recording
    groups = await collect_async(
        requests,
        client=services.client,
        gateway=services.gateway,
        config=replace(collect_config(config), evaluation=True),
        places=places,
        on_rollout=lambda rollout: observe("rollout", {"phase": when, "rollout": rollout}),
        recording=recording and recording.at(when if when in ("before", "after") else "eval", version),
    )
    scores = [rollout.score for group in groups for rollout in group.rollouts if rollout.score is not None]
    observe("evaluated", {"when": when, "version": version, **summarise(groups), "reward_interval": interval(scores)})


def training_begins(done: int, config: Config, observe: Observer) -> None:
    total = (config.steps - done) * config.groups * config.rollouts
    observe("rollouts_started", {"phase": "training", "total": total})


def training_stream(
    done: int,
    state: Any,
    services: Services,
    rows: Sequence[Row],
    config: Config,
    observe: Observer,
    places: Places,
) -> GroupStream:
    """Groups of rollouts from step `done` on. The row of the data set is the payload, as in every backend."""

    def request(place: int) -> GroupRequest | None:
        if place >= config.steps * config.groups:
            return None
        return GroupRequest(input_id=f"train/{place:05d}", payload=row_at(place, rows, config), n=config.rollouts)

    training_begins(done, config, observe)
    return collect_stream(
        request,
        client=services.client,
        gateway=services.gateway,
        batch_groups=config.groups,
        max_staleness=config.staleness,
        config=collect_config(config),
        places=places,
        weight_version=done,  # version k is what k steps made
        state=state,
        on_rollout=lambda rollout: observe("rollout", {"phase": "training", "rollout": rollout}),
        recording=services.recording and services.recording.at("train"),
    )


def staleness(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """How many usable rollouts began how many weight versions ago, and the mean; None where the engine names no version."""
    ages = Counter(version - r.weight_version_min for g in groups for r in g.usable if r.weight_version_min is not None)
    mean = sum(age * n for age, n in ages.items()) / ages.total() if ages else None
    return {"staleness": {str(age): ages[age] for age in sorted(ages)}, "staleness_mean": mean}


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """Both means of the rewards, tool use, and how rollouts ended. A mean of nothing is None, not zero.

    `reward` is over all rollouts but those that the infrastructure failed (`scored` of them), failures of agent and policy as
    0; `reward_ok` over those that ended `ok` (`ok` of them). `tool_use` is the share of rollouts that called a tool, of
    those that say so (`metrics.tool_calls`) or whose model calls offered any.
    """
    stats = summarize(groups)
    good = [rollout for group in groups for rollout in group.usable]
    means = [sum(g) / len(g) for group in groups if (g := [r.score for r in group.rollouts if r.score is not None])]
    spread = math.sqrt(sum((m - sum(means) / len(means)) ** 2 for m in means) / len(means)) if means else None
    tools = [used for rollout in good if (used := used_a_tool(rollout)) is not None]
    return {
        **stats.evaluation(),
        "reward_spread": spread,  # standard deviation over the groups' mean rewards
        "tool_use": sum(tools) / len(tools) if tools else None,
        "rollouts": stats.rollouts,
        "usable": stats.usable,
        "branches": sum(r.trajectory.report.branches for r in good),
    }


def used_a_tool(rollout: Any) -> bool | None:
    """By the agent's own metrics, else by its dialogue; None where its model calls offered no tools."""
    metrics = (rollout.record or {}).get("metrics") or {}
    if "tool_calls" in metrics:
        return bool(metrics["tool_calls"] > 0)
    capture = rollout.capture
    return bool(tools_of(capture.dialogue)) if capture and any(turn.tools for turn in capture.turns) else None


async def train(
    services: Services, config: Config, rows: Sequence[Row], held_out: Sequence[Row], observe: Observer
) -> None:
    """The loop. State is saved after every step; call again with the same `run_dir` to go on where it stopped.

    ``rows`` are trained on; ``held_out``, which may be empty, is run before and after, and with ``eval_every`` in between.
    Raises: RolloutError when no rollout of the first step, or of three steps in a row, is usable.
    """
    torch.manual_seed(config.seed)
    alone = config.staleness == 0  # then nothing else runs while it trains
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // (1 if alone else 2)))
    if config.teacher_url is not None:
        await asyncio.to_thread(teacher_at(config.teacher_url).check, services.model_dir or WEIGHTS_DIR)
    dtype = await asyncio.to_thread(engine_of(services).connect().dtype) or config.dtype
    if dtype == "bfloat16":
        config = replace(config, dtype=dtype, max_logprob_gap=MAX_GAP_OF_BFLOAT16)
    model, tokenizer = load_model(services.model_dir, config)
    pad_id, optimizer = pad_id_of(tokenizer), optimizer_of(model, config)
    checkpoint = services.run_dir / "checkpoint.pt"
    done, stream_state = 0, None
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=model.device)
        model.load_state_dict({**model.state_dict(), **saved["model"]})
        optimizer.load_state_dict(saved["optimizer"])
        done, stream_state = saved["steps"], saved.get("stream", {"next": saved["steps"] * config.groups})
    if services.recording is not None:
        services.recording.resumed(done)  # a run that ended before its first checkpoint begins again
    rollouts_done = len(held_out) + done * config.groups * config.rollouts if done else 0
    observe("begins", {"steps_done": done, "rollouts_done": rollouts_done})
    await asyncio.to_thread(publish, model, done, services, None, config.temperature)
    places = Places(config.max_concurrent)  # an evaluation and the training beside it share them
    if done == 0 and held_out:
        await evaluate(0, held_out, services, config, observe, places)

    usable = UsableSteps(begun=done > 0)
    async with training_stream(done, stream_state, services, rows, config, observe, places) as stream:
        for step in range(done, config.steps):
            started = time.monotonic()
            groups = await stream.take_async()
            usable.check(groups)
            taken = time.monotonic()
            learning_rate = set_rate(optimizer, step, config.steps, config)
            rng = random.Random(config.seed * 1_000_003 + step)
            update = (groups, model, optimizer, pad_id, config, rng, services.recording, step)
            metrics = await asyncio.to_thread(train_on, *update)
            probe = probe_of(groups)
            async with calls_held(services, config):
                await asyncio.to_thread(publish, model, step + 1, services, probe, config.temperature)
            ended = time.monotonic()
            if held_out and config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < config.steps:
                # Before the step is saved: both or none. Without staleness the next step's rollouts start afterwards.
                await evaluate(step + 1, held_out, services, config, observe, places)
                training_begins(step + 1, config, observe)
            stream.published(step + 1)
            state = {"model": changed_by_training(model), "optimizer": optimizer.state_dict(), "steps": step + 1}
            torch.save({**state, "stream": stream.state()}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            facts = {**summarise(groups), **metrics, **staleness(groups, step), **times(started, taken, ended)}
            sampling_s = (taken if alone else ended) - started
            facts |= {
                "sampled_tokens_per_s": metrics["sampled_tokens"] / sampling_s,
                "peak_memory_gb": peak_memory_gb(),
            }
            facts["trained_tokens_per_s"] = metrics["computed_tokens"] / facts["train_s"]
            observe("step", {"step": step, "learning_rate": learning_rate, **facts})

    if held_out:
        await evaluate(config.steps, held_out, services, config, observe, places)
    save(model, tokenizer, services.run_dir, config)


def imitate(
    rows: Sequence[Mapping[str, Any]],
    model_dir: Path | None,
    run_dir: Path,
    config: Config,
    epochs: int,
    batch_tokens: int,
    observe: Callable[[dict[str, Any]], None],
) -> None:
    """Cross entropy on the exact ids that good rollouts sampled (`runs.demonstrations`), each epoch in another order.

    loss = - mean over sampled tokens of log pi(token_t). An optimizer step takes sequences up to `batch_tokens`.
    """
    torch.manual_seed(config.seed)
    model, tokenizer = load_model(model_dir, config)
    pad_id, optimizer = pad_id_of(tokenizer), optimizer_of(model, config)
    steps: list[list[tuple[Any, Sequence[float]]]] = []
    for epoch in range(epochs):
        order = [row for row in rows if any(row["assistant_masks"][1:])]
        random.Random(f"{config.seed}/{epoch}").shuffle(order)
        held = batch_tokens  # a step begins with an epoch
        for row in order:
            length = len(row["input_ids"])
            if held + length > batch_tokens:
                steps.append([])
                held = 0
            nothing = [None] * length
            sequence = TrainingTokens(
                row["input_ids"], row["assistant_masks"], logprobs=nothing, weight_versions=nothing
            )
            steps[-1].append((sequence, ()))
            held += length
    for step, part in enumerate(steps):
        began, total = time.monotonic(), 0.0
        learning_rate = set_rate(optimizer, step, len(steps), config)
        optimizer.zero_grad()
        sampled = sum(sum(sequence.loss_mask[1:]) for sequence, _ in part)
        for piece in at_once(part, config.tokens_at_once):
            batch = build_batch(piece, pad_id, next(model.parameters()).device)
            loss = -token_logprobs(model, batch)[0].sum() / sampled
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        rate = sum(len(sequence.token_ids) for sequence, _ in part) / (time.monotonic() - began)
        facts = {"step": step, "steps": len(steps), "loss": total, "learning_rate": learning_rate}
        observe({**facts, "trained_tokens_per_s": rate, "peak_memory_gb": peak_memory_gb()})
    save(model, tokenizer, run_dir, config)


@dataclass(frozen=True)
class TrainingTokens:
    """What `build_batch` reads of a sequence."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float | None] = field(kw_only=True)
    weight_versions: Sequence[int | None] = field(kw_only=True)


def pad_id_of(tokenizer: Any) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def optimizer_of(model: Any, config: Config) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)


def changed_by_training(model: Any) -> dict[str, torch.Tensor]:
    """The state of a model without its frozen base, which is in the model's own folder."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def set_rate(optimizer: Any, step: int, steps: int, config: Config) -> float:
    """The learning rate of a step: two steps of warm-up, then linearly to a twentieth."""
    learning_rate = config.learning_rate * min(1, (step + 1) / 3) * max(0.05, 1 - step / steps)
    for parameters in optimizer.param_groups:
        parameters["lr"] = learning_rate
    return learning_rate


def save(model: Any, tokenizer: Any, run_dir: Path, config: Config) -> None:
    """The trained model in the run's folder, as transformers and engines load it."""
    if config.lora_rank:
        model = model.merge_and_unload()
    model.save_pretrained(run_dir / "policy")
    tokenizer.save_pretrained(run_dir / "policy")


def times(started: float, taken: float, ended: float) -> dict[str, float]:
    """Seconds of waiting for rollouts and of training with publishing, and the share of the waiting."""
    waiting = (taken - started) / (ended - started)
    return {"rollout_s": taken - started, "train_s": ended - taken, "waiting": waiting}


def peak_memory_gb() -> float:
    """The most memory that the trainer has had: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def of_sampled(values_T: torch.Tensor, mask_T: torch.Tensor) -> list[float | None]:
    """Values of a token each, of all but the first; None where none was sampled. Shapes: (T - 1,), (T - 1,) -> (T,)."""
    return [None, *(v if known else None for v, known in zip(values_T.tolist(), mask_T.tolist(), strict=True))]


@contextlib.asynccontextmanager
async def calls_held(services: Services, config: Config) -> AsyncIterator[None]:
    """With `hold_calls` no model call runs in this block: those that ran have ended, new ones wait in the gateway."""
    if config.hold_calls:
        await services.gateway.pause_async()
    try:
        yield
    finally:
        if config.hold_calls:
            await services.gateway.resume_async()


def arithmetic(split: Any, n: int, seed: int) -> list[Row]:
    """The built-in problems as a data set: what the math agent of the examples is sent."""
    return [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems(split, n, seed=seed)]


def main() -> None:
    """Run the loop against services that are already up: see the README beside this file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("agent-runtime-arn", "store", "exp-id", "gateway-url", "policy-url", "run-dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--data", help="JSON lines, one payload each; without it: arithmetic problems")
    parser.add_argument("--eval-data", help="the same, never trained on: run before and after")
    parser.add_argument("--held-out", type=int, default=200, help="arithmetic problems that are never trained on")
    for name in ("steps", "groups", "rollouts", "staleness", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name))
    a = parser.parse_args()
    run_dir = Path(a.run_dir).resolve()

    config = Config(steps=a.steps, groups=a.groups, rollouts=a.rollouts, staleness=a.staleness, seed=a.seed)
    if a.data:
        rows = read_rows(a.data)
        held_out = read_rows(a.eval_data) if a.eval_data else []
    else:
        rows = arithmetic("train", config.steps * config.groups, config.seed)
        held_out = arithmetic("held_out", a.held_out, config.seed)

    def show(event: str, facts: dict[str, Any]) -> None:
        if event in ("step", "evaluated", "begins"):
            print(event, json.dumps({k: v for k, v in facts.items() if not isinstance(v, dict)}), flush=True)

    with (
        RolloutClient(a.agent_runtime_arn, a.store, a.exp_id, model_id="policy", tps_limit=200) as client,
        GatewayClient(a.gateway_url) as gateway,
        locked(run_dir),
        open_recording(run_dir, vars(config)) as recording,
    ):
        where = {"policy_url": a.policy_url, "run_dir": run_dir}
        services = Services(client=client, gateway=gateway, recording=recording, **where)
        try:
            asyncio.run(train(services, config, rows, held_out, show))
        except AgentCoreRLError as e:
            sys.exit(f"the run ended: {e}")


if __name__ == "__main__":
    main()
