"""rLLM's own AgentCore runtime, from the checkout that RLLM_DIR names, over our client and the local runtime."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RLLM_DIR = os.environ.get("RLLM_DIR")
pytestmark = [
    pytest.mark.skipif(
        not RLLM_DIR, reason="RLLM_DIR names no rLLM checkout; its calls are checked by signature instead"
    ),
    pytest.mark.slow,
]
HERE = Path(__file__).parent


def test_rllms_runtime_gets_rewards_errors_and_timeouts(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    ready = tmp_path / "runtime.json"
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve"]
    command += ["--agent", f"plain={HERE / 'plain_agent.py'}", "--writable", str(tmp_path / "records")]
    command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    with (tmp_path / "log").open("wb") as log:
        runtime = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        give_up_s = time.monotonic() + 60
        while not ready.exists():
            assert runtime.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        at = json.loads(ready.read_text())
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                str(HERE / "drive.py"),
                at["agents"]["plain"],
                f"file://{tmp_path / 'records'}",
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(RLLM_DIR),
                "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": at["url"],
                "AWS_ACCESS_KEY_ID": "local",
                "AWS_SECRET_ACCESS_KEY": "local",
            },
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        runtime.send_signal(signal.SIGTERM)
        runtime.wait(timeout=30)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(text for text in done.stdout.splitlines() if text.startswith("RESULTS "))
    good, failed, late = json.loads(line.removeprefix("RESULTS "))
    assert (good["finished"], good["reward"], good["reason"]) == (True, 0.5, "ENV_DONE")
    assert good["metrics"] == {"steps": 2, "base_url": "http://gw/sessions/0/v1"}
    assert (failed["finished"], failed["reason"]) == (False, "ERROR")
    assert "injected failure" in failed["error"]
    assert (late["finished"], late["reason"]) == (False, "TIMEOUT")
    assert late["elapsed"] >= 15
