"""Data, earlier runs, keys, `.env` and `.git` are not in the sandbox of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.isolation.sandbox import no_sandbox

from ..conftest import Server
from ..planted import TOLD, plant, plant_later

pytestmark = pytest.mark.skipif(no_sandbox() is not None, reason=f"no sandbox here: {no_sandbox()}")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted") / "project"


@pytest.fixture(scope="module")
def server(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = plant(project)
    run = (
        project / "runs" / "now"
    )  # of the command that started the runtime: it has the sessions' folders and the store
    state = ["--state-dir", str(run / "sessions"), "--store", f"file://{run}/store"]
    server = Server(
        tmp_path_factory.mktemp("server"),
        *options,
        *state,
        agent=project / "agent.py",
        TELLING="planted-secret-variable",
        PYTHONPATH=str(project / "lib"),
    )
    yield server
    assert server.stop() == 0, server.output.read_text()


def test_a_session_finds_no_answer_and_has_its_own_data(server: Server, project: Path) -> None:
    shown = [str(project / name) for name in ("data/prices.csv", "lib/shop.txt", *TOLD)]
    answer = server.invoke({"tops": ["/tmp", str(project), "."], "read": shown})
    assert answer["found"] == []
    assert answer["own"] == {"price": 3}
    assert [answer["read"][path] for path in shown] == ["lamp,3", "lamps", "", "", ""]


def test_what_a_command_names_later_is_hidden_from_new_sessions(server: Server, project: Path) -> None:
    payload = {"tops": [str(project)], "read": [str(project / "data" / "prices.csv")]}
    server.view.hide([project / "data" / "prices.csv", project / "runs" / "other"])
    assert server.invoke(payload)["read"] == {payload["read"][0]: ""}


def test_what_is_written_while_the_runtime_serves_is_not_found_either(server: Server, project: Path) -> None:
    plant_later(project)
    answer = server.invoke({"tops": ["/tmp", str(project), "."]})
    assert (answer["found"], answer["own"]) == ([], {"price": 3})


def test_a_readable_file_is_there_although_it_is_hidden(start_server: Callable[..., Server], tmp_path: Path) -> None:
    project = tmp_path / "project"
    options = plant(project)
    readable = ["--readable", str(project / "train.jsonl"), "--readable", str(project / "runs" / "old")]
    server = start_server(*options, *readable, agent=project / "agent.py")
    answer = server.invoke({"tops": [str(project)]})
    assert answer["found"] == ["planted-secret-runs-old-ledger-jsonl", "planted-secret-train-jsonl"]
