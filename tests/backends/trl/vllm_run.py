"""Run by real_runs.py in an environment that has TRL: GRPO steps in vLLM server mode, against vLLM's stand-in.

`cases` returns what the server was told, in which order, and what TRL made of the rollouts.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import replay_run
import torch
import vllm_stand_in
from trl.generation.vllm_client import VLLMClient

from agentcore_rl_toolkit.errors import ConfigError, WeightsError
from agentcore_rl_toolkit.trajectory import Turn
from agentcore_rl_toolkit.weights.arrival import MAX_MEAN_GAP

sys.path.append(str(Path(__file__).parents[1]))
from recorded import Episode, Replay, recorded_episodes

CAP = 3.0


def steps(out: Path, *, learning_rate: float = 1e-2, by_the_model: bool = False, **more: Any) -> dict[str, Any]:
    """Two steps. `by_the_model`: what is recorded has the logprobs of the weights that the run begins with."""
    server = vllm_stand_in.VllmServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    training = {
        "max_steps": 2,
        "learning_rate": learning_rate,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": CAP,
    }
    episodes = sampled_by(replay_run.tiny_model(), recorded_episodes(128)) if by_the_model else recorded_episodes(128)
    replay, seen = Replay(episodes, by_input=False), list[dict[str, Any]]()
    gateway, announce = replay.gateway, replay.gateway.set_weight_version

    def set_weight_version(version: int) -> None:
        server.calls.append(f"version {version}")
        announce(version)

    gateway.set_weight_version = set_weight_version  # type: ignore[method-assign]  # the order is what is asked
    trainer = replay_run.trainer_for(replay_run.settings(None, out, training=training, **more), replay, seen)
    trainer.rollouts.on_batch = lambda *batch: server.calls.append("rollouts")
    try:
        trainer.train()
    except WeightsError as e:
        return {"error": str(e), "order": server.calls, "gaps": logged(trainer)}
    finally:
        server.shutdown()
        server.server_close()
    ratio_gap, trained = ratios(seen)
    first, last = server.updates[0], server.updates[-1]
    return {
        "order": server.calls,
        "names_are_the_models_own": set(last) == {name for name, _ in replay_run.tiny_model().named_parameters()},
        "moved": max(float((last[n] - first[n]).abs().max()) for n in last),
        "last_gap": max(float((last[n] - w).abs().max()) for n, w in final(trainer.model).items()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "ratio_gap": ratio_gap,
        "trained_tokens": trained,
    }


def logged(trainer: Any) -> list[float]:
    return [e["agentcore/logprob_gap_mean"] for e in trainer.state.log_history if "agentcore/logprob_gap_mean" in e]


def final(model: Any) -> dict[str, torch.Tensor]:
    if hasattr(model, "merge_adapter"):
        return replay_run.merged_by_hand(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def ratios(seen: list[dict[str, Any]]) -> tuple[float, int]:
    """Largest difference between TRL's importance ratio and the one of the definition, and over how many tokens."""
    gap, trained = 0.0, 0
    for output in seen:
        mask_BT = torch.tensor(output["completion_mask"]) * torch.tensor(output["tool_mask"])
        recorded_BT = torch.nan_to_num(torch.tensor(output["sampling_per_token_logps"]))
        wanted_BT = torch.exp((torch.tensor(output["old_per_token_logps"]) - recorded_BT) * mask_BT).clamp(max=CAP)
        gap = max(gap, float((torch.tensor(output["importance_sampling_ratio"]) - wanted_BT).abs().max()))
        trained += int(mask_BT.sum())
    return gap, trained


def sampled_by(model: Any, episodes: list[Episode]) -> list[Episode]:
    """The same episodes with the logprobs that this model gives their tokens."""
    return [replace(e, turns=tuple(_sampled_by(model, turn) for turn in e.turns)) for e in episodes]


@torch.inference_mode()
def _sampled_by(model: Any, turn: Turn) -> Turn:
    ids_BT = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
    logprobs_TV = model(input_ids=ids_BT).logits[0, len(turn.prompt_ids) - 1 : -1].log_softmax(-1)
    chosen_T = logprobs_TV.gather(1, torch.tensor(turn.completion_ids)[:, None])[:, 0]
    return replace(turn, logprobs=chosen_T.tolist())


def reports_at_1(out: Path) -> str:
    """How a run at another temperature ends with vLLM as it starts by default."""
    server = vllm_stand_in.VllmServer()
    server.logprobs_mode = "raw_logprobs"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url, "temperature": 0.7}
    config = replay_run.settings(None, out, training=at)
    try:
        replay_run.trainer_for(config, Replay(recorded_episodes(64), by_input=False), []).train()
    except ConfigError as e:
        return str(e)
    finally:
        server.shutdown()
        server.server_close()
    return "it ran"


def cases(folder: Path) -> dict[str, Any]:
    VLLMClient.init_communicator = vllm_stand_in.join_without_cuda
    return {
        "full": steps(folder / "full"),
        "reports_at_1": reports_at_1(folder / "raw"),
        "lora": steps(folder / "lora-vllm", lora=replay_run.LORA),
        "keeps_its_first": steps(
            folder / "keeps", learning_rate=0.1, by_the_model=True, max_mean_logprob_gap=MAX_MEAN_GAP
        ),
    }
