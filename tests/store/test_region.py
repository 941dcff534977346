"""Where S3 requests go: the region, endpoint and credentials that botocore would find, else the region of the agent's ARN."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.app import AgentCoreRLApp
from agentcore_rl_toolkit.errors import AgentCoreRLError, ConfigError, StorePermissionError
from agentcore_rl_toolkit.store import open_store
from scripted_runtime import ARN, ScriptedRuntime  # of us-west-2
from serving import wait_for

LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
CONFIG = """
[default]
region = eu-central-1
[profile work]
region = ap-south-1
aws_access_key_id = work
aws_secret_access_key = secret
[profile without]
output = json
"""
Configure = Callable[..., None]


@pytest.fixture
def configure(scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Configure:
    """Set the AWS configuration and variables; whatever else the environment has of them is gone."""
    scripted.answer = lambda _request, _n: (200, LISTING)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)

    def configure(config: str = "", **variables: str) -> None:
        (tmp_path / "config").write_text(config)
        found = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL_S3": scripted.url}
        found |= {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
        found |= {"AWS_EC2_METADATA_DISABLED": "true", **variables}
        for name, value in found.items():
            monkeypatch.setenv(name, value)

    return configure


def scope(scripted: Any, request: int = -1) -> tuple[str, str]:
    """Access key and region in the signature of a request, the last one by default."""
    credential = scripted.requests[request].headers["authorization"].partition("Credential=")[2]
    key, _, region, *_ = credential.split("/")
    return key, region


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("key", "eu-central-1")),
        ({"AWS_DEFAULT_REGION": "ca-central-1"}, ("key", "ca-central-1")),
        ({"AWS_REGION": "sa-east-1", "AWS_DEFAULT_REGION": "ca-central-1"}, ("key", "sa-east-1")),
        ({"AWS_PROFILE": "work"}, ("key", "ap-south-1")),
        ({"AWS_DEFAULT_PROFILE": "work"}, ("key", "ap-south-1")),
        ({"AWS_PROFILE": "work", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, ("work", "ap-south-1")),
        ({"AWS_PROFILE": "without"}, ("key", "us-west-2")),
        ({"AWS_CONFIG_FILE": "/nowhere"}, ("key", "us-west-2")),
    ],
    ids=["config", "default-region", "region", "profile", "default-profile", "keys-of-profile", "no-region", "nothing"],
)
def test_region_and_keys_follow_botocore_and_then_the_arn(
    scripted: Any, configure: Configure, variables: dict[str, str], expected: tuple[str, str]
) -> None:
    configure(CONFIG, **variables)
    with RolloutClient(ARN, "the-bucket", "e") as client:
        client.store.list("e/")
        assert scope(scripted) == expected
        client.s3_client.list_objects_v2(Bucket="the-bucket")
        assert scope(scripted) == expected
    open_store("s3://the-bucket/below").list("e/")
    other = "us-east-1" if expected[1] == "us-west-2" else expected[1]  # no agent, no ARN
    assert scope(scripted) == (expected[0], other)


def test_a_rollout_with_a_bucket_of_its_own_has_its_record_read_in_the_region_of_the_arn(
    scripted: Any, configure: Configure
) -> None:
    with ScriptedRuntime() as runtime:
        configure(AWS_ENDPOINT_URL_BEDROCK_AGENTCORE=runtime.url)
        with RolloutClient(ARN, "memory://", "e") as client:
            future = client.submit({"script": {"hang": True, "heartbeat": False}}, s3_bucket="the-bucket")
            wait_for(lambda: any("list-type" in request.path for request in scripted.requests))
    assert scope(scripted) == ("key", "us-west-2")
    assert runtime.sessions[future.session_id].payload["_rollout"]["s3_region"] == "us-west-2"


def test_an_agent_writes_to_the_region_of_its_rollout_without_a_boto3_session(
    scripted: Any, configure: Configure
) -> None:
    configure(CONFIG)
    code = (
        "import asyncio, boto3, types\n"
        "from agentcore_rl_toolkit import AgentCoreRLApp\n"
        "boto3.Session = None\n"
        "run = AgentCoreRLApp().rollout_entrypoint(lambda payload: {'rewards': 1.0})\n"
        "block = {'exp_id': 'e', 'input_id': 'i', 's3_bucket': 'the-bucket', 's3_region': 'eu-west-3'}\n"
        "asyncio.run(run({'_rollout': block}, types.SimpleNamespace(session_id='s' * 40)))\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    assert scope(scripted) == ("key", "eu-west-3")


def test_the_client_of_an_agents_code_is_in_the_region_of_the_configuration(
    scripted: Any, configure: Configure
) -> None:
    configure(CONFIG, AWS_REGION="sa-east-1")
    AgentCoreRLApp().s3_client.list_objects_v2(Bucket="the-bucket")
    assert scope(scripted) == ("key", "sa-east-1")


@pytest.mark.parametrize("where", ["services", "profile"])
def test_the_endpoint_of_the_profile_is_used(scripted: Any, configure: Configure, where: str) -> None:
    setting = f"endpoint_url = {scripted.url}\n"
    if where == "services":
        setting = f"services = mine\n[services mine]\ns3 =\n  {setting}"
    configure(f"[default]\nregion = eu-central-1\n{setting}", AWS_ENDPOINT_URL_S3="")
    open_store("the-bucket").list("e/")
    assert scope(scripted) == ("key", "eu-central-1")


def test_the_default_session_is_also_the_stores(scripted: Any, configure: Configure) -> None:
    configure(CONFIG)
    boto3.setup_default_session(profile_name="work")
    with RolloutClient(ARN, "the-bucket", "e") as client:
        client.store.list("e/")
        client.s3_client.list_objects_v2(Bucket="the-bucket")
    assert {scope(scripted), scope(scripted, -2)} == {("work", "ap-south-1")}


@pytest.mark.parametrize("where", ["variable", "profile"])
def test_an_endpoint_that_is_to_be_ignored_gets_no_request(scripted: Any, configure: Configure, where: str) -> None:
    # No such region exists, so that no request leaves the machine.
    if where == "variable":
        configure(AWS_IGNORE_CONFIGURED_ENDPOINT_URLS="true", AWS_REGION="xx-test-1")
    else:
        profile = f"endpoint_url = {scripted.url}\nignore_configured_endpoint_urls = true\n"
        configure(f"[default]\nregion = xx-test-1\n{profile}", AWS_ENDPOINT_URL_S3="")
    with pytest.raises(AgentCoreRLError):
        open_store("the-bucket").get("x", timeout_s=0)
    assert scripted.requests == []


def test_a_configuration_that_cannot_be_used_is_a_clear_error(
    scripted: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(CONFIG, AWS_PROFILE="absent")
    with pytest.raises(ConfigError, match="absent"):
        open_store("the-bucket").list("e/")
    with RolloutClient(ARN, "the-bucket", "e") as client, pytest.raises(ConfigError, match="absent"):
        client.submit({}).result(60)
    monkeypatch.delenv("AWS_PROFILE")
    configure(AWS_SECRET_ACCESS_KEY="", AWS_REGION="us-east-1")
    with pytest.raises(StorePermissionError, match="no credentials for the store"):
        open_store("the-bucket").list("e/")
    assert scripted.requests == []


@pytest.mark.parametrize("words", [("eval", "--data", "rows.jsonl"), ("doctor", "--aws")], ids=["eval", "doctor"])
def test_the_command_line_looks_for_the_bucket_in_the_region_of_the_arn(
    scripted: Any,
    configure: Configure,
    command_line: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    configure(AWS_ENDPOINT_URL=scripted.url)
    scripted.answer = lambda _request, _n: (404, b"<Error><Code>NoSuchBucket</Code></Error>")
    command_line(*words, "--agent", ARN, "--bucket", "the-bucket")
    scripted.requests[:] = [request for request in scripted.requests if "/the-bucket" in request.path]
    assert scope(scripted) == ("key", "us-west-2")
