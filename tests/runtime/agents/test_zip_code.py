"""Agents deployed as a zip archive in S3, by unmodified boto3."""

from __future__ import annotations

import functools
import io
import json
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from agentcore_rl_toolkit.contract import new_session_id
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.runtime.agents.zip_code import CodeArtifact, unpack

from ..conftest import Server, wait_for

HERE = f"PYTHON_{sys.version_info.major}_{sys.version_info.minor}"
AGENT = """
from bedrock_agentcore.runtime import BedrockAgentCoreApp
from vendored import answer

app = BedrockAgentCoreApp()


@app.entrypoint
def main(payload):
    return answer(payload)


if __name__ == "__main__":
    app.run()
"""


def archive(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
    return out.getvalue()


def configuration(key: str, runtime: str = HERE, *entry_point: str) -> dict[str, Any]:
    return {
        "code": {"s3": {"bucket": "code", "prefix": key}},
        "runtime": runtime,
        "entryPoint": list(entry_point or ("agent.py",)),
    }


# What is deployed to a runtime without credential: tests/deploy/test_deployment.py.
@pytest.mark.parametrize(
    "credential", [pytest.param(None, marks=pytest.mark.nightly), "AKLOCAL:secret"], ids=["unsigned", "signed"]
)
def test_an_archive_in_s3_is_deployed_and_a_new_one_is_a_new_version(
    start_server: Callable[..., Server], tmp_path: Path, credential: str | None
) -> None:
    server = start_server("--s3-dir", str(tmp_path / "s3"), credential=credential)
    s3 = boto3.client(
        "s3",
        endpoint_url=server.info["s3_url"],
        region_name="us-west-2",
        aws_access_key_id="AKLOCAL",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}),
    )
    s3.create_bucket(Bucket="code", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    control = server.client("bedrock-agentcore-control")

    def settled(identity: str, version: str) -> Any:
        state = control.get_agent_runtime(agentRuntimeId=identity, agentRuntimeVersion=version)
        return state if state["status"] not in ("CREATING", "UPDATING") else None

    def invoke(arn: str) -> Any:
        reply = server.default_client.invoke_agent_runtime(
            agentRuntimeArn=arn, runtimeSessionId=new_session_id(), payload=b'{"n": 20}'
        )
        return json.loads(reply["response"].read())

    common = {"roleArn": "arn:aws:iam::123456789012:role/local", "networkConfiguration": {"networkMode": "PUBLIC"}}
    for number, operation in ((1, "+ 1"), (2, "* 2")):
        vendored = f"def answer(payload):\n    return payload['n'] {operation}\n"
        s3.put_object(
            Bucket="code", Key="agents/math.zip", Body=archive({"src/agent.py": AGENT, "src/vendored.py": vendored})
        )
        artifact = {
            "codeConfiguration": configuration("agents/math.zip", HERE, "opentelemetry-instrument", "src/agent.py")
        }
        if number == 1:
            made = control.create_agent_runtime(agentRuntimeName="math", agentRuntimeArtifact=artifact, **common)
        else:
            identity = made["agentRuntimeId"]
            made = control.update_agent_runtime(agentRuntimeId=identity, agentRuntimeArtifact=artifact, **common)
        state = wait_for(functools.partial(settled, made["agentRuntimeId"], made["agentRuntimeVersion"]))
        assert state["status"] == "READY", state.get("failureReason")
        assert invoke(made["agentRuntimeArn"]) == (21 if number == 1 else 40)
    absent = control.create_agent_runtime(
        agentRuntimeName="absent", agentRuntimeArtifact={"codeConfiguration": configuration("absent.zip")}, **common
    )
    state = wait_for(lambda: settled(absent["agentRuntimeId"], "1"))
    assert state["status"] == "CREATE_FAILED"
    assert "cannot fetch s3://code/absent.zip" in state["failureReason"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"runtime": "NODE_22"}, "only PYTHON_3_x"),
        ({"entryPoint": ["main.js"]}, "names no .py file"),
        ({"code": {"s3": {"bucket": "code"}}}, "code.s3.prefix"),
        ({"code": {"s3": {"bucket": "code", "prefix": "k", "versionId": "1"}}}, "versionId"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        CodeArtifact.read({**configuration("k"), **changes})


@pytest.mark.parametrize("name", ["../outside.py", "/etc/planted", "a/../../b"])
def test_an_archive_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "code.zip").write_bytes(archive({"agent.py": "", name: ""}))
    with pytest.raises(ConfigError, match="leads out"):
        unpack(tmp_path / "code.zip", tmp_path / "files")


def test_a_damaged_archive_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "code.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("agent.py", "x = 1\n" * 1000)
    data = bytearray((tmp_path / "code.zip").read_bytes())
    begin = 30 + len("agent.py")  # where the compressed bytes are
    data[begin : begin + 8] = b"\xff" * 8
    (tmp_path / "code.zip").write_bytes(data)
    with pytest.raises(ConfigError, match="not a zip archive that can be read"):
        unpack(tmp_path / "code.zip", tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_links_and_things_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    entry = zipfile.ZipInfo("link")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as zipped:
        zipped.writestr(entry, "/etc/passwd")
    with pytest.raises(ConfigError, match="leads out"):
        unpack(tmp_path / "code.zip", tmp_path / "files")
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(ConfigError, match="not a zip archive"):
        unpack(tmp_path / "text.zip", tmp_path / "files")
