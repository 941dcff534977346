"""Contract tests against slime itself, from the checkout that SLIME_DIR names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentcore_rl_toolkit.backends.slime import SlimeRunner

SLIME_DIR = os.environ.get("SLIME_DIR")
pytestmark = [
    pytest.mark.skipif(not SLIME_DIR, reason="SLIME_DIR names no slime checkout; recorded signatures are used instead"),
    pytest.mark.slow,
]
HERE = Path(__file__).parent


def test_slimes_own_contract_test_passes_for_our_generate() -> None:
    assert SLIME_DIR
    done = subprocess.run(
        [
            sys.executable,
            "tests/plugin_contracts/test_plugin_generate_contracts.py",
            "--custom-generate-function-path",
            "replayed_generate.generate",
        ],
        cwd=SLIME_DIR,
        env={**os.environ, "PYTHONPATH": f"{HERE}:."},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_our_generate_fills_slimes_own_sample_class() -> None:
    assert SLIME_DIR
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "fill_real_samples.py")],
        cwd=SLIME_DIR,
        env={**os.environ, "PYTHONPATH": f"{HERE}:."},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("64 rollouts filled")


def test_every_flag_is_one_of_slimes_or_megatrons(tmp_path: Path) -> None:
    assert SLIME_DIR
    text = "".join(p.read_text() for p in Path(SLIME_DIR, "slime").rglob("*.py"))
    scripts = "".join(p.read_text() for p in Path(SLIME_DIR, "scripts").rglob("*.sh"))
    known = set(re.findall(r"--[a-z0-9][a-z0-9-]+", text)) | set(re.findall(r"--[a-z0-9][a-z0-9-]+", scripts))
    runner = SlimeRunner(
        exp_id="e", agent_runtime_arn="a", s3_bucket="b", model_dir="m", data_path="d", model_type="qwen3-4B",
        slime_dir=SLIME_DIR, sglang_context_length=4096, sglang_reasoning_parser="qwen3", routing_replay=True,
    )  # fmt: skip
    flags = {f for f in runner.flags(1) if f.startswith("--")}
    # SGLang's own server flags are prefixed by slime as they are.
    passed_on = {f for f in flags if f.startswith("--sglang-")}
    assert flags - passed_on - known == set()
