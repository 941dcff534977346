"""Our functions as slime's own contract tests load them by name: `generate` over an endless supply of replayed episodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.backends.service import RolloutService
from agentcore_rl_toolkit.backends.slime import generate as module
from agentcore_rl_toolkit.backends.slime.settings import SlimeSettings

sys.path.append(str(Path(__file__).parents[1]))
from recorded import Replay, recorded_episodes

_replay = Replay([e for e in recorded_episodes(120) if e.kind == "multi_turn"], by_input=False)
_settings = SlimeSettings(agent_runtime_arn="arn", s3_bucket="memory://r", exp_id="contract")
module.use(RolloutService(_settings.service(), _replay.client, _replay.gateway))


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    return await module.generate(args, sample, sampling_params, evaluation=evaluation)
