"""Run by test_slime_checkout.py inside a slime checkout: fill slime's own `Sample` and check it by slime's own rules."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay
from slime.utils.types import Sample

from agentcore_rl_toolkit.backends.service import RolloutService
from agentcore_rl_toolkit.backends.slime import generate as module
from agentcore_rl_toolkit.backends.slime.settings import SlimeSettings

sys.path.append(str(Path(__file__).parents[1]))
from recorded import EXPERT_LAYERS, EXPERT_TOP_K, Replay, recorded_episodes


async def main() -> None:
    replay = Replay(recorded_episodes(), by_input=False)
    settings = SlimeSettings(agent_runtime_arn="arn", s3_bucket="memory://r", exp_id="e")
    module.use(RolloutService(settings.service(), replay.client, replay.gateway))
    args = SimpleNamespace(num_layers=EXPERT_LAYERS, moe_router_topk=EXPERT_TOP_K, use_rollout_routing_replay=True)
    filled: list[Sample] = []
    for i in range(64):
        made = await module.generate(args, Sample(index=i, group_index=i // 8, prompt="p"), {"temperature": 1.0})
        for sample in made if isinstance(made, list) else [made]:
            sample._validate_response_metadata_lengths()
            again = Sample.from_dict(sample.to_dict())
            assert again.tokens == sample.tokens
            assert again.status is sample.status
            assert sample.effective_response_length == sum(sample.loss_mask)
        filled += made if isinstance(made, list) else [made]
    # slime stacks the routing of a whole batch: one sample without would end the run.
    routing = [torch.as_tensor(s.rollout_routed_experts) for s in filled]
    validate_rollout_routed_experts_for_replay(routing, args)
    assert all(len(r) == len(s.tokens) - 1 for r, s in zip(routing, filled, strict=True))
    print(f"64 rollouts filled, {sum(not s.remove_sample for s in filled)} samples with routing")


asyncio.run(main())
