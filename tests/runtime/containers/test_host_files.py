"""Agents given by path in containers of this machine's own programs, also behind gVisor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.runtime.containers.client import gvisor_program

from ..conftest import Server
from ..container_images import containers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
AGENT = """
import os
from agentcore_rl_toolkit import AgentCoreRLApp
app = AgentCoreRLApp()

@app.rollout_entrypoint
def run(payload, context):
    seen = {path: os.path.exists(path) for path in payload["paths"]}
    return {"rewards": 1.0, "seen": seen, "files": sorted(os.listdir()), "home": os.environ["HOME"], "cwd": os.getcwd()}

if __name__ == "__main__":
    app.run()
"""


@pytest.fixture(
    params=[
        pytest.param((), marks=pytest.mark.system),
        pytest.param(("--runtime", "runsc"), id="gvisor", marks=pytest.mark.nightly),
    ]
)
def server(request: pytest.FixtureRequest, engine_storage: Path, tmp_path: Path) -> Iterator[Server]:
    if request.param and shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "agent.py").write_text(AGENT)
    options = [
        "--isolation",
        "container",
        "--store",
        f"file://{tmp_path}/store",
        "--set",
        "init_timeout=90",
        *request.param,
    ]
    server = Server(tmp_path, *options, agent=tmp_path / "project" / "agent.py")
    assert server.info["isolation"] == "container"
    yield server
    assert server.stop() == 0, server.output.read_text()
    assert containers() == []


def test_a_rollout_in_a_container_sees_its_project_and_writes_its_record(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    (tmp_path / "host.txt").write_text("of the host")
    paths = [str(tmp_path / "host.txt"), str(tmp_path / "project" / "agent.py"), str(Path.home() / ".ssh")]
    with RolloutClient(server.arn, f"file://{tmp_path}/store", "exp", endpoint_url=server.url) as client:
        found: dict[str, Any] = client.invoke({"paths": paths}).result(120)
    assert list(found["seen"].values()) == [False, True, False]
    assert {"agent.py", "tmp"} <= set(found["files"])
    assert found["home"] == found["cwd"]
    [record] = (tmp_path / "store" / "exp").rglob("*.json")
    assert json.loads(record.read_text())["status_code"] == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="runsc changes owners as root only")
def test_gvisor_is_not_given_the_machines_dev_null(tmp_path: Path) -> None:
    """It would make it "nobody"'s, as releases of runsc do with their standard input."""
    programs = tmp_path / "programs"
    programs.mkdir()
    runsc = programs / "runsc"
    runsc.write_text('#!/bin/sh\nif [ /dev/stdin -ef /dev/null ]; then echo null; fi\ncat\necho "$@"\n')
    runsc.chmod(0o755)
    (tmp_path / "engine").mkdir()
    done = subprocess.run(
        [gvisor_program(tmp_path / "engine"), "create", "x"],
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=30,
        check=True,
        text=True,
    )
    assert done.stdout == "create x\n"
