"""The policies, enforced by moto: what they grant works with unmodified boto3, and what they do not is refused."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fnmatch
import inspect
import uuid
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import boto3
import botocore.session
import pytest
import requests
from botocore import xform_name
from botocore.exceptions import ClientError

from agentcore_rl_toolkit.cli.doctor import aws
from agentcore_rl_toolkit.deploy import agent, deployment, iam, resources
from serving import moto_server

PLACE = iam.Place(
    account="123456789012",
    region="us-west-2",
    name="shop",
    repository="agentcore-rl/shop",
    bucket="iam-records",
    prefix="exp/",
)
ROLE = PLACE.arn("iam", "role/agentcore-rl-shop", region="")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with moto_server() as found:
        yield found
        requests.post(f"{found}/moto-api/reset-auth", data=b"inf", timeout=30)


def clients(url: str, **keys: str) -> Any:
    keys = keys or {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
    return lambda service: boto3.client(service, endpoint_url=url, region_name="us-west-2", **keys)


@pytest.fixture
def as_user(url: str) -> Iterator[Any]:
    """Gives clients of a new user who has one policy and nothing else; every call is checked from then on."""
    requests.post(f"{url}/moto-api/reset-auth", data=b"1000000", timeout=30)
    root = clients(url)
    s3 = root("s3")
    for bucket in ("iam-records", "iam-others"):
        with contextlib.suppress(s3.exceptions.BucketAlreadyOwnedByYou):  # moto's state is the process's
            s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
        s3.put_object(Bucket=bucket, Key="exp/i/s.json", Body=b"{}")
    s3.put_object(Bucket="iam-records", Key="other/i/s.json", Body=b"{}")

    def make(policy: iam.Policy) -> Any:
        user, name = root("iam"), f"probe-{uuid.uuid4().hex}"
        user.create_user(UserName=name)
        user.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=iam.text(policy))
        key = user.create_access_key(UserName=name)["AccessKey"]
        requests.post(f"{url}/moto-api/reset-auth", data=b"0", timeout=30)
        return clients(url, aws_access_key_id=key["AccessKeyId"], aws_secret_access_key=key["SecretAccessKey"])

    yield make
    requests.post(f"{url}/moto-api/reset-auth", data=b"1000000", timeout=30)


def refused(call: Any, **parameters: Any) -> bool:
    with pytest.raises(ClientError) as caught:
        call(**parameters)
    return caught.value.response["Error"]["Code"] in ("AccessDenied", "AccessDeniedException", "403")


def test_a_session_writes_records_of_its_prefix_and_nothing_else(as_user: Any) -> None:
    client = as_user(iam.execution(PLACE))
    s3 = client("s3")
    s3.put_object(Bucket="iam-records", Key="exp/i/new.json", Body=b"{}")
    assert s3.get_object(Bucket="iam-records", Key="exp/i/new.json")["Body"].read() == b"{}"
    s3.delete_object(Bucket="iam-records", Key="exp/i/new.json")
    assert refused(s3.put_object, Bucket="iam-records", Key="other/i/new.json", Body=b"{}")
    assert refused(s3.get_object, Bucket="iam-others", Key="exp/i/s.json")
    assert refused(s3.list_objects_v2, Bucket="iam-records")
    assert refused(s3.delete_bucket, Bucket="iam-others")
    assert refused(client("iam").list_users)
    client("ecr").get_authorization_token()
    assert refused(client("ecr").delete_repository, repositoryName="agentcore-rl/shop", force=True)


def test_an_agent_calls_its_hosted_model_and_no_imported_one() -> None:
    """In production, in the rollout that tests a deployment, and in an evaluation of the agent's own model."""
    statements = {statement["Sid"]: statement for statement in iam.execution(PLACE)["Statement"]}
    called = statements["HostedModel"]
    assert called["Action"] == ["bedrock:InvokeModel", "bedrock:InvokeModelWithResponseStream"]
    assert statements["SignBearerTokens"]["Action"] == ["bedrock:CallWithBearerToken"]  # gpt-oss at OpenAI's API
    models = {
        "arn:aws:bedrock:us-east-2::foundation-model/anthropic.claude-sonnet-4-20250514-v1:0": True,
        "arn:aws:bedrock:us-west-2:123456789012:inference-profile/us.anthropic.claude-sonnet-4-20250514-v1:0": True,
        "arn:aws:bedrock:us-west-2:123456789012:application-inference-profile/a1b2c3": True,
        "arn:aws:bedrock:us-west-2:999999999999:inference-profile/us.anthropic.claude-sonnet-4-20250514-v1:0": False,
        "arn:aws:bedrock:us-west-2:123456789012:imported-model/a1b2c3": False,
    }
    for model, allowed in models.items():
        assert any(fnmatch.fnmatchcase(model, pattern) for pattern in called["Resource"]) == allowed, model


