"""Run by test_rllm_checkout.py: what rLLM and its trainers log of a step whose tokens other weights sampled, and what follows.

Their own code computes and logs it. verl's actor needs GPUs and Tinker is a service, so both trainers' logprobs are given.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import tinker
import torch
from omegaconf import OmegaConf
from rllm.trainer.tinker.tinker_metrics_utils import compute_kl_and_entropy_metrics
from rllm.trainer.verl.verl_backend import VerlBackend
from rllm.utils import Tracking
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import attention_utils, npu_flash_attn_utils
from verl.workers.config import ActorConfig

from agentcore_rl_toolkit.backends.rllm.recording import attach
from agentcore_rl_toolkit.errors import WeightsError

PROMPT, RESPONSE = 3, 4
OWN_T = torch.tensor([-1.0, -2.0, -0.5, -1.5])  # the trainer's logprobs of the response
MASK_T = torch.tensor([1, 1, 0, 1])  # the third token is a tool's


def verl_metrics(gap: float, *, bypass: bool) -> dict[str, Any]:
    """rLLM's step on verl, from the engine's logprobs to the update's metrics. The engine's are larger by ``gap``."""
    one = torch.ones(2, PROMPT + RESPONSE, dtype=torch.long)
    columns = {
        "prompts": one[:, :PROMPT],
        "responses": one[:, :RESPONSE],
        "input_ids": one,
        "attention_mask": one,
        "position_ids": torch.arange(PROMPT + RESPONSE).expand(2, -1),
        "response_mask": MASK_T.expand(2, -1),
        "rollout_log_probs": (OWN_T + gap).expand(2, -1),
    }

    class Workers:
        def compute_log_prob(self, batch: Any) -> TensorDict:
            padded_T = torch.nn.functional.pad(OWN_T, (PROMPT - 1, 1))  # place t is of token t + 1
            nested = torch.nested.as_nested_tensor([padded_T, padded_T], layout=torch.jagged)
            return TensorDict({"log_probs": nested, "entropy": nested}, batch_size=2)

    actor = {"loss_agg_mode": "token-mean"}
    config = {"trainer": {"balance_batch": False}, "rllm": {}}
    backend = SimpleNamespace(
        config=OmegaConf.create({**config, "actor_rollout_ref": {"actor": actor, "rollout": {"temperature": 1.0}}}),
        algorithm_config=SimpleNamespace(rollout_correction=SimpleNamespace(bypass_mode=bypass, tis_mode=None)),
        actor_rollout_wg=Workers(),
        use_reference_policy=False,
    )
    batch = DataProto.from_dict(tensors=columns)
    state = SimpleNamespace(metrics={}, timing_dict={}, backend_batch=batch)
    asyncio.run(VerlBackend.process_backend_batch(backend, state))
    batch = state.backend_batch.batch
    _, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob=batch["old_log_probs"],
        log_prob=OWN_T.expand(2, -1),
        advantages=torch.ones(2, RESPONSE),
        response_mask=batch["response_mask"],
        config=ActorConfig(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True),
    )
    return {**state.metrics, **metrics}


def tinker_metrics(gap: float) -> dict[str, Any]:
    inputs = {"logprobs": OWN_T + gap, "mask": MASK_T.float()}
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1] * RESPONSE),
        loss_fn_inputs={name: tinker.TensorData.from_torch(values) for name, values in inputs.items()},
    )
    found: dict[str, Any] = compute_kl_and_entropy_metrics([datum], [OWN_T])
    return found


def without_flash_attention() -> None:
    """verl takes four functions from flash-attn on GPUs. It has the same for other machines."""
    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    attention_utils._get_attention_functions = lambda: tuple(getattr(npu_flash_attn_utils, name) for name in names)


def main() -> None:
    without_flash_attention()
    recorder = attach(sys.argv[1], {"trainer": "rllm"})
    tracking = Tracking("test", "test", "console", config={})
    found = {}
    for gap in (0.125, 0.5):
        logged = {
            "verl": verl_metrics(gap, bypass=False),
            "verl with the sampler's": verl_metrics(gap, bypass=True),
            "tinker": tinker_metrics(gap),
        }
        for trainer, metrics in logged.items():
            try:
                tracking.log(metrics, 1, trajectory_groups=[])
                ended = ""
            except WeightsError as e:
                ended = str(e)
            found[f"{trainer}, {gap}"] = ended
    recorder.close()
    print("GAPS " + json.dumps(found))


main()
