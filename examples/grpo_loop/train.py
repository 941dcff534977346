"""GRPO on a deployed agent, as a script: `agentcore-rl train` without its command line.

These services must run: an agent on AgentCore Runtime (or the local runtime), a gateway, and its engine. The loop is one function
in `agentcore_rl_toolkit/backends/training/loop.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import open_recording
from agentcore_rl_toolkit.backends.training.loop import train
from agentcore_rl_toolkit.backends.training.settings import LoopSettings, Services, State
from agentcore_rl_toolkit.backends.training.torch_client import TorchClient, TorchSettings
from agentcore_rl_toolkit.client.data import read_rows
from agentcore_rl_toolkit.errors import AgentCoreRLError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.policy import problems
from agentcore_rl_toolkit.runs import locked
from agentcore_rl_toolkit.weights import EngineAddress


def show(event: str, facts: dict[str, Any]) -> None:
    """Print steps and evaluations."""
    if event in ("step", "evaluated", "begins"):
        print(event, json.dumps({k: v for k, v in facts.items() if not isinstance(v, dict)}), flush=True)


async def run(settings: LoopSettings, services: Services, policy_url: str, rows: Any, held_out: Any) -> None:
    """Train the built-in model, from the run's last checkpoint if there is one."""
    resumed = State.read(services.run_dir)
    training = TorchClient.open(
        TorchSettings(seed=settings.step.seed),
        resumed.state if resumed else None,
        run_dir=services.run_dir,
        engine=EngineAddress(url=policy_url, engine="policy", model="policy"),
    )
    try:
        await train(services, training, settings, rows, held_out, show, resumed=resumed)
        training.save_policy()
    finally:
        await training.close("success")


def main() -> None:
    """Train with services that are already running. The README in this folder starts them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("agent-runtime-arn", "store", "exp-id", "gateway-url", "policy-url", "run-dir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--data", help="file with one payload per line [default: word problems]")
    parser.add_argument("--eval-data", help="payloads of the evaluations before and after the training")
    parser.add_argument("--held-out", type=int, default=200, help="number of word problems in an evaluation")
    for name, default in {"steps": 13, "groups": 8, "rollouts": 8, "staleness": 0, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    run_dir = Path(a.run_dir).resolve()

    settings = LoopSettings(
        steps=a.steps,
        groups=a.groups,
        rollouts=a.rollouts,
        max_concurrent=64,
        rollout_timeout_s=120.0,
        learning_rate=6e-4,
        schedule="linear",  # a constant learning rate ends in forgetting
        warmup_steps=2,
        beta2=0.99,
        max_grad_norm=1.0,
        clip_low=0.2,
        clip_high=0.28,
        minibatches=4,
        max_staleness=a.staleness,
        checkpoint_every=1,
        seed=a.seed,
    )
    if a.data:
        rows = read_rows(a.data)
        held_out = read_rows(a.eval_data) if a.eval_data else []
    else:
        splits: Any = (("train", a.steps * a.groups), ("held_out", a.held_out))
        rows, held_out = (
            [{"prompt": p.prompt, "answer": p.answer} for p in problems(split, n, seed=a.seed)] for split, n in splits
        )
    with (
        RolloutClient(a.agent_runtime_arn, a.store, a.exp_id, model_id="policy", tps_limit=200) as client,
        GatewayClient(a.gateway_url) as gateway,
        locked(run_dir),
        open_recording(run_dir, vars(a)) as recording,
    ):
        services = Services(client=client, gateway=gateway, run_dir=run_dir, recording=recording)
        try:
            asyncio.run(run(settings, services, a.policy_url, rows, held_out))
            recording.finished(steps=a.steps)
        except AgentCoreRLError as e:
            sys.exit(f"the run ended: {e}")


if __name__ == "__main__":
    main()
