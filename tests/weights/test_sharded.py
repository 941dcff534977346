"""Checkpoints of models that FSDP has split over two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentcore_rl_toolkit.policy import load_policy
from agentcore_rl_toolkit.weights.checkpoint import WEIGHTS_FILE, plain_parameters


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_split_model_is_written_whole(tmp_path: Path) -> None:
    words = [sys.executable, str(Path(__file__).with_name("sharded_run.py")), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = dict(plain_parameters(load_policy()[0]))
    for kind in ("fsdp1", "fsdp2"):
        written = load_file(tmp_path / kind / WEIGHTS_FILE)
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items()), kind