def test_an_agent_of_jobs_samples_and_reports_and_others_do_not() -> None:
    assert "sagemaker:" not in iam.text(iam.execution(PLACE))
    last = iam.execution(dataclasses.replace(PLACE, jobs=True))["Statement"][-1]
    assert last["Resource"] == "arn:aws:sagemaker:us-west-2:123456789012:job/*"
    assert {"sagemaker:Sample", "sagemaker:UpdateReward"} < set(last["Action"])


def test_a_trainer_reads_and_lists_the_records_of_its_prefix(as_user: Any) -> None:
    client = as_user(iam.trainer(PLACE))
    s3 = client("s3")
    assert s3.get_object(Bucket="iam-records", Key="exp/i/s.json")["Body"].read() == b"{}"
    assert s3.list_objects_v2(Bucket="iam-records", Prefix="exp/")["KeyCount"] == 1
    assert refused(s3.get_object, Bucket="iam-records", Key="other/i/s.json")
    assert refused(s3.get_object, Bucket="iam-others", Key="exp/i/s.json")
    assert refused(client("iam").list_users)
    assert refused(client("ecr").describe_repositories)


# What S3 calls the right of an operation; no right at all is asked of who wants to know who he is.
RIGHTS = {"s3:HeadBucket": "s3:ListBucket", "s3:HeadObject": "s3:GetObject", "s3:ListObjectsV2": "s3:ListBucket"}
RIGHTS["s3:ListMultipartUploads"] = "s3:ListBucketMultipartUploads"
ASKS_FOR_NONE = "sts:GetCallerIdentity"


def actions_of(*policies: iam.Policy) -> set[str]:
    return {action for policy in policies for statement in policy["Statement"] for action in statement["Action"]}


BOUND = {"_s3": "s3", "_ecr": "ecr", "_iam": "iam", "_control": agent.CONTROL}


def calls_of(module: ModuleType) -> set[str]:
    """Actions behind the calls in a module's source: `self._call("sts", "GetX", ...)`, `self._iam("GetRole", ...)` and
    `client("iam").get_role(...)`.
    """
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        made = node.func.value
        if node.func.attr == "_call":
            service, operation = map(ast.literal_eval, node.args[:2])
        elif node.func.attr in BOUND:
            service, operation = BOUND[node.func.attr], ast.literal_eval(node.args[0])
        elif (
            isinstance(made, ast.Call)
            and ast.unparse(made.func).endswith("client")
            and node.func.attr != "get_paginator"
        ):
            service = ast.literal_eval(made.args[0])
            names = botocore.session.get_session().get_service_model(service).operation_names
            [operation] = [name for name in names if xform_name(name) == node.func.attr]
        else:
            continue
        action = f"{service.removesuffix('-control').replace('-quotas', 'quotas')}:{operation}"
        found.add(RIGHTS.get(action, action))
    return found - {ASKS_FOR_NONE}


def test_who_deploys_may_make_every_call_that_a_deployment_makes() -> None:
    """moto knows resources of S3 only, so this is held against the source: each call's action is granted by name."""
    made = calls_of(deployment) | calls_of(agent) | calls_of(resources)
    assert len(made) > 25
    # the rollout that proves it, and what the control plane does in the caller's name
    more = {"bedrock-agentcore:InvokeAgentRuntime", "bedrock-agentcore:StopRuntimeSession"}
    more |= {"iam:PassRole", "iam:CreateServiceLinkedRole", "bedrock-agentcore:CreateWorkloadIdentity"}
    granted = actions_of(iam.deployer(PLACE, role=ROLE))
    assert made | more <= granted, (made | more) - granted


def test_the_doctor_may_make_every_call_that_it_makes() -> None:
    made = calls_of(aws)
    assert made
    # of the session that is asked, and of the records' store
    more = {"bedrock-agentcore:InvokeAgentRuntime", "bedrock-agentcore:StopRuntimeSession"}
    more |= {"servicequotas:ListServiceQuotas", "s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket"}
    granted = actions_of(iam.doctor(PLACE), iam.trainer(PLACE))
    assert made | more <= granted, (made | more) - granted


def test_who_deploys_uploads_archives_whatever_the_prefix_of_records(as_user: Any) -> None:
    s3 = as_user(iam.deployer(PLACE, role=ROLE))("s3")
    key = "agentcore-rl-deployments/shop/0123456789ab.zip"
    s3.put_object(Bucket="iam-records", Key=key, Body=b"PK")
    assert s3.get_object(Bucket="iam-records", Key=key)["Body"].read() == b"PK"
    assert s3.list_objects_v2(Bucket="iam-records", Prefix="agentcore-rl-deployments/shop/")["KeyCount"] == 1
    s3.delete_object(Bucket="iam-records", Key=key)
    assert refused(s3.put_object, Bucket="iam-records", Key=key.replace("shop", "others"), Body=b"PK")
    assert refused(s3.put_object, Bucket="iam-records", Key="other/i/s.json", Body=b"{}")
