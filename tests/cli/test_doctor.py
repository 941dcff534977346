"""`agentcore-rl doctor` on this machine, and against moto, a local runtime and a real gateway."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.runtime.config import RuntimeConfig
from agentcore_rl_toolkit.runtime.http.app import RuntimeApp
from agentcore_rl_toolkit.runtime.runtime import Runtime
from serving import hosted, moto_server

from ..conftest import CommandLine
from ..deploy.conftest import NoProcesses

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "strands_math_agent" / "arithmetic_app.py"
ADMIN_KEY = "trainers-secret"
BUCKET = f"records-{uuid.uuid4()}"  # moto's state is the process's


@pytest.mark.system
def test_this_machine_has_what_the_tests_need(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "agentcore_rl_toolkit", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    for name in ("toolkit", "extra gateway", "extra runtime", "extra policy", "torch", "isolation", "disk"):
        assert found[name]["level"] in ("ok", "note"), found[name]
    assert all(finding["advice"] for finding in found.values() if finding["level"] != "ok")


def test_a_part_that_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    missing = ("aiohttp", "torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else real(name, *more))
    done = command_line("doctor")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fail  extra gateway"))
    assert "the model gateway needs aiohttp" in lines[at]
    assert lines[at + 1].strip().startswith("-> pip install")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-west-2"}
    location: Any = {"LocationConstraint": "us-west-2"}
    with moto_server() as url:
        boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket=BUCKET, CreateBucketConfiguration=location)
        yield url


@pytest.fixture(scope="module")
def empty_runtime() -> Iterator[str]:
    launcher: Any = NoProcesses()
    runtime = Runtime(RuntimeConfig(callers="any"), launcher=launcher)
    asyncio.run(runtime.start([]))
    with hosted(RuntimeApp(runtime)) as url:
        yield url
    asyncio.run(runtime.close())


@pytest.fixture
def account(moto: str) -> dict[str, str]:
    """The environment of somebody whose account is in order."""
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-west-2",
        "AWS_ENDPOINT_URL": moto,
        "AGENTCORE_S3_BUCKET": BUCKET,
    }


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "credentials", "Unable to locate credentials"),
        ({"AWS_REGION": ""}, "credentials", "no region"),
        ({"AGENTCORE_S3_BUCKET": "nobodys"}, "bucket", "nobodys"),
        ({"AGENTCORE_AGENT_ARN": "math"}, "agent", "is not the ARN of an agent"),
        (
            {"AGENTCORE_AGENT_ARN": "arn:aws:bedrock-agentcore:us-west-2:1:runtime/absent"},
            "agent",
            "ResourceNotFoundException",
        ),
        ({"AGENTCORE_RL_GATEWAY_URL": "http://127.0.0.1:1"}, "gateway", "127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_named_and_says_what_to_do(
    tmp_path: Path,
    account: dict[str, str],
    empty_runtime: str,
    monkeypatch: pytest.MonkeyPatch,
    command_line: CommandLine,
    change: dict[str, str],
    name: str,
    expected: str,
) -> None:
    for variable in [n for n in os.environ if n.startswith(("AWS_", "AGENTCORE_"))]:
        monkeypatch.delenv(variable)
    bare = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    control = {"AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL": empty_runtime}
    for variable, value in {**account, **change, **control, **bare}.items():
        if value:
            monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    done = command_line("doctor", "--json", "--aws")
    assert done.returncode == 1
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert not any("the check itself failed" in finding["text"] for finding in found.values())
    assert found[name]["level"] == "fail"
    assert expected in found[name]["text"]
    assert found[name]["advice"]
