"""Rehearse a run on a training service: the real loop, gateway and agents, with a small model instead of the service.

    pip install -e '.[local,sagemaker]'
    python examples/backends/rehearsal.py
    python examples/backends/rehearsal.py --form job

It writes a configuration and prints its command. For a real run, use the ARN and the bucket of your agent instead of
`--rehearse --agent`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.policy.word_problems import Split, problems

AGENT = Path(__file__).parents[1] / "strands_math_agent" / "arithmetic_app.py"
HUB = "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model"
GROUP = "arn:aws:sagemaker:us-west-2:123456789012:model-package-group"
STEPS = {"session": 12, "job": 9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=STEPS, default="session", help="a training session, or a job")
    parser.add_argument("--steps", type=int, help="default: 12 of 64 rollouts; 9 of 128 in a job")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data")
    parser.add_argument("--run-dir", type=Path, help="folder of the run, which is continued [runs/rehearsal-FORM-SEED]")
    a = parser.parse_args()
    a.run_dir = a.run_dir or Path(f"runs/rehearsal-{a.form}-{a.seed}")
    a.run_dir.mkdir(parents=True, exist_ok=True)
    splits: tuple[tuple[Split, int], ...] = (("train", 160), ("held_out", 64))
    for split, n in splits:
        rows = [
            {"idx": i, "prompt": p.prompt, "answer": p.answer} for i, p in enumerate(problems(split, n, seed=a.seed))
        ]
        (a.run_dir / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "data_path": str(a.run_dir / "train.jsonl"),
        "eval_data_path": str(a.run_dir / "held_out.jsonl"),
        "output_dir": str(a.run_dir / "out"),
    }
    steps = a.steps or STEPS[a.form]
    settings |= job(steps) if a.form == "job" else primitives(steps, a.seed)
    config = a.run_dir / "config.json"
    config.write_text(json.dumps(settings, indent=2))
    words = ["train", "--backend", "sagemaker", "--config", str(config), "--rehearse", "--agent", str(AGENT)]
    print(f"agentcore-rl {shlex.join(words)}", flush=True)
    began_s = time.monotonic()
    code = subprocess.call([sys.executable, "-m", "agentcore_rl_toolkit.cli", *words])
    print(f"{time.monotonic() - began_s:.0f} s")
    sys.exit(code)


def primitives(steps: int, seed: int) -> dict[str, object]:
    return {
        "exp_id": "rehearsal",
        "base_model": f"{HUB}/openai-reasoning-gpt-oss-20b",
        "role_arn": "arn:aws:iam::123456789012:role/training-sessions",
        "output_s3": "s3://my-bucket/sessions",
        "model_dir": "models/gpt-oss-20b",
        "tps_limit": 200,
        "learning_rate": 3e-4,
        "loss": "ppo",
        "loss_options": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
        "seed": seed,
        "steps": steps,
        "checkpoint_every": 4,
        "max_concurrent": 64,
        "rollout_timeout_s": 120,
    }


def job(steps: int) -> dict[str, object]:
    return {
        "form": "job",
        "job_name": "rehearsal",
        "base_model": f"{HUB}/openai-reasoning-gpt-oss-20b",
        "role_arn": "arn:aws:iam::123456789012:role/rl-jobs",
        "mlflow_arn": "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/app-EXAMPLE",
        "output_s3": "s3://my-bucket/rl-jobs",
        "model_package_group_arn": f"{GROUP}/rehearsal",
        "checkpoint_group_arn": f"{GROUP}/rehearsal-steps",
        "hyperparameters": {
            "global_batch_size": 32,
            "group_size": 4,
            "max_epochs": 30,
            "max_steps": steps,
            "learning_rate": 3e-4,
            "clip_high": 1.28,
            "sampling_max_tokens": 512,
        },
        "eval_hyperparameters": {"temperature": 1.0, "sampling_max_tokens": 512},
    }


if __name__ == "__main__":
    main()
