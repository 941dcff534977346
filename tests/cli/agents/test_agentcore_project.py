"""Agents of AWS's own command line: found by name, with their variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.cli.agents.agentcore_project import variables_of
from agentcore_rl_toolkit.cli.training.stack import find_agent
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runtime import LocalRuntime

from ...conftest import CommandLine

CONFIG: dict[str, Any] = {
    "runtimes": [
        {
            "name": "Shop",
            "entrypoint": "main.py:handler",
            "codeLocation": "app/Shop/",
            "envVars": [{"name": "LEVEL", "value": "hard"}],
        },
        {"name": "Web", "entrypoint": "main.ts", "codeLocation": "app/Web/"},
        {"name": "Gone", "entrypoint": "main.py", "codeLocation": "app/Gone/"},
    ],
    "credentials": [{"name": "shop-openai"}],
}


ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/Shop-0123456789"
AGENT = """
from agentcore_rl_toolkit import AgentCoreRLApp
app = AgentCoreRLApp()

@app.rollout_entrypoint
def run(payload):
    return {"rewards": payload["n"] / 4}

if __name__ == "__main__":
    app.run()
"""
TRL = """
exp_id = "e"
s3_bucket = "records"
model = "Qwen/Qwen3-0.6B"
gateway_url = "http://127.0.0.1:1"
policy_url = "http://127.0.0.1:2"
data_path = "rows.jsonl"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agentcore").mkdir()
    (tmp_path / "app" / "Shop").mkdir(parents=True)
    (tmp_path / "app" / "Shop" / "main.py").touch()
    (tmp_path / "agentcore" / "agentcore.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path / "app")
    return tmp_path


def test_a_runtime_is_found_by_its_name_in_the_whole_project(project: Path) -> None:
    file = project / "app" / "Shop" / "main.py"
    assert find_agent("Shop") == file
    keys = {"AGENTCORE_CREDENTIAL_SHOP_OPENAI": "placeholder"}
    assert variables_of(file) == {"LOCAL_DEV": "1", "LEVEL": "hard", **keys}
    (project / "agentcore" / ".env.local").write_text("AGENTCORE_CREDENTIAL_SHOP_OPENAI=sk-x\nLEVEL=easy\n")
    assert variables_of(file) == {
        "LOCAL_DEV": "1",
        "LEVEL": "easy",
        "AGENTCORE_CREDENTIAL_SHOP_OPENAI": "sk-x",
    }
    assert variables_of(project / "other.py") == {}


def test_a_runtime_has_its_own_variables_even_if_another_one_has_the_same_file(project: Path) -> None:
    [shop, *_] = CONFIG["runtimes"]
    easy = {**shop, "name": "Easy", "envVars": [{"name": "LEVEL", "value": "easy"}]}
    (project / "agentcore" / "agentcore.json").write_text(json.dumps({"runtimes": [shop, easy]}))
    for name, level in (("Easy", "easy"), ("Shop", "hard")):
        assert variables_of(find_agent(name))["LEVEL"] == level


@pytest.mark.parametrize(
    "runtimes",
    [{"Shop": {}}, ["Shop"], [{"name": "Shop"}], [{"entrypoint": "a.py"}], [{"name": "Shop", "entrypoint": 1}]],
)
def test_a_project_that_cannot_be_read_is_named(project: Path, runtimes: Any) -> None:
    (project / "agentcore" / "agentcore.json").write_text(json.dumps({"runtimes": runtimes}))
    with pytest.raises(ConfigError, match=r"agentcore\.json"):
        find_agent("Shop")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Other", "has no runtime 'Other'; it has Gone, Shop, Web"),
        ("Web", "not an existing file of Python"),
        ("Gone", "not an existing file of Python"),
    ],
)
def test_a_runtime_that_cannot_be_served_is_named(project: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        find_agent(name)


def test_a_name_outside_of_a_project_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_agent("Shop") == tmp_path / "Shop"


def test_a_configuration_that_cannot_be_read_is_named(project: Path) -> None:
    (project / "agentcore" / "agentcore.json").write_text("{")
    with pytest.raises(ConfigError, match=r"agentcore.json cannot be read"):
        find_agent("Shop")


def deploy(project: Path, **arns: str) -> None:
    """Write the state that AWS's command line keeps: an ARN of the agent Shop for each target."""
    targets = {
        target: {"resources": {"runtimes": {"Shop": {"runtimeId": arn.rsplit("/", 1)[1], "runtimeArn": arn}}}}
        for target, arn in arns.items()
    }
    (project / "agentcore" / ".cli").mkdir(exist_ok=True)
    (project / "agentcore" / ".cli" / "deployed-state.json").write_text(json.dumps({"targets": targets}))


def test_eval_runs_the_deployed_agent_of_a_name_if_its_records_have_a_bucket(
    project: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "agent.py").write_text(AGENT)
    (project / "app" / "rows.jsonl").write_text('{"n": 1}\n{"n": 3}\n')
    store = (project / "store").as_uri()
    with LocalRuntime({"shop": project / "agent.py"}, ["--store", store]) as runtime:
        deploy(project, default=runtime.arns["shop"])
        monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_AGENTCORE", runtime.url)
        for name, value in runtime.credentials.items():
            monkeypatch.setenv(name.upper(), value)
        done = command_line("eval", "--agent", "Shop", "--bucket", store, "--data", "rows.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mean"] == 0.5
    assert f"Shop is the deployed agent {runtime.arns['shop']}" in done.stderr
    assert len(list((project / "store").rglob("*.json"))) == 2


def test_a_trainer_gets_the_arn_of_a_deployed_agent_by_its_name(
    project: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCORE_AGENT_ARN", "")  # the command sets it
    (project / "app" / "trl.toml").write_text(TRL)
    (project / "app" / "rows.jsonl").write_text('{"prompt": "x"}\n')
    words = ("train", "--backend", "trl", "--agent", "Shop", "--config", "trl.toml", "--dry-run")
    assert "--agent FILE and its options are for --backend loop" in command_line(*words).stderr
    deploy(project, default=ARN)
    done = command_line(*words)
    assert done.returncode == 0, done.stderr
    assert ARN in done.stdout
    other = ARN.replace("Shop", "Other")
    (project / "app" / "trl.toml").write_text(f'{TRL}agent_runtime_arn = "{other}"\n')
    assert f"--agent is {ARN}, and trl.toml has agent_runtime_arn {other}" in command_line(*words).stderr
    deploy(project, default=ARN, other=other)
    assert "'Shop' is deployed to several targets: default" in command_line(*words).stderr
