"""Run by test_real_slime.py with slime's imports and Megatron: slime's own policy loss on a recorded batch.

Prints JSON: the largest difference between its gradient and that of docs/algorithms.md, with and without the correction.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import mpu
from slime.backends.megatron_utils import loss as slime_loss
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

sys.path.append(str(Path(__file__).parents[1]))
from objectives import ROLLOUT_OF_ROW, Batch, T, batch, gradient, truncated

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.compiler.set_stance("force_eager")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mpu.initialize_model_parallel()


def slimes_gradient(rows: Batch, *, use_tis: bool) -> torch.Tensor:
    """d loss / d logprob of a step with these rows, as slime's actor computes it. Shapes: (B, T)."""
    new = rows.new.clone().requires_grad_()
    lengths = [T] * len(new)
    args = Namespace(
        advantage_estimator="grpo",
        calculate_per_token_loss=False,
        custom_tis_function_path=None,
        entropy_coef=0.0,
        eps_clip=0.2,
        eps_clip_c=None,
        eps_clip_high=0.28,
        get_mismatch_metrics=False,
        rollout_top_p=1.0,
        tis_clip=2.0,
        tis_clip_low=0.0,
        use_kl_loss=False,
        use_opsm=False,
        use_rollout_logprobs=False,
        use_tis=use_tis,
    )
    tokens = torch.zeros(max(ROLLOUT_OF_ROW) + 1).index_add(0, torch.tensor(ROLLOUT_OF_ROW), rows.mask.sum(1))
    step = {
        "advantages": [a.expand(T) for a in rows.advantages],
        "log_probs": list(rows.old),
        "rollout_log_probs": list(rows.sampled),
        "loss_masks": list(rows.mask),
        "response_lengths": lengths,
        "total_lengths": lengths,
        "unconcat_tokens": [torch.zeros(T, dtype=torch.long)] * len(new),
        "rollout_mask_sums": [tokens[r] for r in ROLLOUT_OF_ROW],
    }
    given = {"log_probs": list(new), "entropy": [torch.zeros(T)] * len(new)}
    slime_loss.get_log_probs_and_entropy = lambda *_, **__: (None, given)
    reduce = get_sum_of_sample_mean(lengths, lengths, step["loss_masks"], step["rollout_mask_sums"], False)
    loss, _ = slime_loss.policy_loss_function(args, step, torch.zeros(1), reduce)
    loss.backward()
    assert new.grad is not None
    return new.grad / (max(ROLLOUT_OF_ROW) + 1)  # Megatron divides by the step's rollouts


rows = batch()
found = {}
for name, use_tis, correction in (("plain", False, None), ("tis", True, truncated(rows.old, rows.sampled, 2.0))):
    expected = gradient(rows, against=rows.old, low=0.2, high=0.28, correction=correction, per_rollout=True)
    found[name] = float((slimes_gradient(rows, use_tis=use_tis) - expected).abs().max())
print(json.dumps(found))
