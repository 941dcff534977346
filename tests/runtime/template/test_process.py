"""Templates: when sessions are forked, when they are not, and what a template learns."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.training.stack import _slow_start
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import AgentLoadError
from agentcore_rl_toolkit.runtime.launcher.handle import TemplateProcess
from serving import answering, certificate

from ..conftest import AGENTS, Server, wait_for


def template(server: Server, arn: str) -> dict[str, Any]:
    """How the agent's sessions start, once it is loaded."""
    found: dict[str, Any] = wait_for(
        lambda: next((t for t in server.view.get("/_local/status")["templates"] if arn.endswith(t["runtime_id"])), None)
    )
    return found


@pytest.fixture
def load(server: Server) -> Iterator[Callable[..., str]]:
    """Create an agent of the runtime of all tests. Returns its ARN."""
    made: list[dict[str, Any]] = []

    def create(agent: Path, **environment: str) -> str:
        made.append(server.create(agent, environmentVariables=environment))
        return str(made[-1]["agentRuntimeArn"])

    yield create
    for agent in made:
        server.delete(agent)


def slow_start(*templates: dict[str, Any]) -> str:
    class View:
        def get(self, path: str) -> Any:
            return {"templates": templates}

    return str(_slow_start(View()))


def test_sessions_are_forks_of_one_loaded_agent(server: Server) -> None:
    assert template(server, server.arn)["start"] == "fork"
    assert len({server.invoke({}, new_session_id())["loaded"] for _ in range(3)}) == 1


def test_sessions_of_an_agent_with_threads_run_its_file_and_say_why(server: Server, load: Callable[..., str]) -> None:
    arn = load(AGENTS / "threads.py")
    found = template(server, arn)
    assert found["start"] == "libraries"
    assert "threads before its server: ticker; start threads in the entrypoint" in slow_start(found)
    assert server.invoke({}, arn=arn) == {"loads": "x", "threads": ["ticker"]}


def test_an_agent_that_imports_numpy_is_forked_and_may_have_its_threads_instead(
    server: Server, load: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text("import numpy\n" + (AGENTS / "bare.py").read_text())
    assert template(server, load(tmp_path / "agent.py"))["start"] == "fork"
    if (os.cpu_count() or 1) > 1 and sys.platform == "linux":
        found = template(server, load(tmp_path / "agent.py", OPENBLAS_NUM_THREADS="2"))
        assert found["start"] == "exec"
        assert "--session-env OMP_NUM_THREADS=1" in slow_start(found)


def test_agent_with_its_own_server_is_served_unmodified(server: Server, load: Callable[..., str]) -> None:
    arn = load(AGENTS / "own_server.py")
    assert template(server, arn)["start"] == "libraries"
    assert server.invoke({"a": 1}, arn=arn) == {"got": {"a": 1}}


OTHER_SERVER = """
import http.server
http.server.HTTPServer(("0.0.0.0", 8080), http.server.BaseHTTPRequestHandler).serve_forever()
"""


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("x = 1\n", r"ended without starting a server.*app\.run\(\)"),
        ("print('last words', flush=True)\nimport os; os._exit(5)\n", r"its process ended \(status 5\).*last words"),
        (OTHER_SERVER, "without uvicorn.*container image"),
        ("import time\ntime.sleep(600)\n", r"did not reach its server within [0-9.]+ s.*; output: "),
    ],
)
async def test_a_script_that_starts_no_server_is_an_error_with_the_way_out(
    tmp_path: Path, script: str, error: str
) -> None:
    (tmp_path / "agent.py").write_text(script)
    limit_s = 1.0 if "sleep" in script else 60.0
    template = TemplateProcess(
        script=tmp_path / "agent.py", env=dict(os.environ), log_path=tmp_path / "log", load_timeout_s=limit_s
    )
    with pytest.raises(AgentLoadError, match=f"(?s){error}"):
        await template.start()


def test_threads_of_a_session_share_a_tls_client(server: Server, tmp_path: Path) -> None:
    """The CA file is as large as the usual one, so that reading it takes a while."""
    chain, tls = certificate(tmp_path)
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(Path(pytest.importorskip("certifi").where()).read_bytes() + chain.read_bytes())
    made = server.create(Path(shutil.copy(AGENTS / "tls_client.py", tmp_path)))
    with answering(lambda _: (200, "hello"), tls) as url:
        payload = {"url": url, "certificates": str(authorities)}
        for _ in range(5):
            assert server.invoke(payload, arn=made["agentRuntimeArn"]) == {"texts": ['"hello"'] * 4}
    server.delete(made)
