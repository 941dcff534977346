"""Train on the same rows with TRL, then compare its loss with the loop's on the rollouts that it recorded.

python examples/pretrained/with_trl.py MODEL [--steps 3] [--out runs/pretrained-trl]      # needs the extras local and trl
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.backends import CollectedRollout, Group, GroupRequest, summarize, to_samples
from agentcore_rl_toolkit.backends.training.batch import to_data
from agentcore_rl_toolkit.backends.training.torch_client import Batch
from agentcore_rl_toolkit.cli.models import model_folder
from agentcore_rl_toolkit.cli.training.stack import own
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.policy.losses import token_losses
from agentcore_rl_toolkit.runs import Query, RunReader
from agentcore_rl_toolkit.runs.record import TokenSequence
from agentcore_rl_toolkit.trajectory import Turn, build_trajectory

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "runs/pretrained-data/train.jsonl"
GROUPS, ROLLOUTS, RATE = 6, 6, 1e-5


def settings(stack: Any, model: Path, out: Path, steps: int) -> dict[str, Any]:
    """Return settings with one optimizer step per batch, so that TRL computes its loss with unchanged weights."""
    training = {"max_steps": steps, "learning_rate": RATE, "lr_scheduler_type": "constant", "adam_beta2": 0.99}
    training |= {"per_device_train_batch_size": 12, "gradient_accumulation_steps": GROUPS * ROLLOUTS // 12}
    training |= {"shuffle_dataset": False, "disable_tqdm": True}
    where = {"agent_runtime_arn": stack.agent_arn, "s3_bucket": stack.store, "endpoint_url": stack.runtime_url}
    where |= {
        "gateway_url": stack.gateway_url,
        "policy_url": stack.policy_url,
        "gateway_admin_key": stack.gateway_admin_key,
    }
    rest = {"exp_id": "pretrained-trl", "model": str(model), "data_path": str(DATA), "output_dir": str(out)}
    return {
        **where,
        **rest,
        "num_generations": ROLLOUTS,
        "tps_limit": 1000,
        "training": {**training, "epsilon_high": 0.28},
    }


def recorded(out: Path, step: int) -> list[Group]:
    """The rollouts of a step as the loop trains on them."""
    groups: dict[str, list[CollectedRollout]] = {}
    with RunReader(out) as run:
        for row in run.rollouts(Query(phase="train", step=step)):
            found = run.rollout(row["id"]) or {}
            turns = []
            for one in map(TokenSequence.decoded, found["sequences"] or ()):
                first = one.prompt_length
                turn = Turn(
                    turn_id="t",
                    index=0,
                    prompt_ids=one.ids[:first],
                    completion_ids=one.ids[first:],
                    logprobs=[value for value in one.logprobs or () if value is not None],
                    finish_reason=one.finish_reason,
                    weight_version_first=row["weight_min"],
                    weight_version_last=row["weight_max"],
                )
                turns.append(turn)
            rollout = CollectedRollout(
                session_id=row["session_id"],
                input_id=row["grp"],
                index=row["place"],
                outcome=Outcome(row["outcome"]),
                reward=row["reward"],
                record={},
                trajectory=build_trajectory(row["session_id"], turns),
                mask_reason=row["mask_reason"],
            )
            groups.setdefault(row["grp"], []).append(rollout)
    return [
        Group(input_id=k, rollouts=v, request=GroupRequest(input_id=k, payload={}, n=len(v))) for k, v in groups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained-trl"))
    a = parser.parse_args()
    model, out = model_folder(a.model), a.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with own(HERE / "agent.py", folder=out / "services", model=model, dtype="float32") as stack:
        (out / "trl.json").write_text(json.dumps(settings(stack, model, out, a.steps)))
        words = ["train", "--backend", "trl", "--config", str(out / "trl.json")]
        subprocess.run([sys.executable, "-m", "agentcore_rl_toolkit.cli", *words], check=True)
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    for step, theirs in enumerate(steps):
        groups = recorded(out, step)
        data = [datum for datum, _ in to_data(to_samples(groups), groups)]
        batch, stats = Batch.of(data, 0), summarize(groups)
        # TRL takes one step per batch: its weights are still those that sampled, so their logprobs are the recorded ones.
        sampled_BT = batch.sampled_logprobs_BT
        losses_BT = token_losses("ppo", sampled_BT, sampled_BT, batch.advantages_BT, {})
        ours = (losses_BT * batch.mask_BT).sum() / stats.trained_tokens
        print(
            f"step {step + 1}: reward {theirs['reward']:.3f}, {stats.trained_tokens} tokens, loss {theirs['loss']:.5f} by TRL, "
            f"{ours.item():.5f} by the loop"
        )


if __name__ == "__main__":
    main()
