"""Templates: when sessions are forked, when they are not, and what a template learns."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentcore_rl_toolkit.cli.training.stack import _slow_start
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import AgentLoadError
from agentcore_rl_toolkit.runtime.launcher.handle import TemplateProcess, TemplateSpec
from serving import answering, certificate

from ..conftest import AGENTS, Server


def template(server: Server) -> dict[str, object]:
    found: dict[str, object] = server.view.get("/_local/status")["templates"][0]
    return found


def test_sessions_are_forks_of_one_loaded_agent(server: Server) -> None:
    assert template(server)["start"] == "fork"
    assert len({server.invoke({}, new_session_id())["loaded"] for _ in range(3)}) == 1


def test_agent_with_threads_is_started_by_exec_and_says_why(start_server: Callable[..., Server]) -> None:
    server = start_server(agent=AGENTS / "threads.py")
    assert template(server)["start"] == "exec"
    assert "ticker" in str(template(server)["reason"])
    assert server.invoke({})["threads"] == ["ticker"]
    answer = str(_slow_start(server.view))
    assert "threads before its server: ticker; start threads in the entrypoint" in answer


def test_an_agent_that_imports_numpy_is_forked_and_may_have_its_threads_instead(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text("import numpy\n" + (AGENTS / "respond.py").read_text())
    server = start_server(agent=tmp_path / "agent.py")
    assert template(server)["start"] == "fork"
    if (os.cpu_count() or 1) > 1 and sys.platform == "linux":
        server = start_server("--session-env", "OPENBLAS_NUM_THREADS=2", agent=tmp_path / "agent.py")
        assert template(server)["start"] == "exec"
        assert "--session-env OMP_NUM_THREADS=1" in str(_slow_start(server.view))


def test_agent_with_its_own_server_is_served_unmodified(start_server: Callable[..., Server]) -> None:
    server = start_server(agent=AGENTS / "own_server.py")
    assert template(server)["start"] == "exec"
    assert server.invoke({"a": 1}) == {"got": {"a": 1}}


def run_serve(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "runtime", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_agent_that_does_not_import_ends_serve_with_its_traceback() -> None:
    done = run_serve("--agent", f"broken={AGENTS / 'broken.py'}")
    assert done.returncode == 1
    assert "No module named 'nothing_of_this_name'" in done.stderr
    assert f'File "{AGENTS / "broken.py"}", line 3' in done.stderr
    assert "agentcore_rl_toolkit/runtime" not in done.stderr


def test_agent_that_never_runs_a_server_is_told_how(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("x = 1\n")
    done = run_serve("--agent", f"silent={tmp_path / 'silent.py'}")
    assert done.returncode == 1
    assert "app.run()" in done.stderr


async def test_a_script_that_does_not_come_to_its_server_ends_at_the_deadline(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text("import time\ntime.sleep(600)\n")
    spec = TemplateSpec(script=script, env=dict(os.environ), log_path=tmp_path / "log", load_timeout_s=1.0)
    with pytest.raises(AgentLoadError, match=r"stuck\.py did not reach its server within [0-9.]+ s.*; output: "):
        await TemplateProcess(spec).start()


def test_agent_that_ends_its_process_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("print('last words', flush=True)\nimport os; os._exit(5)\n")
    done = run_serve("--agent", f"ends={tmp_path / 'ends.py'}")
    assert done.returncode == 1
    assert "ends.py: its process ended (status 5)" in done.stderr
    assert "last words" in done.stderr


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


def test_a_server_that_cannot_be_reached_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import http.server\nif __name__ == '__main__':\n"
        "    http.server.HTTPServer(('0.0.0.0', 8080), http.server.BaseHTTPRequestHandler).serve_forever()\n"
    )
    done = run_serve("--agent", f"other={tmp_path / 'other.py'}")
    assert done.returncode == 1
    assert "something else than uvicorn" in done.stderr
    assert "container image" in done.stderr
