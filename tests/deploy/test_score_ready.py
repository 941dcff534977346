"""Versions for rollouts of agents that have no rollout function: their commands, archives and images."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.deploy.artifact import this_platform
from agentcore_rl_toolkit.deploy.score_ready import READY_FILE, STARTER, dockerfile, start_command, start_file
from agentcore_rl_toolkit.deploy.settings import Settings
from agentcore_rl_toolkit.errors import ConfigError
from serving import wait_for

from ..conftest import reserved_port
from .conftest import deployment

AGENT = """
import sys
from bedrock_agentcore import BedrockAgentCoreApp

app = BedrockAgentCoreApp()

@app.entrypoint
def invoke(payload):
    return {"got": payload}

if __name__ == "__main__":
    app.run(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080)
"""


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["python", "-m", "main"], ["python", "-m", STARTER, "-m", "main"]),
        (
            ["opentelemetry-instrument", "python", "main.py"],
            ["opentelemetry-instrument", "python", "-m", STARTER, "main.py"],
        ),
        (["uv", "run", "python3.12", "app.py"], ["uv", "run", "python3.12", "-m", STARTER, "app.py"]),
        (["/app/.venv/bin/python", "-u", "a.py"], ["/app/.venv/bin/python", "-u", "-m", STARTER, "a.py"]),
        (
            ["python", "-OO", "-X", "dev", "-Wall", "a.py", "-c", "x"],
            ["python", "-O", "-O", "-X", "dev", "-W", "all", "-m", STARTER, "a.py", "-c", "x"],
        ),
        (["python3", "-um", "main", "-v"], ["python3", "-u", "-m", STARTER, "-m", "main", "-v"]),
        (
            ["uvicorn", "main:app", "--port", "8080"],
            ["python", "-m", STARTER, "-m", "uvicorn", "main:app", "--port", "8080"],
        ),
    ],
)
def test_the_starter_comes_behind_the_python_of_a_command(words: list[str], made: list[str]) -> None:
    assert start_command(words) == made


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["node", "main.js"],
        ["/bin/sh", "-c", "python main.py"],
        ["python", "-u", "-c", "import main"],
        ["python", "-"],
        ["python"],
    ],
)
def test_a_command_without_python_is_refused_with_the_reason(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="needs a command with python or uvicorn"):
        start_command(words)


def test_a_derived_image_keeps_its_user_and_names_what_it_lacks() -> None:
    text = dockerfile("prod:1", ["python", "-m", STARTER, "main.py"], "toolkit.whl", "bedrock")
    assert text.startswith("FROM prod:1\nUSER root\n")
    assert "older than 3.11" in text
    assert "neither pip nor uv" in text
    assert text.endswith(f'USER bedrock\nENTRYPOINT []\nCMD ["python", "-m", "{STARTER}", "main.py"]\n')


def test_the_start_file_of_an_archive_runs_the_agents_own_file(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(AGENT)
    (tmp_path / READY_FILE).write_text(start_file("main.py"))
    with reserved_port() as port:
        process = subprocess.Popen([sys.executable, str(tmp_path / READY_FILE), str(port)], cwd="/")
        try:

            def ask(payload: dict[str, Any]) -> Any:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/invocations", json.dumps(payload).encode())
                try:
                    return json.load(urllib.request.urlopen(request, timeout=60))
                except OSError:
                    return None

            assert wait_for(lambda: ask({"prompt": "x"}), process=process) == {"got": {"prompt": "x"}}
            block = {"exp_id": "e", "input_id": "i", "s3_bucket": f"file://{tmp_path}/store"}
            reply = ask({"prompt": "x", "_rollout": block})
            record = tmp_path / "store" / reply["result_key"]
            wait_for(record.exists)
            assert json.loads(record.read_text())["_answer"] == {"got": {"prompt": "x"}}
        finally:
            process.kill()
            process.wait(10)


@pytest.mark.slow
def test_a_version_for_rollouts_is_deployed_beside_the_one_for_production(
    account: dict[str, str], tmp_path: Path
) -> None:
    boto3.client("s3").create_bucket(Bucket="ready", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    (tmp_path / "main.py").write_text(AGENT)
    (tmp_path / "requirements.txt").write_text("")
    given: dict[str, Any] = {
        "folder": tmp_path,
        "entry": "main.py",
        "code": True,
        "bucket": "ready",
        "platform": this_platform(),
    }
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"the agent other was not made by .*nothing is changed"):
        deployment(Settings(name="other", score_ready=True, **given), lines).up()
    calls: list[Any] = []
    ready = deployment(Settings(name="shop_training", score_ready=True, **given), lines)
    artifact = ready._artifact()
    calls.append(artifact["codeConfiguration"]["entryPoint"])
    assert calls == [[READY_FILE]]
    place = artifact["codeConfiguration"]["code"]["s3"]
    body = boto3.client("s3").get_object(Bucket="ready", Key=place["prefix"])["Body"].read()
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        assert archive.read(READY_FILE).decode() == start_file("main.py")
        assert "agentcore_rl_toolkit/app/deployed/start.py" in archive.namelist()
    wanted = ready._agent._wanted(artifact, "role")["environmentVariables"]
    assert wanted == {"AGENTCORE_RL_ROLLOUTS": "on", "AGENTCORE_RL_AS_IS": "1"}


@pytest.mark.usefixtures("image_builder")
def test_a_rehearsal_shows_the_image_that_would_be_derived(account: dict[str, str]) -> None:
    lines: list[str] = []
    what = Settings(
        name="shop_training",
        image="123.dkr.ecr.us-west-2.amazonaws.com/shop:7",
        score_ready=True,
        platform="linux/arm64",
    )
    deployment(what, lines, rehearse=True).up()
    assert any("would build 123.dkr.ecr.us-west-2.amazonaws.com/shop:7 for linux/arm64" in line for line in lines), (
        lines
    )
