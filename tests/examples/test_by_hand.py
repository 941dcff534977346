"""The four terminals of `examples/grpo_loop/README.md`, typed as they stand there."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from ..conftest import reserved_port

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "grpo_loop" / "README.md"
PORTS = ("8001", "8002", "8003")
DEADLINE_S = 240.0


@pytest.mark.nightly  # 25 CPU seconds; quickstart and train run the same parts in every `make test`
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_trains_as_it_stands(tmp_path: Path) -> None:
    servers, training = re.findall(r"```bash\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "AGENTCORE_"))}
    environment = {**kept, "PATH": path, "OPTIONS": "--steps 1 --groups 2 --rollouts 4 --held-out 4"}
    with ExitStack() as exits:
        ports = {port: str(exits.enter_context(reserved_port())) for port in PORTS}  # theirs may be taken here

        def typed(text: str) -> list[str]:
            return ["bash", "-ec", re.sub("|".join(PORTS), lambda found: ports[found[0]], text)]

        for line, port in zip(servers.splitlines(), PORTS, strict=True):
            server = subprocess.Popen(typed(f"exec {line}"), cwd=tmp_path, env=environment, start_new_session=True)
            exits.callback(end, server)
            wait(partial(listens, ports[port]), server)
        wait((tmp_path / "runtime.json").exists, server)
        done = subprocess.run(
            typed(training), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in facts] == ["evaluated", "step", "evaluated"]
    step = json.loads(facts[1][1])
    assert (step["rollouts"], step["usable"]) == (8, 8)
    assert (tmp_path / "runs" / "by-hand" / "policy" / "model.safetensors").is_file()


def listens(port: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(port))) == 0


def wait(condition: Callable[[], bool], server: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert server.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.05)


def end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
