"""Run by test_rllm_checkout.py: rLLM's remote engine, gateway manager, grouping and advantages over our client and gateway.

Only the inference engine is not rLLM's: `VerlEngine` here says where the servers are, which is all the gateway manager asks.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import sys
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from rllm.engine.remote_agent_flow_engine import RemoteAgentFlowEngine
from rllm.engine.remote_runtime import RemoteRuntimeConfig, create_remote_runtime
from rllm.gateway.manager import GatewayManager
from rllm.trainer.algorithms import (
    AlgorithmConfig,
    CompactFilteringConfig,
    TransformConfig,
    collect_reward_and_advantage_from_trajectory_groups,
    transform_episodes_to_trajectory_groups,
)
from rllm.trainer.unified_trainer import UnifiedTrainer
from rllm.utils import Tracking

from agentcore_rl_toolkit.backends.rllm.recording import attach

FILTERING = {"enable": True, "mask_error": True, "mask_timeout": True}


class VerlEngine:
    def __init__(self, address: str) -> None:
        self.server_addresses = [address]
        self.train_sampling_params = {"temperature": 1.0}
        self.val_sampling_params = {"temperature": 0.0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def roll(engine: RemoteAgentFlowEngine, gateway: GatewayManager, payload: dict[str, Any], n: int) -> list[Any]:
    await gateway.aset_weight_version(3)
    return await engine.execute_tasks([payload] * n, task_ids=["task"] * n)


def whole_steps(trajectory: Any) -> list[Any]:
    """A trajectory's steps with their whole prompts; rLLM's branch `terminal-rl` keeps what each adds to the one before."""
    steps = list(trajectory.steps)
    if not any(hasattr(step, "prompt_ids_suffix") for step in steps):
        return steps
    from rllm.types import resolve_step_deltas

    return list(resolve_step_deltas(steps))


def main() -> None:
    at = json.loads(sys.argv[1])
    config = OmegaConf.create(
        {
            "rllm": {"gateway": {"host": "127.0.0.1", "port": free_port(), "cumulative_token_mode": True}},
            "model": {"name": at["tokenizer"]},  # the built-in engine takes token ids only
        }
    )
    recorder = attach(at["run"], {"trainer": "rllm"}, tokenizer=at["tokenizer"], filtering=FILTERING)
    assert pickle.loads(pickle.dumps(recorder)) is recorder  # as it arrives in the process of verl's trainer
    gateway = GatewayManager(config, mode="process")
    gateway.start(VerlEngine(at["policy"]))  # type: ignore[arg-type]  # found by the name of its class
    settings = {"agent_runtime_arn": at["arn"], "s3_bucket": at["store"], "tps_limit": 100}
    runtime = create_remote_runtime(
        RemoteRuntimeConfig(enabled=True, agentcore=settings), exp_id="rllm", model_id="policy"
    )
    runtime.initialize()
    try:
        engine = RemoteAgentFlowEngine(runtime, gateway, session_timeout=90)
        engine.set_training_step(1)
        episodes = asyncio.run(roll(engine, gateway, at["payload"], at["n"]))
    finally:
        runtime.shutdown()
        gateway.stop()
    shown = {}
    for name, mask in (("kept", False), ("masked", True)):
        filtering = CompactFilteringConfig(**{**FILTERING, "enable": mask})
        groups, _ = transform_episodes_to_trajectory_groups(episodes, TransformConfig(), filtering)
        collect_reward_and_advantage_from_trajectory_groups(groups, AlgorithmConfig())
        shown[name] = [
            [(t.reward, [step.advantage for step in t.steps]) for t in group.trajectories] for group in groups
        ]
    tracking = Tracking("test", "test", "console", config={})
    tracking.log({"actor/pg_loss": 0.25, "batch/empty": 0}, 1, episodes=episodes, trajectory_groups=groups)
    UnifiedTrainer.fit(SimpleNamespace(fit_async=lambda: asyncio.sleep(0)))  # type: ignore[arg-type]
    recorder.close()
    turns = [
        {
            "session": episode.session_id,
            "reason": episode.termination_reason.name,
            "reward": episode.trajectories[0].reward if episode.trajectories else None,
            "error": (episode.metadata or {}).get("error"),
            "steps": [
                [list(s.prompt_ids), list(s.response_ids), list(s.logprobs), s.weight_version]
                for t in episode.trajectories
                for s in whole_steps(t)
            ],
        }
        for episode in episodes
    ]
    print("EPISODES " + json.dumps({"episodes": turns, "groups": shown}))


main()
