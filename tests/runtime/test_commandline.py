"""`agentcore-rl runtime ps|logs|stop|top|deploy`, and environments of deployed agents."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agentcore_rl_toolkit.cli.servers.runtime import group
from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError, LocalRuntimeError
from agentcore_rl_toolkit.runtime.agents.environments import build

from .conftest import AGENTS, Server, wait_for


def run(server: Server, *arguments: str) -> Result:
    result = CliRunner().invoke(group, [*arguments, "--url", server.url])
    assert result.exit_code == 0, result.output
    return result


def test_ps_logs_and_stop(server: Server, session_id: str) -> None:
    server.invoke({"do": "print", "text": "a line of output"}, session_id)
    head, *rows = run(server, "ps").output.splitlines()
    assert head.split()[:4] == ["SESSION", "AGENT", "STATE", "PID"]
    row = next(r for r in rows if r.startswith(session_id))
    assert row.split()[1:3] == ["probe:1", "idle"]
    assert "a line of output" in run(server, "logs", session_id[:10]).output
    assert run(server, "stop", session_id[:10]).output == f"stopped {session_id}\n"
    wait_for(lambda: server.ended(session_id))
    assert session_id not in run(server, "ps").output
    rows = [line.split()[:3] for line in run(server, "ps", "--all").output.splitlines()]
    assert [session_id, "probe:1", "stopped"] in rows
    assert "a line of output" in run(server, "logs", session_id[:10]).output


def test_unknown_session_is_an_error(server: Server) -> None:
    result = CliRunner().invoke(group, ["stop", "nobody", "--url", server.url])
    assert isinstance(result.exception, LocalRuntimeError)
    assert "Session nobody not found" in str(result.exception)


@pytest.mark.parametrize("command", ["stop", "logs"])
def test_a_beginning_that_several_sessions_share_is_refused(server: Server, command: str) -> None:
    common = new_session_id()[:30]
    ids = [f"{common}{n}" for n in ("aaaa", "bbbb", "aaaab")]
    for session_id in ids:
        server.invoke({"do": "print", "text": f"output of {session_id}"}, session_id)
    result = CliRunner().invoke(group, [command, common, "--url", server.url])
    assert isinstance(result.exception, LocalRuntimeError)
    assert f"3 sessions begin with '{common}'" in str(result.exception)
    assert all(server.session(session_id) is not None for session_id in ids)
    run(server, command, ids[0])  # a whole id, though another begins with it
    assert [server.session(s) is None for s in ids] == [command == "stop", False, False]


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:80", "ftp://127.0.0.1/", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    result = CliRunner().invoke(group, ["ps", "--url", url])
    assert isinstance(result.exception, ConfigError)
    assert "--url must be like" in str(result.exception)


def test_nothing_listening_is_an_error_that_names_the_address() -> None:
    result = CliRunner().invoke(group, ["ps", "--url", "http://127.0.0.1:9"])
    assert "http://127.0.0.1:9" in str(result.exception)


def test_deploy_makes_versions_and_reports_what_fails(server: Server, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text((AGENTS / "bare.py").read_text())
    arn = run(server, "deploy", str(script), "--name", "deployed", "--env", "SIDE=left").stdout.strip()
    assert arn.startswith("arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/deployed-")
    assert run(server, "deploy", str(script), "--name", "deployed").stdout.strip() == arn
    agents = {a["arn"]: a["version"] for a in server.view.get("/_local/status")["agents"]}
    assert agents[arn] == 2
    script.write_text("import missing_module_of_mine\n")
    result = CliRunner().invoke(group, ["deploy", str(script), "--name", "deployed", "--url", server.url])
    assert "missing_module_of_mine" in str(result.exception)


def folder_with_wheel(tmp_path: Path) -> Path:
    """A project that depends on a package which lies beside it: nothing is fetched."""
    wheel = tmp_path / "tinydep-1-py3-none-any.whl"
    info = "tinydep-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("tinydep/__init__.py", "VALUE = 41\n")
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinydep\nVersion: 1\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "agent.py").write_text("import tinydep\n")
    (agent / "requirements.txt").write_text(f"tinydep @ file://{wheel}\n")
    return agent


def test_environment_is_built_once_also_for_two_at_once(tmp_path: Path) -> None:
    agent = folder_with_wheel(tmp_path)
    root = tmp_path / "environments"
    dependencies = agent / "agent.py"
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build(dependencies, root))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    out = subprocess.run(
        [found[0], "-c", "import tinydep; print(tinydep.VALUE)"], capture_output=True, text=True, check=True
    )
    assert out.stdout == "41\n"
    assert list(root.rglob("tinydep/__pycache__/*.pyc"))
    assert len([p for p in root.iterdir() if p.is_dir()]) == 1


def test_agent_without_dependency_files_runs_in_this_environment(tmp_path: Path) -> None:
    assert build(tmp_path / "agent.py", tmp_path / "none") == Path(sys.executable)
    assert not (tmp_path / "none").exists()


def test_failed_build_says_why_and_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("tinydep @ file:///does/not/exist\n")
    for _ in range(2):
        with pytest.raises(LocalRuntimeError, match="does/not/exist"):
            build(tmp_path / "agent.py", tmp_path / "environments")


def test_logs_show_what_a_terminal_would_obey(server: Server, session_id: str) -> None:
    server.invoke({"do": "print", "text": "before \x1b]0;owned\x07 after \r gone ä"}, session_id)
    shown = run(server, "logs", session_id).output
    assert "before \\e]0;owned\\a after \n gone ä" in shown
    assert "\x1b" not in shown
