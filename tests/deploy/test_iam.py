"""The policies, enforced by moto: what they grant works with unmodified boto3, and what they do not is refused."""

from __future__ import annotations

import contextlib
import inspect
import re
import uuid
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import requests
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

from agentcore_rl_toolkit.cli.doctor import aws, deployed
from agentcore_rl_toolkit.deploy import deployment, iam, quotas

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
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    requests.post(f"http://{host}:{port}/moto-api/reset-auth", data=b"inf", timeout=30)
    server.stop()


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


def test_a_trainer_reads_and_lists_the_records_of_its_prefix(as_user: Any) -> None:
    client = as_user(iam.trainer(PLACE))
    s3 = client("s3")
    assert s3.get_object(Bucket="iam-records", Key="exp/i/s.json")["Body"].read() == b"{}"
    assert s3.list_objects_v2(Bucket="iam-records", Prefix="exp/")["KeyCount"] == 1
    assert refused(s3.get_object, Bucket="iam-records", Key="other/i/s.json")
    assert refused(s3.get_object, Bucket="iam-others", Key="exp/i/s.json")
    assert refused(client("iam").list_users)
    assert refused(client("ecr").describe_repositories)


def test_who_deploys_may_make_every_call_that_a_deployment_makes() -> None:
    """moto knows resources of S3 only, so this is held against the source: each call's action is granted by name."""
    made = re.findall(r'_call\(\s*(?:"([a-z0-9-]+)"|control),\s*"(\w+)"', inspect.getsource(deployment))
    assert len(made) > 25
    # what S3 calls these, and what asks for no right at all
    names = {"s3:HeadBucket": "s3:ListBucket", "s3:HeadObject": "s3:GetObject", "s3:ListObjectsV2": "s3:ListBucket"}
    granted = {a for s in iam.deployer(PLACE, role=ROLE)["Statement"] for a in s["Action"]}
    for service, operation in made:
        service = (service or "bedrock-agentcore").removesuffix("-control")
        action = names.get(f"{service}:{operation}", f"{service}:{operation}")
        assert action in granted or action == "sts:GetCallerIdentity", f"{action} is not granted"


def test_the_doctor_may_make_every_call_that_it_makes() -> None:
    source = inspect.getsource(deployed) + inspect.getsource(aws) + inspect.getsource(quotas)
    asked = set(re.findall(r'"((?:iam|ecr|ec2|servicequotas):[A-Z]\w+)', source)) | {"servicequotas:ListServiceQuotas"}
    policies = [iam.doctor(PLACE, role=ROLE), iam.trainer(PLACE)]
    granted = {a for policy in policies for s in policy["Statement"] for a in s["Action"]}
    assert len(asked) >= 7
    assert asked <= granted


def test_only_agentcore_of_this_account_takes_the_execution_role() -> None:
    [statement] = iam.execution_trust(PLACE)["Statement"]
    assert statement["Principal"] == {"Service": "bedrock-agentcore.amazonaws.com"}
    assert statement["Condition"]["StringEquals"] == {"aws:SourceAccount": "123456789012"}
    assert statement["Condition"]["ArnLike"] == {"aws:SourceArn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:*"}


def test_no_policy_grants_everything_to_anything() -> None:
    policies = [iam.execution(PLACE), iam.trainer(PLACE), iam.doctor(PLACE, role=ROLE), iam.deployer(PLACE, role=ROLE)]
    # what AWS itself does not let a policy narrow down
    wide = {"ecr:GetAuthorizationToken", "bedrock-agentcore:ListAgentRuntimes", "cloudwatch:PutMetricData"}
    wide.add("servicequotas:ListServiceQuotas")
    for statement in (s for policy in policies for s in policy["Statement"]):
        assert not any("*" in action for action in statement["Action"]), statement
        if statement["Resource"] == "*":
            assert all(
                action in wide or action.startswith(("xray:", "ec2:Describe")) for action in statement["Action"]
            ), statement
