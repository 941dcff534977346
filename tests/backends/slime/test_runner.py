"""SlimeRunner: settings, the exact command, and what it must never do."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.slime import SlimeRunner
from agentcore_rl_toolkit.backends.slime.generate import payload_of
from agentcore_rl_toolkit.backends.slime.runner import SlimeError, prepare_data
from agentcore_rl_toolkit.backends.slime.settings import JOB_ENV
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runs.folder import status
from serving import wait_for

from .stand_in import Sample


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A machine on which everything is there: slime, Megatron, a model, data, and a `ray` that writes down its calls."""
    (tmp_path / "slime/scripts/models").mkdir(parents=True)
    (tmp_path / "slime/train.py").write_text("")
    (tmp_path / "slime/scripts/models/tiny.sh").write_text(
        'MODEL_ARGS=(\n  --swiglu\n  --normalization "RMS Norm"\n)\n'
    )
    (tmp_path / "Megatron-LM").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"question": "2+2", "answer": "4"}\n')
    (tmp_path / "bin").mkdir()
    ray = tmp_path / "bin/ray"
    ray.write_text(f"#!{sys.executable}\n" + RAY.replace("CALLS", repr(str(tmp_path / "calls"))))
    ray.chmod(0o755)
    return tmp_path


# What the runner asks of Ray, with each call written down; `job submit` runs as long as RAY_JOB_S says.
RAY = """
import os, sys, time
words = sys.argv[1:]
with open(CALLS, "a") as file:
    file.write(" ".join(words[:2]) + "\\n")
if words[:2] == ["job", "submit"]:
    time.sleep(float(os.environ.get("RAY_JOB_S", "0")))
    sys.exit(int(os.environ.get("RAY_JOB", "0")))
"""


def runner(place: Path, **more: Any) -> SlimeRunner:
    values = {
        "exp_id": "e1",
        "agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
        "s3_bucket": "my-bucket",
        "model_dir": str(place / "model"),
        "data_path": str(place / "rows.jsonl"),
        "model_type": "tiny",
        "slime_dir": str(place / "slime"),
        "megatron_dir": str(place / "Megatron-LM"),
        "run_dir": str(place / "runs"),
    }
    return SlimeRunner(**{**values, **more})


