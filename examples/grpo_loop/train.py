"""GRPO on a deployed agent: the whole loop, one file.

Every step: run groups of rollouts of the same problem, turn their rewards into advantages, and make the sampled tokens
of the better ones more likely. The agent runs elsewhere (AgentCore Runtime, or the local one) and knows nothing of
this; its reward comes back through the object store, its tokens through the model gateway, exactly as sampled.
The data set is a list of payloads: what the agent is sent, one input each.

    reward r_i of rollout i in a group of G          advantage A_i = (r_i - mean(r)) / (std(r) + eps)
    ratio  rho_t = pi(token_t) / pi_sampled(token_t)
    loss = - mean over sampled tokens of  min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i)

Sources: GRPO, arXiv:2402.03300; the asymmetric clip and the mean over tokens, DAPO, arXiv:2503.14476.
Shapes: _G rollouts of a group, _B sequences of a batch, _T tokens of a sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import (
    CollectConfig,
    Group,
    GroupRequest,
    Recording,
    check_usable,
    collect_async,
    open_recording,
    summarize,
)
from agentcore_rl_toolkit.backends.data import read_rows
from agentcore_rl_toolkit.errors import AgentCoreRLError, CaptureError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.policy import admin_key, load_policy, problems

Observer = Callable[[str, dict[str, Any]], None]  # (event name, its facts)
Row = Mapping[str, Any]  # one input: the payload that the agent is sent


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 14
    groups: int = 8  # inputs a step
    rollouts: int = 8  # rollouts of each input
    learning_rate: float = 6e-4  # two steps of warm-up, then linearly to a twentieth: a constant one ends in forgetting
    clip_low: float = 0.2
    clip_high: float = 0.28
    minibatches: int = 4  # optimizer steps per batch of rollouts
    max_grad_norm: float = 1.0
    lora_rank: int = 0  # 0 trains all weights; else adapters of this rank on every linear layer (needs peft)
    max_logprob_gap: float = 1e-3  # between recorded and recomputed logprobs, at the same weights
    max_concurrent: int = 64  # sessions alive at once
    rollout_deadline_s: float = 120.0  # a rollout that takes longer is masked out, the step goes on
    policy_failures: str = "score"  # out of tokens, turns or context: the agent's reward for that, or "mask" them out
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Services:
    """Where the parts are. `policy_url` serves the model being trained, `model_dir` (None: the built-in one); agents reach
    it through the gateway. `recording` keeps every rollout in the run's folder, for `agentcore-rl view`.
    """

    client: RolloutClient
    gateway: GatewayClient
    policy_url: str
    run_dir: Path
    model_dir: Path | None = None
    recording: Recording | None = None


def group_advantages(rewards_G: Sequence[float | None], eps: float = 1e-4) -> list[float | None]:
    """Standardised rewards of one group; None (a rollout that cannot be used) stays None and moves no baseline."""
    known = [r for r in rewards_G if r is not None]
    if not known:
        return list(rewards_G)
    mean = sum(known) / len(known)
    std = math.sqrt(sum((r - mean) ** 2 for r in known) / max(1, len(known) - 1))
    return [None if r is None else (r - mean) / (std + eps) for r in rewards_G]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded sequences. Position t holds what is needed to predict token t from the tokens before it."""

    token_ids_BT: torch.Tensor
    mask_BT: torch.Tensor  # 1.0 where the token was sampled by the policy and is trained
    sampled_logprobs_BT: torch.Tensor  # 0.0 only where mask is 0
    advantages_B: torch.Tensor


