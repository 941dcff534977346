"""Shared pieces: the shipped policy in its three forms (transformers, decoder, server process)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.policy.decoder import Decoder
from agentcore_rl_toolkit.policy.loading import load_decoder
from agentcore_rl_toolkit.policy.model import load_policy
from agentcore_rl_toolkit.policy.word_problems import problems
from serving import START_S, wait_for

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def hf() -> tuple[Any, Any]:
    """``(model, tokenizer)`` of the shipped policy as transformers objects."""
    return load_policy()


@pytest.fixture(scope="session")
def prompts(hf: tuple[Any, Any]) -> list[list[int]]:
    """What the example agent of the quickstart asks first, of twelve problems."""
    texts = [
        f"<|im_start|>system\nSolve the problem.<|im_end|>\n<|im_start|>user\n{p.prompt}<|im_end|>\n<|im_start|>assistant\n"
        for p in problems("train", 12)
    ]
    return [list(hf[1](text)["input_ids"]) for text in texts]


@pytest.fixture
def decoder() -> Decoder:
    return load_decoder(rows=16)


@dataclass
class ServerProcess:
    """A policy server of our own, in its own process."""

    process: subprocess.Popen[bytes]
    url: str
    ready: dict[str, Any]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=20)


def start(folder: Path, *options: str, parent_pid: int | None = None) -> ServerProcess:
    """Start `agentcore-rl policy serve` and wait until it listens."""
    ready_file = folder / "ready.json"
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "policy", "serve", "--ready-file", str(ready_file)]
    command += ["--parent-pid", str(parent_pid or os.getpid()), *options]
    with (folder / "stderr.txt").open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    wait_for(lambda: ready_file.exists() or process.poll() is not None, within_s=START_S)
    assert process.poll() is None, (folder / "stderr.txt").read_text()
    ready = json.loads(ready_file.read_text())
    return ServerProcess(process=process, url=ready["url"], ready=ready)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests of a module."""
    running = start(tmp_path_factory.mktemp("policy"), "--seed", "7")
    yield running
    assert running.stop() == 0  # SIGTERM is a good end
