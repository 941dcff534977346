"""The mail sorter of `examples/signals/prompt`: its agent on the local runtime, both scripted models over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "examples" / "signals" / "prompt" / "run.py"


@pytest.mark.slow
@pytest.mark.nightly
def test_the_rules_that_the_prompt_lacks_are_found(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, RUN, "--out", tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert facts["before"]["mean"] < 0.5
    assert facts["after"]["mean"] >= 0.85
    assert all(word in facts["texts"]["system_prompt"] for word in ("money back", "lawyer", "gold member"))
