"""The published toolkit's own loop over training sessions, its agent and our services, in a network of their own.

Called as ``loop.py PYTHON FOLDER``: the Python of the published toolkit's environment, and a folder for files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from agentcore_rl_toolkit.policy.training_service.model import PolicyModel
from agentcore_rl_toolkit.policy.training_service.sagemaker.service import running

sys.path.append(str(Path(__file__).parents[3]))
from scripted_runtime import ScriptedRuntime

AGENT = Path(__file__).with_name("agent.py")
PORT = 18080  # nothing else is in this network
LOOP = "agentcore_rl_toolkit.backends.experimental.sagemaker.train_grpo"


def main(python: str, folder: Path) -> int:
    rows, config = folder / "rows.jsonl", folder / "config.yaml"
    rows.write_text("".join(json.dumps({"payload": {"prompt": f"What is {n} + 2?"}}) + "\n" for n in range(4)))
    with running(PolicyModel()) as service, ScriptedRuntime() as front:
        settings = {
            "region": "us-west-2",
            "base_model_arn": "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/any/1.0.0",
            "role_arn": "arn:aws:iam::123456789012:role/trainer",
            "s3_output_path": "s3://bucket/run",
            "model_package_group_arn": "arn:aws:sagemaker:us-west-2:123456789012:model-package-group/loop",
            "agent_runtime_arn": front.arn,
            "batch_size": 2,
            "responses_per_prompt": 4,
            "max_context_tokens": 1024,
            "max_new_tokens": 512,
            "dataset_path": str(rows),
            "save_weights_at_end": True,
        }
        config.write_text(json.dumps(settings))  # JSON is YAML
        front.agent_url = f"http://127.0.0.1:{PORT}"
        agent = subprocess.Popen([python, str(AGENT), str(PORT)], env={**os.environ, "TMPDIR": str(folder)})
        try:
            while agent.poll() is None and not listens(front.agent_url):
                time.sleep(0.1)
            environment = {**os.environ, **service.environment, "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": front.url}
            return subprocess.run([python, "-m", LOOP, "--config", str(config)], env=environment).returncode
        finally:
            agent.kill()
            agent.wait()


def listens(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/ping", timeout=5).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
