"""`agentcore-rl train`: every backend's example configuration is checked and its plan printed, without GPU or trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.backends.dotenv import read_dotenv
from agentcore_rl_toolkit.backends.settings import read_settings
from agentcore_rl_toolkit.cli.train import BACKENDS as ALL_BACKENDS
from agentcore_rl_toolkit.cli.train import command
from agentcore_rl_toolkit.errors import ConfigError

BACKENDS = [name for name in ALL_BACKENDS if name != "loop"]  # it has no plan: tests/cli/test_train.py
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


def test_a_rehearsal_needs_no_key_and_takes_the_built_in_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    words = ["--backend", "tinker", "--config", str(EXAMPLES / "tinker" / "gsm8k.yaml"), "--dry-run"]
    real = CliRunner().invoke(command, words, catch_exceptions=False).output
    assert "TINKER_API_KEY in the environment" in real
    rehearsed = CliRunner().invoke(command, [*words, "--rehearse"], catch_exceptions=False).output
    assert "missing on this machine" not in rehearsed
    assert "builtin/policy" in rehearsed
    with pytest.raises(ConfigError, match="--backend tinker"):
        CliRunner().invoke(command, ["--backend", "verl", "--rehearse"], catch_exceptions=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_typo_in_a_configuration_is_named(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text((EXAMPLES / backend / "gsm8k.yaml").read_text() + "\nmisspelt_key: 1\n")
    with pytest.raises(ConfigError, match="misspelt_key"):
        CliRunner().invoke(command, ["--backend", backend, "--config", str(path), "--dry-run"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("backend", "key", "value"),
    [
        ("verl", "reqs_per_sec", 0),
        ("verl", "max_rollout_time", -1),
        ("verl", "extra_rollouts", -1),
        ("verl", "max_submit_time", 0),
        ("verl", "exp_id", "../../x"),
        ("verl", "gateway_port", 99999),
        ("rllm", "tps_limit", 0),
        ("rllm", "n_parallel", 0),
        ("rllm", "experiment_name", "../x"),
        ("slime", "acr_tps_limit", 0),
        ("tinker", "tps_limit", 0),
        ("trl", "tps_limit", 0),
    ],
)
def test_values_that_cannot_work_are_found_before_a_run(backend: str, key: str, value: object, tmp_path: Path) -> None:
    settings = read_settings(EXAMPLES / backend / "gsm8k.yaml")
    (settings["agentcore"] if backend == "verl" else settings)[key] = value
    path = tmp_path / "c.json"
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=key if key != "experiment_name" else "exp_id"):
        CliRunner().invoke(command, ["--backend", backend, "--config", str(path), "--dry-run"], catch_exceptions=False)


def test_verl_is_told_which_data_is_missing_and_which_cannot_be_read(tmp_path: Path) -> None:
    arguments = ["--backend", "verl", "--config", str(EXAMPLES / "verl" / "gsm8k.yaml"), "--dry-run"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "the data at data.val_files=gsm8k/test.jsonl" in done.output
    assert "data.train_files" not in done.output.split("missing on this machine:")[1]
    (tmp_path / "gsm8k/test.jsonl").write_text("{oops\n")
    with pytest.raises(ConfigError, match=r"test\.jsonl:1"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_a_file_env_fills_what_the_environment_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AGENTCORE_AGENT_ARN", "MINE"):
        monkeypatch.setenv(name, "x")  # so that what the command sets is taken back
        monkeypatch.delenv(name)
    (tmp_path / ".env").write_text(
        "# of this run\n\nexport AGENTCORE_AGENT_ARN='arn:aws:bedrock-agentcore:us-west-2:1:runtime/from-file'  # it\r\n"
        'AGENTCORE_S3_BUCKET=not-this-one\nMINE = "a # b"\n'
    )
    path = EXAMPLES / "rllm" / "gsm8k.yaml"
    done = CliRunner().invoke(
        command, ["--backend", "rllm", "--config", str(path), "--dry-run"], catch_exceptions=False
    )
    assert "runtime/from-file" in done.stdout
    assert "my-bucket" in done.stdout
    assert "not-this-one" not in done.output
    assert os.environ["MINE"] == "a # b"
    assert "AGENTCORE_AGENT_ARN, MINE" in done.stderr
    assert "a # b" not in done.stderr


@pytest.mark.parametrize("text", ["A=1\nnonsense\n", "A=1\nB='open\n"])
def test_a_file_env_that_cannot_be_read_is_named_by_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(text)
    with pytest.raises(ConfigError, match=r"\.env:2"):
        read_dotenv(tmp_path / ".env")


def test_nothing_is_launched_when_the_trainer_is_missing() -> None:
    path = EXAMPLES / "slime" / "gsm8k.yaml"
    with pytest.raises(ConfigError, match="cannot start slime"):
        CliRunner().invoke(command, ["--backend", "slime", "--config", str(path)], catch_exceptions=False)
