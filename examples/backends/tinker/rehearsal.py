"""A Tinker run without Tinker: the real loop, SDK, gateway and agents, and a small model on this machine behind the service.

    pip install -e '.[local,tinker]'
    python examples/backends/tinker/rehearsal.py --steps 12

What changes for a real run is the configuration it writes: service, model, agent and bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.policy.problems import problems

AGENT = Path(__file__).parents[2] / "strands_math_agent" / "arithmetic_app.py"
CLI = [sys.executable, "-m", "agentcore_rl_toolkit.cli"]


@contextlib.contextmanager
def serving(name: str, words: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A service of ours as a process, until the block ends."""
    ready = folder / f"{name}.json"
    ready.unlink(missing_ok=True)
    words += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*CLI, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        while not ready.exists():
            if process.poll() is not None:
                sys.exit(f"{name} ended; see {folder / f'{name}.log'}")
            time.sleep(0.1)
        yield json.loads(ready.read_text())
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/tinker-rehearsal"))
    a = parser.parse_args()
    folder = a.run_dir.resolve()
    records = folder / "records"
    records.mkdir(parents=True, exist_ok=True)
    rows = [{"idx": i, "prompt": p.prompt, "answer": p.answer} for i, p in enumerate(problems("train", 160, seed=0))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "local")  # boto3 signs requests to the local runtime too
    os.environ["TINKER_API_KEY"] = "tml-rehearsal"
    policy = ["policy", "tinker", "--checkpoints", str(folder / "checkpoints")]
    runtime = ["runtime", "serve", "--agent", f"math={AGENT}", "--store", str(records)]
    with serving("service", policy, folder) as service, serving("runtime", runtime, folder) as local:
        settings = {
            "exp_id": "rehearsal",
            "agent_runtime_arn": local["agents"]["math"],
            "endpoint_url": local["url"],
            "s3_bucket": f"file://{records}",
            "service_url": service["url"],
            "base_model": service["base_model"],
            "model_dir": str(WEIGHTS_DIR),
            "data_path": str(folder / "rows.jsonl"),
            "output_dir": str(folder / "out"),
            "gateway_host": "127.0.0.1",
            "tps_limit": 200,
            "learning_rate": 3e-4,
            "loss": "ppo",
            "loss_config": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
            "steps": a.steps,
            "groups_per_step": 8,
            "group_size": 8,
            "checkpoint_every": 4,
            "collect": {"max_concurrent": 64, "rollout_timeout_s": 120},
        }
        (folder / "config.json").write_text(json.dumps(settings, indent=2))
        train = [*CLI, "train", "--backend", "tinker", "--config", str(folder / "config.json")]
        sys.exit(subprocess.call(train))


if __name__ == "__main__":
    main()
