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
    pytest.mark.nightly,
    pytest.mark.slow,
]
HERE = Path(__file__).parent
PACKAGE = "agentcore_rl_toolkit.backends.slime"
_PREPARED = Path(os.environ.get("SLIME_PYTHON", str(HERE.parents[2] / ".venvs/slime/bin/python")))
PYTHON = str(_PREPARED) if _PREPARED.exists() else sys.executable


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("generate", ["--custom-generate-function-path", "replayed_generate.generate"]),
        ("runtime_hook", ["--custom-reward-post-process-path", f"{PACKAGE}.hooks.normalize_rewards"]),
        ("path_loading", ["--dynamic-sampling-filter-path", f"{PACKAGE}.hooks.keep_informative_group"]),
    ],
)
def test_slimes_own_contract_tests_pass_for_our_functions(file: str, flags: list[str]) -> None:
    assert SLIME_DIR
    done = subprocess.run(
        [PYTHON, f"tests/plugin_contracts/test_plugin_{file}_contracts.py", *flags],
        cwd=SLIME_DIR,
        env={**os.environ, "PYTHONPATH": f"{HERE}:."},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("name", ["generate_rollout", "generate_rollout_fully_async"])
def test_our_rollout_functions_have_the_signature_of_slimes(name: str) -> None:
    assert SLIME_DIR
    check = (
        "import inspect; from slime.rollout.sglang_rollout import generate_rollout as theirs; "
        f"from {PACKAGE}.rollout import {name} as ours; a, b = (inspect.signature(f).parameters for f in (theirs, ours)); "
        "assert [(p.name, p.kind, p.default) for p in a.values()] == [(p.name, p.kind, p.default) for p in b.values()]"
    )
    env = {**os.environ, "PYTHONPATH": "."}
    done = subprocess.run(
        [PYTHON, "-c", check], cwd=SLIME_DIR, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


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
