"""Where sessions of the default tier write: their own folder, the store, and what is named."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.client import RolloutClient
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import RolloutLostError
from agentcore_rl_toolkit.isolation.sandbox import no_sandbox
from agentcore_rl_toolkit.store import open_store

from ..conftest import AGENTS, Server, wait_for

pytestmark = pytest.mark.skipif(no_sandbox() is not None, reason=f"no sandbox here: {no_sandbox()}")
GO_DEEP = 'import os; [(os.mkdir("d"), os.chdir("d")) for _ in range(1100)]'
AGENT = """
from pathlib import Path
from agentcore_rl_toolkit import AgentCoreRLApp
app = AgentCoreRLApp()

@app.rollout_entrypoint
def run(payload, context):
    for path, text in payload.get("write", {}).items():
        Path(path).write_text(text)
    return {"rewards": 1.0, "read": [Path(path).read_text() for path in payload.get("read", ())]}

if __name__ == "__main__":
    app.run()
"""


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    for name in ("project", "shown", "own", "elsewhere"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    (folder / "project" / "agent.py").write_text(AGENT)
    (folder / "project" / "pyproject.toml").touch()
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    options = ["--store", f"file://{folder}/store", "--readable", f"{folder}/shown", "--writable", f"{folder}/own"]
    server = Server(folder, *options, agent=folder / "project" / "agent.py")
    assert server.info["isolation"] == "process"
    yield server
    assert server.stop() == 0, server.output.read_text()


def test_sessions_read_and_write_what_is_named_and_their_records_are_in_the_store(server: Server, folder: Path) -> None:
    payload = {
        "read": [str(folder / name / "file") for name in ("project", "shown", "own")],
        "write": {str(folder / "own" / "note"): "mine", "note": "in its folder"},
    }
    with RolloutClient(server.arn, f"file://{folder}/store", "exp", endpoint_url=server.url) as client:
        assert client.invoke(payload).result(60)["read"] == ["project", "shown", "own"]
    assert (folder / "own" / "note").read_text() == "mine"
    store = open_store(f"file://{folder}/store")  # which reads the folders of sessions that have not quite ended
    [record] = store.list("exp/")
    assert json.loads(store.get(record.key))["status_code"] == 200


def test_the_next_runtime_moves_the_records_of_a_killed_one_and_removes_deep_folders_of_its_sessions(
    start_server: Callable[..., Server], folder: Path, session_id: str
) -> None:
    place = folder / "left"
    options = ["--store", f"file://{place}"]
    server = start_server(*options, agent=folder / "project" / "agent.py")
    server.invoke({"_rollout": {"exp_id": "e", "input_id": "i", "s3_bucket": f"file://{place}"}}, session_id)
    store = open_store(f"file://{place}")
    wait_for(lambda: [info.key for info in store.list("e/")] == [f"e/i/{session_id}.json"])
    assert not (place / "e").exists()
    server.command(session_id, f"cd {place} && {sys.executable} -c '{GO_DEEP}'")
    killed = new_session_id()
    server.command(killed, f"cd {place} && {sys.executable} -c '{GO_DEEP}'")
    os.kill(server.session(killed)["pid"], signal.SIGKILL)
    wait_for(lambda: server.ended(killed) and len(list(place.glob(".session-*"))) == 1)
    server.process.kill()
    server.process.wait()
    start_server(agent=AGENTS / "bare.py")
    wait_for(lambda: not list(place.glob(".session-*")))  # another runtime of this user may remove them meanwhile
    assert json.loads((place / f"e/i/{session_id}.json").read_text())["status_code"] == 200


@pytest.mark.parametrize(
    ("payload", "hint"),
    [
        ({"read": ["{0}/elsewhere/file"]}, "--readable DIR"),
        ({"write": {"{0}/elsewhere/new": "x"}}, "--writable DIR"),
    ],
)
def test_an_error_about_a_path_outside_names_the_option(
    server: Server, folder: Path, payload: dict[str, object], hint: str
) -> None:
    given = json.loads(json.dumps(payload).replace("{0}", str(folder)))
    with RolloutClient(server.arn, f"file://{folder}/store", "outside", endpoint_url=server.url) as client:
        future = client.invoke(given)
        assert future.exception(60) is not None
    store = open_store(f"file://{folder}/store")
    [key] = [info.key for info in store.list("outside/") if info.key.endswith(f"/{future.session_id}.json")]
    trace = json.loads(store.get(key))["traceback"]
    assert "in the sandbox of the session" in trace
    assert hint in trace
    assert not (folder / "elsewhere" / "new").exists()


@pytest.mark.parametrize("other", ["{folder}/elsewhere", "/tmp/elsewhere", "{folder}/store/inner"])
def test_another_store_is_refused_at_the_invoke_with_the_option(server: Server, folder: Path, other: str) -> None:
    """The sandbox has a /tmp of its own, and its own part of the store: a record there would never be found."""
    store = "file://" + other.format(folder=folder)
    with RolloutClient(server.arn, store, "refused", endpoint_url=server.url) as client:
        error = client.submit({}).exception(60)
    assert isinstance(error, RolloutLostError)
    assert error.code == "StoreRefused"
    assert f"(local runtime: --store {store})" in str(error)


def test_a_module_outside_of_the_project_is_named_when_the_agent_is_loaded(
    start_server: Callable[..., Server], folder: Path
) -> None:
    (folder / "elsewhere" / "common.py").write_text("X = 1\n")
    agent = folder / "project" / "other.py"
    agent.write_text(f"import sys\nsys.path.append({str(folder / 'elsewhere')!r})\nimport common\n" + AGENT)
    server = start_server(agent=agent, wait=False)
    assert server.process.wait(120) == 1
    assert (
        f"{folder}/elsewhere, which the sandbox does not show; add it with --readable DIR" in server.output.read_text()
    )