@pytest.fixture
def with_ray(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return place / "calls"


def value_of(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_a_dry_run_prints_the_exact_command_and_touches_nothing(
    place: Path, with_ray: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = runner(place).train(num_rollout=5, dry_run=True)
    assert plan.needs == []
    assert plan.command is not None
    flags = list(plan.command)
    assert flags[:3] == ["ray", "job", "submit"]
    assert value_of(flags, "--num-rollout") == "5"
    assert value_of(flags, "--custom-generate-function-path") == "agentcore_rl_toolkit.backends.slime.generate.generate"
    assert value_of(flags, "--normalization") == "RMS Norm"  # one argument, as bash reads it
    assert value_of(flags, "--global-batch-size") == "256"
    assert "job submit" in capsys.readouterr().out
    assert not with_ray.exists()
    assert not (place / "runs").exists()


def test_a_run_writes_its_inputs_and_submits_one_job(place: Path, with_ray: Path) -> None:
    runner(place).train()
    assert with_ray.read_text().splitlines() == ["job submit"]
    assert not (place / "runs/e1/summary.json").exists(), "the job has kept its rollouts elsewhere"
    settings = json.loads((place / "runs/e1/rollout.yaml").read_text())
    assert settings["agent_runtime_arn"].endswith("runtime/math")
    assert settings["gateway_port"] == 9090
    rows = [json.loads(line) for line in (place / "runs/e1/data.jsonl").read_text().splitlines()]
    assert rows[0] == {"prompt": "1+1", "metadata": {"prompt": "1+1", "answer": "2"}}
    assert rows[1] == {"prompt": "", "metadata": {"question": "2+2", "answer": "4"}}


def test_only_a_job_that_ended_well_leaves_a_finished_run(
    place: Path, with_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "runs/e1").mkdir(parents=True)
    (place / "runs/e1/metrics.jsonl").write_text('{"event": "step", "step": 0}\n')
    runner(place).train()
    assert status(place / "runs/e1") == "finished"
    monkeypatch.setenv("RAY_JOB", "1")
    with pytest.raises(SlimeError):
        runner(place).train()
    assert status(place / "runs/e1") != "finished"


def test_bad_rows_leave_no_file_with_keys_in_the_runs_folder(place: Path, with_ray: Path) -> None:
    (place / "eval.jsonl").write_text("no row\n")
    with pytest.raises(ConfigError):
        runner(place, eval_data_path=str(place / "eval.jsonl"), gateway_admin_key="of mine").train()
    assert not (place / "runs/e1/job.yaml").exists()


TRAIN = """
import json, sys
from agentcore_rl_toolkit.backends.slime import SlimeRunner
SlimeRunner(**json.loads(sys.argv[1])).train()
"""


def test_a_signal_stops_the_job(place: Path, with_ray: Path) -> None:
    made = runner(place)
    settings = json.dumps(made.flat())
    environment = {**os.environ, "RAY_JOB_S": "60"}
    process = subprocess.Popen([sys.executable, "-c", TRAIN, settings], env=environment, stderr=subprocess.PIPE)
    wait_for(with_ray.exists, process=process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert with_ray.read_text().splitlines() == ["job submit", "job stop"]


def test_the_job_gets_the_variables_it_needs_and_the_command_line_shows_none_of_them(
    place: Path, with_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    monkeypatch.setenv("MINE", "yes")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    made = runner(place, job_env=(*JOB_ENV, "MINE"))
    plan = made.plan()
    assert "a-secret" not in plan.render()
    assert "WANDB_API_KEY" in plan.render()
    made._write_inputs()
    written = json.loads(made.job_path.read_text())["env_vars"]
    assert (written["WANDB_API_KEY"], written["MINE"]) == ("a-secret", "yes")
    assert written["PYTHONPATH"].endswith("Megatron-LM")
    assert "HF_TOKEN" not in written
    assert made.job_path.stat().st_mode & 0o777 == 0o600
    made.train()
    assert not made.job_path.exists()


def test_nothing_is_started_when_something_is_missing(place: Path, with_ray: Path) -> None:
    with pytest.raises(ConfigError, match="THUDM/slime"):
        runner(place, slime_dir=str(place / "nowhere")).train()
    assert not with_ray.exists()
    missing = runner(place, model_dir="none", data_path=str(place / "none.jsonl")).plan().needs
    assert len(missing) == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tp_size": 0}, "`tp_size` must be greater"),
        ({"reward_postprocessing": "mean"}, "reward_postprocessing"),
        ({"acr_tps_limit": 0}, "tps_limit"),
        ({"acr_timeout": -1.0}, "rollout_timeout_s"),
        ({"acr_timeout": math.nan}, "rollout_timeout_s"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"max_turns": 0}, "max_turns"),
        ({"rollout_temperature": 0}, "temperature"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"gateway_port": 99999}, "gateway_port"),
        ({"extra_flags": ("--group-rm",)}, "group-rm"),
        ({"extra_flags": ("--rollout-top-p", "0.9")}, "rollout-top-p"),
        ({"extra_flags": ("--rollout-top-p=0.9",)}, "rollout-top-p"),
        ({"extra_flags": ("--custom-config-path", "x.yaml")}, "custom-config-path"),
    ],
)
def test_impossible_settings_are_refused(place: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        runner(place, **change)


def test_a_yaml_file_with_a_value_equal_to_the_default_beats_the_environment(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCORE_S3_BUCKET", "from-env")
    path = place / "c.yaml"
    text = (
        "exp_id: e\nagent_runtime_arn: arn\ns3_bucket: mine\nmodel_dir: m\ndata_path: d\nmodel_type: tiny\nlr: 1e-6\n"
    )
    path.write_text(text + "extra_flags: [--norm-epsilon, '1e-6']\n")
    made = SlimeRunner.from_yaml(path)
    assert (made.s3_bucket, made.lr, made.extra_flags) == ("mine", 1e-6, ("--norm-epsilon", "1e-6"))
    path.write_text("nonsense: 1\n" + text)
    with pytest.raises(ConfigError, match="nonsense"):
        SlimeRunner.from_yaml(path)


def test_the_agent_gets_every_row_as_it_is(tmp_path: Path) -> None:
    rows = [{"question": "q"}, {"prompt": "p", "agentcore": {"x": 1}}, {"prompt": ""}, {"prompt": [{"role": "user"}]}]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_data(tmp_path / "s.jsonl", tmp_path / "t.jsonl")
    for row, line in zip(rows, (tmp_path / "t.jsonl").read_text().splitlines(), strict=True):
        made = json.loads(line)
        assert payload_of(Sample(prompt=made["prompt"], metadata=made["metadata"])) == row
