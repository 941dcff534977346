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
    [record] = (tmp_path / "store").rglob("*.json")  # in the folder of its session while that ends
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


AS_IT_IS = """
import os
import httpx
from bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()
CLIENT = httpx.Client(timeout=5)


@app.entrypoint
async def invoke(payload):
    if "call" in payload:
        CLIENT.post("https://api.openai.com/v1/chat/completions", json={"model": "m", "messages": []})
    yield {"payload": payload, "environment": dict(os.environ)}


if __name__ == "__main__":
    app.run()
"""


def test_an_agent_runs_as_it_is_in_a_container(
    engine_storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "app.py").write_text(AS_IT_IS)
    options = ["--isolation", "container", "--store", f"file://{tmp_path}/store", "--set", "init_timeout=90"]
    options += ["--session-env", "AGENTCORE_RL_AS_IS=1"]
    server = Server(tmp_path, *options, agent=tmp_path / "project" / "app.py")
    gateway = {"base_url": "http://127.0.0.1:9/sessions/s/v1", "api_key": "gateway-key-of-the-session"}
    try:
        with RolloutClient(server.arn, f"file://{tmp_path}/store", "exp", endpoint_url=server.url) as client:
            found: dict[str, Any] = client.invoke({"prompt": "x", "_reference": "42"}, **gateway).result(120)
            called: dict[str, Any] = client.invoke({"call": True}, **gateway).result(120)
    finally:
        assert server.stop() == 0, server.output.read_text()
    [answer] = found["_answer"]
    assert answer["payload"] == {"prompt": "x"}
    assert gateway["api_key"] not in json.dumps(found)
    assert called["_agent"]["cause"] == "infrastructure"  # its call went to the gateway, where nothing listens
    assert "http://127.0.0.1:9" in called["traceback"] or "Connection refused" in called["stop_reason"]
