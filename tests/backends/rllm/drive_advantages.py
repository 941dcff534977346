"""The recorded episodes through rLLM's own grouping and advantages. Prints, by branch, what its loss would take."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rllm.trainer.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups
from rllm.trainer.algorithms.config import AlgorithmConfig, CompactFilteringConfig, TransformConfig
from rllm.trainer.algorithms.transform import transform_episodes_to_trajectory_groups
from rllm.types import Episode, Step, Trajectory

from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.rllm import groups_to_rllm

sys.path.append(str(Path(__file__).parents[1]))
from recorded import Replay, recorded_episodes, requests_for


def main() -> None:
    episodes = recorded_episodes()
    replay = Replay(episodes)
    groups = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway)
    wanted = {f"{s.session_id}-{s.sequence_index}": s.advantage for s in to_samples(groups)}
    found: dict[str, list[float]] = {}
    made = []
    for entries in groups_to_rllm(groups):
        trajectories = [
            Trajectory(**{**t, "steps": [Step(**step) for step in t["steps"]]}) for t in entries["trajectories"]
        ]
        made.append(Episode(**{**entries, "trajectories": trajectories}))
    gathered, _ = transform_episodes_to_trajectory_groups(made, TransformConfig(), CompactFilteringConfig())
    collect_reward_and_advantage_from_trajectory_groups(gathered, AlgorithmConfig(use_precomputed_advantage=True))
    for group in gathered:
        for trajectory in group.trajectories:
            found[trajectory.uid] = [a for step in trajectory.steps for a in step.advantage]
    print("ADVANTAGES " + json.dumps({"wanted": wanted, "found": found}))


main()
