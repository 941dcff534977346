"""`agentcore-rl train`: every backend's example configuration is checked and its plan printed, without GPU or trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.backends.rllm import RllmConfig
from agentcore_rl_toolkit.backends.slime import SlimeRunner
from agentcore_rl_toolkit.backends.verl.settings import plan as verl_plan
from agentcore_rl_toolkit.cli.train import BACKENDS as ALL_BACKENDS
from agentcore_rl_toolkit.cli.train import command
from agentcore_rl_toolkit.errors import ConfigError

BACKENDS = [name for name in ALL_BACKENDS if name != "loop"]  # it has no plan: tests/cli/test_train.py
SAGEMAKER = ["sagemaker/session.yaml", "sagemaker/job.yaml"]
EXAMPLES = Path(__file__).parents[2] / "examples" / "backends"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTCORE_AGENT_ARN", "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math")
    monkeypatch.setenv("AGENTCORE_S3_BUCKET", "my-bucket")
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/train.jsonl").write_text('{"idx": 0, "prompt": "1+1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [f"{b}/gsm8k.yaml" for b in BACKENDS if b != "sagemaker"] + SAGEMAKER)
def test_the_example_configuration_gives_a_plan(name: str) -> None:
    backend = name.partition("/")[0]
    words = ["--backend", backend, "--config", str(EXAMPLES / name), "--dry-run"]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert done.output.startswith(f"backend: {backend}\n")
    assert "runtime/math" in done.output
    assert "my-bucket" in done.output


def test_a_rehearsal_needs_no_key_and_takes_the_built_in_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    words = ["--backend", "sagemaker", "--config", str(EXAMPLES / "sagemaker" / "session.yaml"), "--dry-run"]
    rehearsed = CliRunner().invoke(command, [*words, "--rehearse"], catch_exceptions=False).output
    assert "missing on this machine" not in rehearsed
    assert "Model/builtin-policy" in rehearsed
    words = ["--backend", "sagemaker", "--config", str(EXAMPLES / "sagemaker" / "job.yaml"), "--dry-run"]
    monkeypatch.delenv("AGENTCORE_AGENT_ARN")
    here = [*words, "--rehearse", "--agent", "app.py"]  # which is started with the run
    assert "Model/builtin-policy" in CliRunner().invoke(command, here, catch_exceptions=False).output
    with pytest.raises(ConfigError, match="missing `agent_runtime_arn`"):
        CliRunner().invoke(command, words, catch_exceptions=False)
    monkeypatch.setenv("AGENTCORE_AGENT_ARN", "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math")
    words = ["--backend", "tinker", "--config", str(EXAMPLES / "tinker" / "gsm8k.yaml"), "--dry-run"]
    real = CliRunner().invoke(command, words, catch_exceptions=False).output
    assert "TINKER_API_KEY in the environment" in real
    with pytest.raises(ConfigError, match="--backend sagemaker"):
        CliRunner().invoke(command, ["--backend", "verl", "--rehearse"], catch_exceptions=False)


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


def test_nothing_is_launched_when_the_trainer_is_missing() -> None:
    path = EXAMPLES / "slime" / "gsm8k.yaml"
    with pytest.raises(ConfigError, match="cannot start slime"):
        CliRunner().invoke(command, ["--backend", "slime", "--config", str(path)], catch_exceptions=False)


COMMON = {"agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/a", "s3_bucket": "b"}


@pytest.mark.parametrize(
    ("backend", "settings", "words", "shown"),
    [
        (
            "verl",
            {"agentcore": COMMON, "args": {"trainer.nnodes": 2}},
            ["trainer.n_gpus_per_node=8"],
            "n_gpus_per_node=8",
        ),
        ("rllm", {**COMMON, "model_path": "m"}, ["trainer.nnodes=2"], "trainer.nnodes=2"),
        (
            "trl",
            {**COMMON, "exp_id": "e", "model": "m", "gateway_url": "http://g", "policy_url": "http://p"},
            ["max_steps=3"],
            "'max_steps': 3",
        ),
        (
            "slime",
            {**COMMON, "exp_id": "e", "model_dir": "m", "model_type": "t", "data_path": "rows.jsonl"},
            ["--pipeline-model-parallel-size", "2"],
            "--pipeline-model-parallel-size 2",
        ),
    ],
)
def test_a_trainers_own_arguments_pass_through(
    tmp_path: Path, backend: str, settings: dict[str, Any], words: list[str], shown: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    file = tmp_path / "config.json"
    data = {"data_path": str(tmp_path / "rows.jsonl")} if backend in ("trl", "slime") else {}
    file.write_text(json.dumps({**settings, **data}))
    command_line = ["--backend", backend, "--config", str(file), "--dry-run", "--", *words]
    done = CliRunner().invoke(command, command_line, catch_exceptions=False)
    assert shown in done.output.replace(" \\\n    ", " ")


def slime_run(**more: Any) -> SlimeRunner:
    return SlimeRunner(**COMMON, exp_id="e", model_dir="m", model_type="t", data_path="d", **more)


VERL = [f"agentcore.{name}={value}" for name, value in COMMON.items()]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: slime_run(extra_flags=("--lr", "1")), "learning_rate"),
        (lambda: RllmConfig(**COMMON, model_path="m").with_args(["rllm.rollout.n=4"]).plan(), r"rllm\.rollout\.n"),
        (lambda: verl_plan([*VERL, "trainer.use_v1=false"]), r"trainer\.use_v1"),
    ],
)
def test_an_argument_that_contradicts_a_setting_is_named(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_slime_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    run = slime_run(save_dir=str(tmp_path))
    flags = run.flags(1)
    assert flags[flags.index("--load") + 1] == str(Path("m").absolute())  # Ray runs the job in another folder
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    flags = run.flags(1)
    assert flags[flags.index("--load") + 1] == str(tmp_path)
