"""TRL's GRPOTrainer on the Strands math agent: runtime, gateway, policy server and trainer on this machine, no GPU.

Prints the reward on problems that are never trained on, before and after. The README in this folder has the output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import CollectConfig, Group, GroupRequest, collect, summarize
from agentcore_rl_toolkit.backends.settings import read_settings
from agentcore_rl_toolkit.backends.trl.adapter import make_trainer
from agentcore_rl_toolkit.backends.trl.settings import TrlConfig
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.policy import load_policy
from agentcore_rl_toolkit.policy.word_problems import Problem, problems

HERE = Path(__file__).parent
AGENT = HERE.parent / "strands_math_agent" / "arithmetic_app.py"
START_LIMIT_S = 90.0


@contextlib.contextmanager
def serving(name: str, arguments: Sequence[str], out: Path) -> Iterator[dict[str, Any]]:
    """Run `agentcore-rl ARGUMENTS` while the block runs; gives what the server wrote into its ready file."""
    ready = out / f"{name}.ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", *arguments]
    command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    log_path = out / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        give_up_s = time.monotonic() + START_LIMIT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise SystemExit(f"the {name} did not start:\n{log_path.read_text()[-2000:]}")
            time.sleep(0.05)
        yield json.loads(ready.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        process.kill()
        process.wait()


def payload(problem: Problem) -> dict[str, str]:
    return {"prompt": problem.prompt, "answer": problem.answer}


def evaluate(name: str, n: int, *, client: Any, gateway: Any, config: CollectConfig, seed: int) -> dict[str, Any]:
    """Both means of the reward on held-out problems, one rollout each."""
    requests = [
        GroupRequest(input_id=f"{name}-{i:04d}", payload=payload(p))
        for i, p in enumerate(problems("held_out", n, seed=seed))
    ]
    groups = collect(requests, client=client, gateway=gateway, config=config)
    stats = summarize(groups)
    print(f"{name}: reward {stats.score_mean:.3f} on {stats.scored} of {n} held-out problems", flush=True)
    failed = next((r for g in groups for r in g.rollouts if not r.usable), None)
    if failed is not None:
        print(
            f"  outcomes {dict(stats.outcomes)}; first: {failed.outcome}: {failed.error}\n{failed.traceback or ''}",
            flush=True,
        )
    return {"usable": stats.usable, **stats.evaluation()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=HERE / "config.yaml")
    parser.add_argument("--batches", type=int, default=15, help="batches of rollouts")
    parser.add_argument("--problems", type=int, default=8, help="problems in each batch")
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agent", type=Path, default=AGENT)
    parser.add_argument("--out", type=Path, default=Path("runs/trl_math"))
    a = parser.parse_args()
    out = a.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # boto3 signs every request. The client signs with the key of the local runtime.
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "local")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "local")
    torch.manual_seed(a.seed)
    torch.set_num_threads(1)  # the agents and the policy server need the other cores

    with contextlib.ExitStack() as stack:
        policy = stack.enter_context(serving("policy", ["policy", "serve", "--threads", "1"], out))
        store = ["gateway", "serve", "--upstream", policy["url"], "--engine", "policy", "--store", str(out / "turns")]
        gateway_at = stack.enter_context(serving("gateway", store, out))
        records = out / "records"
        records.mkdir(exist_ok=True)
        served = ["runtime", "serve", "--agent", f"math={a.agent}", "--store", str(records)]
        runtime = stack.enter_context(serving("runtime", served, out))

        values = read_settings(a.config)
        per_batch = a.problems * values.get("num_generations", 8)
        training = values["training"]
        values["training"] = {
            **training,
            "seed": a.seed,
            "max_steps": a.batches * training["steps_per_generation"],
            "per_device_train_batch_size": per_batch // training["steps_per_generation"],
        }
        values |= {
            "agent_runtime_arn": runtime["agents"]["math"],
            "s3_bucket": f"file://{records}",
            "endpoint_url": runtime["url"],
            "gateway_url": gateway_at["url"],
            "policy_url": policy["url"],
            "output_dir": str(out),
        }
        config = TrlConfig.from_values(values, where=str(a.config))
        client = stack.enter_context(
            RolloutClient(
                config.agent_runtime_arn,
                config.s3_bucket,
                config.exp_id,
                tps_limit=config.tps_limit,
                model_id=config.model_id,
                endpoint_url=config.endpoint_url,
            )
        )
        gateway = stack.enter_context(GatewayClient(gateway_at["url"]))
        both: dict[str, Any] = {"client": client, "gateway": gateway}
        model, tokenizer = load_policy()
        rewards: list[float | None] = []

        def show(groups: Sequence[Group], stats: Any) -> None:
            reward = summarize(groups).reward_mean
            rewards.append(reward)
            print(f"batch {len(rewards):3d}  reward {reward}  usable {stats.usable}/{stats.rows}", flush=True)

        rows = [payload(p) for p in problems("train", a.batches * a.problems, seed=a.seed)]
        trainer = make_trainer(config, **both, rows=rows, model=model, tokenizer=tokenizer, on_batch=show)
        trainer.rollouts.sync_weights(trainer)
        before = evaluate(
            "before", a.held_out, **both, config=config.collect_config().replace(evaluation=True), seed=a.seed
        )
        began_s = time.monotonic()
        trainer.train()
        train_s = time.monotonic() - began_s
        after = evaluate(
            "after", a.held_out, **both, config=config.collect_config().replace(evaluation=True), seed=a.seed
        )

    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    summary = {
        "held_out_before": before,
        "held_out_after": after,
        "rewards": rewards,
        "train_s": train_s,
        "logprob_gap_max": max(
            (e["agentcore/logprob_gap"] for e in logs if "agentcore/logprob_gap" in e), default=None
        ),
        "trained_token_share": min(
            (e["agentcore/trained_token_share"] for e in logs if "agentcore/trained_token_share" in e), default=None
        ),
        "masked": sum(e.get("agentcore/masked", 0.0) for e in logs),
        "forked": sum(e.get("agentcore/forked", 0.0) for e in logs),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    print(json.dumps({k: v for k, v in summary.items() if k != "rewards"}, indent=2))


if __name__ == "__main__":
    main()
