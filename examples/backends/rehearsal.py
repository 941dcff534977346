"""A run on a training service without the service: the real loop, gateway and agents, and a small model in the service's place.

    pip install -e '.[local,tinker,sagemaker]'
    python examples/backends/rehearsal.py --backend tinker --steps 12
    python examples/backends/rehearsal.py --backend sagemaker --steps 12

What changes for a real run is the configuration it writes: agent and bucket, and no `--rehearse`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from agentcore_rl_toolkit.policy.word_problems import problems

AGENT = Path(__file__).parents[1] / "strands_math_agent" / "arithmetic_app.py"
OF_SERVICE = {
    "tinker": {"base_model": "Qwen/Qwen3-4B-Instruct-2507"},
    "sagemaker": {
        "base_model": "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/openai-gpt-oss-20b",
        "role_arn": "arn:aws:iam::123456789012:role/training-sessions",
        "output_s3": "s3://my-bucket/sessions",
    },
}
CLI = [sys.executable, "-m", "agentcore_rl_toolkit.cli"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=sorted(OF_SERVICE), default="tinker")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/rehearsal"))
    a = parser.parse_args()
    folder = a.run_dir.resolve()
    (folder / "records").mkdir(parents=True, exist_ok=True)
    for split, n in (("train", 160), ("held_out", 64)):
        rows = [
            {"idx": i, "prompt": p.prompt, "answer": p.answer} for i, p in enumerate(problems(split, n, seed=a.seed))
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "local")  # boto3 signs requests to the local runtime too
    ready = folder / "runtime.json"
    ready.unlink(missing_ok=True)
    words = [
        "runtime",
        "serve",
        "--agent",
        f"math={AGENT}",
        "--store",
        str(folder / "records"),
        "--ready-file",
        str(ready),
        "--parent-pid",
        str(os.getpid()),
    ]
    with (folder / "runtime.log").open("wb") as log:
        runtime = subprocess.Popen([*CLI, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        while not ready.exists():
            if runtime.poll() is not None:
                sys.exit(f"the runtime ended; see {folder / 'runtime.log'}")
            time.sleep(0.1)
        local = json.loads(ready.read_text())
        settings = {
            "exp_id": "rehearsal",
            "agent_runtime_arn": local["agents"]["math"],
            "endpoint_url": local["url"],
            "s3_bucket": f"file://{folder / 'records'}",
            **OF_SERVICE[a.backend],
            "model_dir": "models/Qwen3-4B-Instruct-2507",
            "data_path": str(folder / "train.jsonl"),
            "eval_data_path": str(folder / "held_out.jsonl"),
            "output_dir": str(folder / "out"),
            "gateway_host": "127.0.0.1",
            "tps_limit": 200,
            "learning_rate": 3e-4,
            "loss": "ppo",
            "loss_config": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
            "seed": a.seed,
            "steps": a.steps,
            "checkpoint_every": 4,
            "max_concurrent": 64,
            "rollout_timeout_s": 120,
        }
        (folder / "config.json").write_text(json.dumps(settings, indent=2))
        train = ["train", "--backend", a.backend, "--config", str(folder / "config.json"), "--rehearse"]
        sys.exit(subprocess.call([*CLI, *train]))
    finally:
        runtime.terminate()
        runtime.wait()


if __name__ == "__main__":
    main()
