"""Values of session variables and keys are written nowhere: not into a run, an export, a log, a ledger or a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.init import write
from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.cli.training.settings import LocalRun, new_run, old_run, read
from agentcore_rl_toolkit.errors import ConfigError

SECRET = "planted-8c1f3b"
NAMES = ("GIVEN", "HERE", "DOTENV")
# An agent that has every variable, and can read neither the answers nor the file of variables.
CHECK = f"""\
    import os, pathlib
    assert all(os.environ[name].startswith('planted') for name in {NAMES})
    here = pathlib.Path(__file__).parent
    assert [(here / name).read_text() for name in ('rows.jsonl', '.env')] == ['', '']
    assert not list((here / 'runs').rglob('config.json'))
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with an agent that needs the variables, one of them in its file `.env`, and with a run."""
    agent = write(tmp_path / "shop", "plain") / "agent.py"
    entrypoint = "async def invoke_agent(payload):\n"
    agent.write_text(agent.read_text().replace(entrypoint, entrypoint + CHECK))
    (tmp_path / "shop" / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "answer": "4", "api_key": SECRET}))
    (tmp_path / "shop" / ".env").write_text(f"\ufeffDOTENV={SECRET}-dotenv\nGIVEN=overridden\n")
    (tmp_path / "shop" / "runs").mkdir()
    return tmp_path


def run(folder: Path, *words: str, **variables: str) -> str:
    """What the command printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def places(folder: Path) -> list[str]:
    """Files that hold the secret, but those that the user wrote."""
    own = {folder / "shop" / ".env", folder / "shop" / "rows.jsonl"}
    files = [path for path in folder.rglob("*") if path.is_file() and path not in own]
    assert len(files) > 20
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.system
@pytest.mark.timeout(600)
def test_no_command_writes_the_value_of_a_session_variable(shop: Path) -> None:
    given = ["--session-env", f"GIVEN={SECRET}-given", "--session-env", "HERE", "--env-file", "shop/.env"]
    agent = ["--agent", "shop/agent.py", "--data", "shop/rows.jsonl"]
    small = ["--steps", "1", "--groups", "1", "--rollouts", "2", "--out", "shop/runs/one"]
    said = run(shop, "train", *agent, *given, *small, HERE=f"{SECRET}-here")
    said += run(shop, "view", "shop/runs/one", "--export", "run.html", "--no-open")
    config = json.loads((shop / "shop" / "runs" / "one" / "config.json").read_text())
    assert set(config["session_env"]) == set(NAMES)
    url = f"http://user:{SECRET}-user@127.0.0.1:9/v1?api_key={SECRET}-query"
    no_model = CHECK + "    return {'answer': '4'}\n"
    source = shop / "shop" / "agent.py"
    source.write_text(source.read_text().replace(CHECK, no_model))
    model = {"AGENTCORE_RL_MODEL_API_KEY": f"{SECRET}-model", "HERE": f"{SECRET}-here"}
    said += run(shop, "eval", *agent, *given, "--base-url", url, "--out", "evaluated", **model)
    assert json.loads((shop / "evaluated" / "summary.json").read_text())["mean"] == 1.0
    assert SECRET not in said
    assert places(shop) == []


def test_a_run_keeps_the_names_and_a_resumed_one_needs_the_values_again(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shop / "train.toml").write_text(
        f'agent = "shop/agent.py"\ndata = "shop/rows.jsonl"\nsession_env = ["GIVEN={SECRET}"]\n'
    )
    settings = read({}, shop / "train.toml")
    assert SECRET not in repr(settings)
    folder = new_run(settings, shop / "run")
    assert SECRET not in (folder / "config.json").read_text()
    assert old_run(folder, {})[1].session_env == ("GIVEN",)  # its value is then that of the environment
    assert old_run(folder, {"session_env": ("GIVEN=again",)})[1].session_env == ("GIVEN=again",)
    with pytest.raises(ConfigError, match="drop session_env"):
        old_run(folder, {"session_env": ("OTHER=value",)})
    with pytest.raises(ConfigError) as error:
        LocalRun.from_values({"agent": "a", "data": "d", "session_env": SECRET}, where="train.toml")
    assert SECRET not in str(error.value)


def test_a_credential_that_the_shell_lacks_is_refused_and_no_placeholder_takes_its_place(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    row = str(shop / "shop" / "rows.jsonl")
    agent = str(shop / "shop" / "agent.py")
    words = ["eval", "--agent", agent, "--data", row, "--model", "none", "--session-env", "AWS_ACCESS_KEY_ID"]
    done = CliRunner().invoke(cli, [*words, "--out", str(shop / "out")])
    assert isinstance(done.exception, ConfigError)
    assert "session variable 'AWS_ACCESS_KEY_ID' has no value" in str(done.exception)
