"""Agents given by path in containers of this machine's own programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.client import RolloutClient

from ..conftest import Server
from ..container_images import containers
from ..planted import TOLD, plant, plant_later

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]
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


@pytest.fixture
def server(engine_storage: Path, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "agent.py").write_text(AGENT)
    options = ["--isolation", "container", "--store", f"file://{tmp_path}/store", "--set", "init_timeout=90"]
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


def test_a_session_in_a_container_finds_no_answer_and_has_its_own_data(engine_storage: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    options = [*plant(project), "--isolation", "container", "--set", "init_timeout=90"]
    run = project / "runs" / "now"
    options += ["--state-dir", str(run / "sessions"), "--store", f"file://{run}/store"]
    server = Server(
        tmp_path,
        *options,
        agent=project / "agent.py",
        TELLING="planted-secret-variable",
        PYTHONPATH=str(project / "lib"),
    )
    try:
        shown = [str(project / name) for name in ("data/prices.csv", "lib/shop.txt", *TOLD)]
        answer = server.invoke({"tops": ["/tmp", str(project), "."], "read": shown})
        assert (answer["found"], answer["own"]) == ([], {"price": 3})
        assert [answer["read"][path] for path in shown] == ["lamp,3", "lamps", "", "", ""]
        plant_later(project)
        assert server.invoke({"tops": ["/tmp", str(project)]})["found"] == []
    finally:
        assert server.stop() == 0, server.output.read_text()
