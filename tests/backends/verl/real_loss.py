"""Run by test_real_verl.py in an environment that has verl: verl's own loss and rollout correction on a recorded batch.

Prints JSON: the largest difference between its gradient and that of docs/algorithms.md, with and without the correction.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

sys.path.append(str(Path(__file__).parents[1]))
from objectives import batch, gradient, truncated

rows = batch()
config = ActorConfig(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True)  # verl's defaults otherwise
loss_of = get_policy_loss_fn(config.policy_loss.get("loss_mode", "vanilla"))
found = {"defaults": [config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c, config.loss_agg_mode]}
token_weights, _ = compute_rollout_correction_weights(
    rows.old - rows.sampled, rows.mask, rollout_is="token", rollout_is_threshold=2.0
)
for name, weights, correction in (
    ("plain", None, None),
    ("corrected", token_weights, truncated(rows.old, rows.sampled, 2.0)),
):
    new = rows.new.clone().requires_grad_()
    advantages = rows.advantages[:, None].expand_as(rows.mask)
    loss, _ = loss_of(
        old_log_prob=rows.old,
        log_prob=new,
        advantages=advantages,
        response_mask=rows.mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    expected = gradient(rows, against=rows.old, low=0.2, high=0.2, dual=3.0, correction=correction)
    found[name] = float((new.grad - expected).abs().max())
print(json.dumps(found))
