"""`agentcore-rl train`: every backend's example configuration is checked and its plan printed, without GPU or trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.backends.collect import CollectConfig
from agentcore_rl_toolkit.backends.rllm import RllmConfig
from agentcore_rl_toolkit.backends.slime import SlimeRunner
from agentcore_rl_toolkit.backends.tinker.config import TinkerRunConfig
from agentcore_rl_toolkit.backends.trl import TrlConfig
from agentcore_rl_toolkit.backends.verl import AgentCoreConfig
from agentcore_rl_toolkit.cli.train import BACKENDS, command
from agentcore_rl_toolkit.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples" / "backends"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTCORE_AGENT_ARN", "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math")
    monkeypatch.setenv("AGENTCORE_S3_BUCKET", "my-bucket")
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/train.jsonl").write_text('{"idx": 0, "prompt": "1+1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_configuration_gives_a_plan(backend: str) -> None:
    path = EXAMPLES / backend / "gsm8k.yaml"
    done = CliRunner().invoke(
        command, ["--backend", backend, "--config", str(path), "--dry-run"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert done.output.startswith(f"backend: {backend}\n")
    assert "runtime/math" in done.output
    assert "my-bucket" in done.output


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_typo_in_a_configuration_is_named(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text((EXAMPLES / backend / "gsm8k.yaml").read_text() + "\nmisspelt_key: 1\n")
    with pytest.raises(ConfigError, match="misspelt_key"):
        CliRunner().invoke(command, ["--backend", backend, "--config", str(path), "--dry-run"], catch_exceptions=False)


def test_nothing_is_launched_when_the_trainer_is_missing() -> None:
    path = EXAMPLES / "slime" / "gsm8k.yaml"
    with pytest.raises(ConfigError, match="cannot start slime"):
        CliRunner().invoke(command, ["--backend", "slime", "--config", str(path)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("page", "settings"),
    [
        ("trl", TrlConfig),
        ("slime", SlimeRunner),
        ("verl", AgentCoreConfig),
        ("rllm", RllmConfig),
        ("tinker", TinkerRunConfig),
        ("README", CollectConfig),
    ],
)
def test_every_key_is_documented(page: str, settings: type) -> None:
    text = (EXAMPLES.parents[1] / "docs" / "backends" / f"{page}.md").read_text()
    missing = [f.name for f in dataclasses.fields(settings) if f"`{f.name}`" not in text]
    assert missing == []
