"""`runtime serve --cluster`, where it cannot work; `/_local/nodes` where there is no cluster."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from agentcore_rl_toolkit._installation import install_command
from agentcore_rl_toolkit.errors import LocalRuntimeError

from ..conftest import AGENTS, Server


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_names_what_to_install() -> None:
    done = serve("--cluster", "ray", "--agent", f"probe={AGENTS / 'probe.py'}")
    assert done.returncode == 2
    assert install_command("ray") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "option", ["--ray-address=127.0.0.1:1", "--sessions-per-node=3", "--join-timeout=9", "--join-timeout=0"]
)
def test_options_of_a_cluster_need_one(option: str) -> None:
    done = serve(option)
    assert done.returncode == 2
    assert option.split("=")[0] in done.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_time_in_which_a_node_joins_is_a_number_above_zero(command_line: Any, seconds: str) -> None:
    done = command_line(
        "runtime", "serve", "--cluster", "ray", "--ray-address", "127.0.0.1:1", "--join-timeout", seconds
    )
    assert done.returncode == 2
    assert "join_timeout_s must be above 0" in done.stderr


def test_runtime_on_one_machine_has_no_nodes(start_server: Callable[..., Server]) -> None:
    with pytest.raises(LocalRuntimeError, match="not found"):
        start_server().view.get("/_local/nodes")
