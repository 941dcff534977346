"""`agentcore-rl train --backend sagemaker` as a process: whichever way it ends, its session does not go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from agentcore_rl_toolkit.backends.sagemaker import session
from agentcore_rl_toolkit.backends.sagemaker.local.service import running
from agentcore_rl_toolkit.cli.doctor.aws import Account
from agentcore_rl_toolkit.cli.train import command
from agentcore_rl_toolkit.policy import WEIGHTS_DIR

from ..faulty_service import ListingApp
from ..scripted_model import ScriptedModel

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

# Under nohup these tests ignore a hang-up, and so would what they start.
COMMAND = (
    "import runpy, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "runpy.run_module('agentcore_rl_toolkit.cli', run_name='__main__', alter_sys=True)"
)


class Held(ScriptedModel):
    """`reached` is set when `stage` begins, which then waits for `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = ""
        self.reached, self.release = threading.Event(), threading.Event()

    def _at(self, stage: str) -> None:
        if stage == self.stage:
            self.reached.set()
            self.release.wait(120)

    def create(self, run: str, *, temperature: float = 1.0) -> None:
        self._at("create")
        super().create(run)

    def save(self, run: str, path: str, *, optimizer: bool) -> None:
        self._at("publish")
        super().save(run, path, optimizer=optimizer)


class Place:
    def __init__(self, folder: Path, model: Held) -> None:
        self.folder, self.model = folder, model
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        words = ["train", "--backend", "sagemaker", "--config", str(self.folder / "config.json")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.process

    def statuses(self) -> list[str]:
        found = boto3.Session().client("sagemaker").list_training_sessions()["TrainingSessionSummaries"]
        return [each["TrainingSessionStatus"] for each in found]

    def billed(self) -> list[Any]:
        """Of each session of the run, its tokens; None for one whose stop is not confirmed."""
        return list(json.loads((self.folder / "out" / session.FILE).read_text()).values())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (tmp_path / "rows.jsonl").write_text('{"idx": 0, "prompt": "1+1", "answer": "2"}\n')
    config = {
        "exp_id": "run",
        "agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
        "endpoint_url": "http://127.0.0.1:9",
        "s3_bucket": f"file://{tmp_path}/records",
        "base_model": "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/m",
        "model_dir": str(WEIGHTS_DIR),
        "data_path": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "role_arn": "arn:aws:iam::123456789012:role/training",
        "output_s3": "s3://bucket/runs",
        "groups_per_step": 1,
        "gateway_url": "http://127.0.0.1:9",  # nothing listens there
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Held()
    with running(model, app=ListingApp) as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        made = Place(tmp_path, model)
        yield made
        model.release.set()
        if made.process is not None:
            made.process.kill()
            made.process.communicate()


@pytest.mark.parametrize(
    ("number", "stage"),
    [(signal.SIGTERM, "create"), (signal.SIGINT, "publish"), (signal.SIGHUP, "publish")],
    ids=["SIGTERM", "Ctrl-C", "closed-terminal"],
)
def test_a_signal_stops_the_session_at_any_stage(place: Place, number: signal.Signals, stage: str) -> None:
    place.model.stage = stage
    process = place.start()
    assert place.model.reached.wait(120)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    place.model.release.set()
    assert set(place.statuses()) <= {"Stopping", "Stopped"}
    assert None not in place.billed()


def test_an_error_stops_the_session(place: Place) -> None:
    output, _ = place.start().communicate(timeout=120)
    assert "error: " in output  # of the gateway that is not there
    assert "quotas" not in output  # which a local runtime has not
    assert place.statuses() == ["Stopped"]
    assert None not in place.billed()


def test_a_killed_run_leaves_a_session_that_doctor_names_and_two_commands_stop(place: Place) -> None:
    place.model.stage = "publish"
    process = place.start()
    assert place.model.reached.wait(120)
    process.kill()
    process.communicate()
    place.model.release.set()
    assert place.statuses() == ["Running"]
    assert place.billed() == [None]
    [name] = json.loads((place.folder / "out" / session.FILE).read_text())
    account = Account(agent_arn=None, bucket=None, gateway_url=None, gateway_admin_key=None)
    [finding] = account.training()
    assert name in finding.text
    assert "--stop-session" in finding.advice

    done = CliRunner().invoke(command, ["--stop-session", name], catch_exceptions=False)
    assert name in done.output
    assert set(place.statuses()) <= {"Stopping", "Stopped"}
    assert account.training() == []

    # The run that goes on stops what it finds by itself, then fails at the gateway, too.
    place.model.stage = ""
    output, _ = place.start().communicate(timeout=120)
    assert f"left session {name}" in output
    assert place.statuses() == ["Stopped", "Stopped"]
    assert len(place.billed()) == 2
    assert None not in place.billed()