def build_batch(rows: Sequence[tuple[Any, float]], pad_id: int, device: Any = "cpu") -> Batch:
    """(TrainingSequence, advantage) pairs to tensors. The ids are the gateway's own: nothing is tokenised here."""
    T = max(len(sequence.token_ids) for sequence, _ in rows)
    token_ids_BT = torch.full((len(rows), T), pad_id)
    mask_BT, logprobs_BT = torch.zeros(len(rows), T), torch.zeros(len(rows), T)
    for b, (sequence, _) in enumerate(rows):
        t = len(sequence.token_ids)
        token_ids_BT[b, :t] = torch.tensor(sequence.token_ids)
        mask_BT[b, :t] = torch.tensor(sequence.loss_mask, dtype=torch.float32)
        logprobs_BT[b, :t] = torch.tensor([0.0 if lp is None else lp for lp in sequence.logprobs])
    advantages_B = torch.tensor([advantage for _, advantage in rows])
    return Batch(
        token_ids_BT=token_ids_BT.to(device),
        mask_BT=mask_BT.to(device),
        sampled_logprobs_BT=logprobs_BT.to(device),
        advantages_B=advantages_B.to(device),
    )


def token_logprobs(model: Any, token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(token_t | tokens before t), and pi's entropy, (B, T) -> 2 x (B, T-1). Padding is right: it needs no mask."""
    logits_BTV = model(input_ids=token_ids_BT).logits[:, :-1].float()
    logprobs_BTV = torch.log_softmax(logits_BTV, -1)
    entropies = [-(row_TV.exp() * row_TV).sum(-1) for row_TV in logprobs_BTV.detach()]  # row by row: V is large
    return logprobs_BTV.gather(2, token_ids_BT[:, 1:, None])[..., 0], torch.stack(entropies)


def grpo_loss(
    logprobs_BT: torch.Tensor, batch: Batch, tokens: float, config: Config
) -> tuple[torch.Tensor, dict[str, float]]:
    """The clipped loss above, and what it says about the update. `tokens`: what the sum is divided by."""
    mask_BT, old_BT = batch.mask_BT[:, 1:], batch.sampled_logprobs_BT[:, 1:]
    log_ratio_BT = (logprobs_BT - old_BT) * mask_BT
    ratio_BT, A_BT = log_ratio_BT.exp(), batch.advantages_B[:, None]
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -(torch.minimum(ratio_BT * A_BT, clipped_BT * A_BT) * mask_BT).sum() / tokens
    k3_BT = ratio_BT - 1 - log_ratio_BT  # estimates KL(sampled || current), token by token
    return loss, {
        "logprob_gap": log_ratio_BT.abs().max().item(),
        "clip_fraction": (((ratio_BT != clipped_BT) * mask_BT).sum() / mask_BT.sum()).item(),
        "kl": ((k3_BT * mask_BT).sum() / mask_BT.sum()).item(),
    }


def train_on(
    groups: Sequence[Group], model: Any, optimizer: Any, pad_id: int, config: Config, rng: Any, recording: Any = None
) -> dict:
    """One GRPO update. Returns its metrics; trains nothing (and says so) when no rollout is usable."""
    rows: list[tuple[Any, float, tuple[str, int]]] = []  # sequence, advantage, whose sequence it is
    sampled = 0
    for group in groups:
        advantages_G = group_advantages(group.rewards)  # None for every rollout that is not usable
        if recording is not None:
            recording.advantages(group, advantages_G)
        for rollout, advantage in zip(group.rollouts, advantages_G, strict=True):
            if advantage is not None:
                sampled += rollout.trajectory.report.sampled_tokens
                sequences = enumerate(rollout.trajectory.sequences)
                rows += [(sequence, advantage, (rollout.session_id, i)) for i, sequence in sequences]
    trained = sum(sum(sequence.loss_mask) for sequence, _, _ in rows)
    metrics = {"sequences": len(rows), "sampled_tokens": sampled, "trained_tokens": trained, "logprob_gap": None}
    rng.shuffle(rows)
    for minibatch in range(config.minibatches):
        part = rows[minibatch :: config.minibatches]
        if not part:
            continue
        batch = build_batch([row[:2] for row in part], pad_id, next(model.parameters()).device)
        # Every token of the step weighs the same, whichever minibatch it falls into.
        logprobs_BT, entropies_BT = token_logprobs(model, batch.token_ids_BT)
        if recording is not None:
            recording.trained_batch([row[2] for row in part], logprobs_BT.tolist(), entropies_BT.tolist(), minibatch)
        loss, facts = grpo_loss(logprobs_BT, batch, trained / config.minibatches, config)
        if minibatch == 0:  # only here are the weights the ones that sampled: trainer and sampler must agree to ~1e-5
            metrics["logprob_gap"] = facts["logprob_gap"]
            if not facts["logprob_gap"] <= config.max_logprob_gap:
                raise CaptureError(f"recorded and recomputed logprobs differ by {facts['logprob_gap']}: another model?")
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        metrics |= {"loss": loss.item(), "grad_norm": grad_norm.item()}
        metrics |= {"kl": facts["kl"], "clip_fraction": facts["clip_fraction"]}
    return metrics


def publish(model: Any, version: int, services: Services) -> None:
    """Put the weights in place at the policy server; from its next token on it samples from them and says `version`."""
    path = services.run_dir / "weights" / f"{version:04d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    with merged(model) as weights:
        save_file(weights, path)
    body = json.dumps({"path": str(path), "version": version}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {admin_key(services.policy_url)}"}
    request = urllib.request.Request(f"{services.policy_url}/update_weights", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        reply.read()
    for old in path.parent.glob("*.safetensors"):
        if int(old.stem) < version:
            old.unlink()


def load_model(services: Services, config: Config) -> tuple[Any, Any]:
    """The model to train, on a GPU where there is one, and its tokenizer."""
    model, tokenizer = load_policy(services.model_dir)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if config.lora_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=config.lora_rank, target_modules="all-linear"))
    return model, tokenizer


@contextlib.contextmanager
def merged(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The weights that an engine loads, by name. Adapters are added to them as long as the block runs.

    An output head that shares its matrix with the embedding (tied weights) is there once.
    """
    adapters = hasattr(model, "merge_adapter")
    if adapters:
        model.merge_adapter()
    try:
        found = model.get_base_model() if adapters else model
        named = {n.replace(".base_layer", ""): p for n, p in found.named_parameters() if "lora_" not in n}
        yield {name: parameter.detach().contiguous().cpu() for name, parameter in named.items()}
    finally:
        if adapters:
            model.unmerge_adapter()


def rows_of(step: int, rows: Sequence[Row], config: Config) -> list[Row]:
    """The inputs of a step: the data set as it is given, then again and again in another order each time."""
    chosen = []
    for place in range(step * config.groups, (step + 1) * config.groups):
        epoch, at = divmod(place, len(rows))
        order = list(range(len(rows)))
        if epoch:
            random.Random(f"{config.seed}/{epoch}").shuffle(order)
        chosen.append(rows[order[at]])
    return chosen


async def run_groups(
    chosen: Sequence[Row], n: int, name: str, services: Services, config: Config, observe: Observer, step: Any = None
) -> list[Group]:
    """n rollouts of each input. The row of the data set is the payload, as in every backend."""
    where = services.recording and services.recording.at(name if step is None else "train", step)
    requests = [GroupRequest(input_id=f"{name}/{i:04d}", payload=row, n=n) for i, row in enumerate(chosen)]
    observe("rollouts_started", {"phase": name, "total": n * len(requests)})
    return await collect_async(
        requests,
        client=services.client,
        gateway=services.gateway,
        config=CollectConfig(
            max_concurrent=config.max_concurrent,
            rollout_timeout_s=config.rollout_deadline_s,
            policy_failures=config.policy_failures,
        ),
        weight_version=step,  # version k is what k steps made
        on_rollout=lambda rollout: observe("rollout", {"phase": name, "rollout": rollout}),
        recording=where,
    )


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """Both means of the rewards, tool use, and how rollouts ended. A mean of nothing is None, not zero.

    `reward` is over all rollouts but those that the infrastructure failed (`scored` of them), failures of agent and policy as
    0; `reward_ok` over those that ended `ok` (`ok` of them). An agent that returns no `metrics.tool_calls` has no tool use,
    neither none nor some.
    """
    stats = summarize(groups)
    good = [rollout for group in groups for rollout in group.usable]
    means = [sum(g) / len(g) for group in groups if (g := [r.score for r in group.rollouts if r.score is not None])]
    spread = math.sqrt(sum((m - sum(means) / len(means)) ** 2 for m in means) / len(means)) if means else None
    tools = [m["tool_calls"] > 0 for r in good if "tool_calls" in (m := r.record.get("metrics") or {})]
    return {
        **stats.evaluation(),
        "reward_spread": spread,  # standard deviation over the groups' mean rewards
        "tool_use": sum(tools) / len(tools) if tools else None,
        "rollouts": stats.rollouts,
        "usable": stats.usable,
        "groups_that_differ": sum(len(set(g.rewards) - {None}) > 1 for g in groups),  # elsewhere every advantage is 0
        "branches": sum(r.trajectory.report.branches for r in good),
    }


async def train(
    services: Services, config: Config, rows: Sequence[Row], held_out: Sequence[Row], observe: Observer
) -> None:
    """The loop. State is saved after every step; call again with the same `run_dir` to go on where it stopped.

    ``rows`` are trained on; ``held_out``, which may be empty, is run before and after.
    Raises: RolloutError when no rollout of the first batch is usable.
    """
    torch.manual_seed(config.seed)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    model, tokenizer = load_model(services, config)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    checkpoint = services.run_dir / "checkpoint.pt"
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, map_location=model.device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["steps"]
        rollouts_done = len(held_out) + done * config.groups * config.rollouts
        observe("resumed", {"steps_done": done, "rollouts_done": rollouts_done})
    await asyncio.to_thread(publish, model, done, services)
    if done == 0 and held_out:
        groups = await run_groups(held_out, 1, "before", services, config, observe)
        check_usable(groups)
        observe("evaluated", {"when": "before", **summarise(groups)})

    for step in range(done, config.steps):
        started = time.monotonic()
        chosen = rows_of(step, rows, config)
        groups = await run_groups(chosen, config.rollouts, f"step-{step:04d}", services, config, observe, step)
        if step == 0:
            check_usable(groups)
        collected = time.monotonic()
        learning_rate = config.learning_rate * min(1, (step + 1) / 3) * max(0.05, 1 - step / config.steps)
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate
        rng = random.Random(config.seed * 1_000_003 + step)
        metrics = await asyncio.to_thread(train_on, groups, model, optimizer, pad_id, config, rng, services.recording)
        await asyncio.to_thread(publish, model, step + 1, services)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)
        times = {"rollout_s": collected - started, "train_s": time.monotonic() - collected}
        observe("step", {"step": step, "learning_rate": learning_rate, **summarise(groups), **metrics, **times})

    if held_out:
        groups = await run_groups(held_out, 1, "after", services, config, observe)
        observe("evaluated", {"when": "after", **summarise(groups)})
    save_dir = services.run_dir / "policy"
    if config.lora_rank:
        model = model.merge_and_unload()
    model.save_pretrained(save_dir)
    tokenizer.save_pretrained(save_dir)


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
    parser.add_argument("--gateway-admin-key")
    parser.add_argument("--held-out", type=int, default=200, help="arithmetic problems that are never trained on")
    for name in ("steps", "groups", "rollouts", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name))
    a = parser.parse_args()
    run_dir = Path(a.run_dir).resolve()
    run_dir.mkdir(parents=True, exist_ok=True)

    config = Config(steps=a.steps, groups=a.groups, rollouts=a.rollouts, seed=a.seed)
    if a.data:
        rows = read_rows(a.data)
        held_out = read_rows(a.eval_data) if a.eval_data else []
    else:
        rows = arithmetic("train", config.steps * config.groups, config.seed)
        held_out = arithmetic("held_out", a.held_out, config.seed)

    def show(event: str, facts: dict[str, Any]) -> None:
        if event in ("step", "evaluated", "resumed"):
            print(event, json.dumps({k: v for k, v in facts.items() if not isinstance(v, dict)}), flush=True)

    with (
        RolloutClient(a.agent_runtime_arn, a.store, a.exp_id, model_id="policy", tps_limit=200) as client,
        GatewayClient(a.gateway_url, admin_key=a.gateway_admin_key) as gateway,
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
