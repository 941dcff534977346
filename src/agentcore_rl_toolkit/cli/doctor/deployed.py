"""Checks of what a deployed agent is made of: its role, its image, its network. From what AWS describes; nothing is run."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from ...deploy.artifact import AGENTCORE_PLATFORM, IMAGE_BYTES
from ...deploy.iam import SERVICE
from .finding import Finding, fail, note, ok

LOCAL_ROLE, LOCAL_IMAGE = "role/local", "local://"  # of agents that a local runtime serves from a file
MANIFESTS = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
]
MAX_CONFIG_BYTES, DEADLINE_S = 2**22, 20.0
_ECR = re.compile(
    r"(?P<account>\d+)\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/(?P<name>[^:@]+)(?:@(?P<digest>.+)|:(?P<tag>.+))"
)

Client = Callable[[str], Any]


def role(client: Client, arn: str) -> Finding:
    """Whether the execution role is there, and AgentCore may take it."""
    name, made = (
        arn.rpartition("/")[2],
        "`agentcore-rl deploy iam` prints the one it needs; `agentcore-rl deploy` makes it",
    )
    if arn.endswith(LOCAL_ROLE):
        return ok("role", "none is needed by a local runtime")
    reply = _asked(lambda: client("iam").get_role(RoleName=name), "role", "iam:GetRole")
    if isinstance(reply, Finding):
        return fail("role", f"{arn} does not exist", made) if reply.text.startswith("NoSuchEntity") else reply
    trust = reply["Role"]["AssumeRolePolicyDocument"]
    trust = json.loads(trust) if isinstance(trust, str) else trust
    taken = any(_lets_in(statement) for statement in _list(trust.get("Statement")))
    if not taken:
        return fail("role", f"AgentCore ({SERVICE}) may not take {name}", f"change its trust policy: {made}")
    return ok("role", f"{name}, which AgentCore may take")


def _lets_in(statement: Mapping[str, Any]) -> bool:
    principal = statement.get("Principal")
    services = _list(principal.get("Service")) if isinstance(principal, Mapping) else []
    actions = _list(statement.get("Action"))
    return (
        statement.get("Effect") == "Allow"
        and SERVICE in services
        and bool({"sts:AssumeRole", "sts:*", "*"} & set(actions))
    )


def image(client: Client, artifact: Mapping[str, Any]) -> Finding | None:
    """Whether an image is there, for AgentCore's architecture. None for an archive, and for an image outside of ECR."""
    uri = str(artifact.get("containerConfiguration", {}).get("containerUri", LOCAL_IMAGE))
    found = _ECR.fullmatch(uri)
    if found is None:
        return (
            None
            if uri.startswith(LOCAL_IMAGE)
            else note("image", f"{uri} is not in ECR", "AgentCore pulls from ECR only")
        )
    wanted = {"imageDigest": found["digest"]} if found["digest"] else {"imageTag": found["tag"]}
    where = {"registryId": found["account"], "repositoryName": found["name"]}
    reply = _asked(
        lambda: client("ecr").batch_get_image(**where, imageIds=[wanted], acceptedMediaTypes=MANIFESTS),
        "image",
        "ecr:BatchGetImage",
    )
    if isinstance(reply, Finding):
        absent = reply.text.startswith("RepositoryNotFound")
        return fail("image", f"{uri} does not exist", "push it, or deploy again") if absent else reply
    if not reply.get("images"):
        return fail("image", f"{uri} does not exist", "push it, or deploy again")
    manifest = json.loads(reply["images"][0]["imageManifest"])
    platforms = _platforms(client, where, manifest)
    if isinstance(platforms, Finding):
        return platforms
    if AGENTCORE_PLATFORM not in platforms:
        return fail(
            "image",
            f"{uri} is for {', '.join(platforms) or 'no platform'}, and AgentCore runs {AGENTCORE_PLATFORM}",
            f"`agentcore-rl deploy` builds for it; by hand: docker build --platform {AGENTCORE_PLATFORM}",
        )
    size = sum(int(layer.get("size", 0)) for layer in manifest.get("layers", []))
    if size > IMAGE_BYTES:
        return fail(
            "image",
            f"{uri} has {size / 2**30:.1f} GB, and AgentCore takes {IMAGE_BYTES / 2**30:.0f}",
            "leave packages out that the agent does not need, or take a smaller base image, and deploy it again",
        )
    return ok("image", f"{uri}, {AGENTCORE_PLATFORM}")


def _platforms(client: Client, where: Mapping[str, str], manifest: Mapping[str, Any]) -> list[str] | Finding:
    """What an image is for: an index says so itself, of a single image its configuration does."""
    if "manifests" in manifest:
        found = [entry.get("platform", {}) for entry in manifest["manifests"]]
        return [f"{p.get('os')}/{p.get('architecture')}" for p in found if p.get("os") != "unknown"]
    digest = manifest["config"]["digest"]
    url = _asked(
        lambda: client("ecr").get_download_url_for_layer(**where, layerDigest=digest),
        "image",
        "ecr:GetDownloadUrlForLayer",
    )
    if isinstance(url, Finding):
        return url
    with urllib.request.urlopen(url["downloadUrl"], timeout=DEADLINE_S) as reply:  # AWS names it
        config = json.loads(reply.read(MAX_CONFIG_BYTES))
    return [f"{config.get('os')}/{config.get('architecture')}"]


def network(client: Client, configuration: Mapping[str, Any], region: str | None) -> list[Finding]:
    """Whether sessions in a VPC have a way to S3, and out of it. Nothing for the public network."""
    if configuration.get("networkMode") != "VPC":
        return []
    subnets = list(configuration["networkModeConfig"]["subnets"])
    found = _asked(lambda: client("ec2").describe_subnets(SubnetIds=subnets), "network", "ec2:DescribeSubnets")
    if isinstance(found, Finding):
        gone = found.text.startswith("InvalidSubnet")
        return [fail("network", found.text, "deploy with subnets that exist (--subnet)") if gone else found]
    vpcs = sorted({s["VpcId"] for s in found["Subnets"]})
    of_vpc = [{"Name": "vpc-id", "Values": vpcs}]
    tables = _asked(lambda: client("ec2").describe_route_tables(Filters=of_vpc), "network", "ec2:DescribeRouteTables")
    if isinstance(tables, Finding):
        return [tables]
    ends = _asked(lambda: client("ec2").describe_vpc_endpoints(Filters=of_vpc), "network", "ec2:DescribeVpcEndpoints")
    if isinstance(ends, Finding):
        return [ends]
    s3 = [e for e in ends["VpcEndpoints"] if e.get("ServiceName") == f"com.amazonaws.{region}.s3"]
    return [_way_out(subnet, tables["RouteTables"], s3) for subnet in found["Subnets"]]


def _way_out(subnet: Mapping[str, Any], tables: list[Mapping[str, Any]], s3: list[Mapping[str, Any]]) -> Finding:
    name = f"{subnet['SubnetId']} in {subnet['VpcId']}"
    table = _table_of(subnet, tables)
    default: Mapping[str, Any] = next(
        (r for r in (table or {}).get("Routes", []) if r.get("DestinationCidrBlock") == "0.0.0.0/0"), {}
    )
    # A session has no public address: an internet gateway takes none of its packets out.
    target = str(default.get("GatewayId", ""))
    out = bool(default) and default.get("State") != "blackhole" and not target.startswith("igw-")
    by_endpoint = any(
        e.get("VpcEndpointType") == "Interface" or (table or {}).get("RouteTableId") in e.get("RouteTableIds", [])
        for e in s3
        if e.get("VpcId") == subnet["VpcId"]
    )
    if out:
        return ok("network", f"{name} has a way out" + (" and an endpoint for S3" if by_endpoint else ""))
    if by_endpoint:
        advice = "endpoints for ecr.api, ecr.dkr and logs let sessions start and write logs; or add a NAT gateway"
        return note("network", f"{name} reaches S3 and nothing else outside", advice)
    why = "leads to an internet gateway, and sessions have no public address" if target else "is missing"
    return fail(
        "network",
        f"{name} has no way to S3: its default route {why}",
        "add a gateway endpoint for S3 to its route table, or a default route to a NAT gateway",
    )


def _table_of(subnet: Mapping[str, Any], tables: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The route table of a subnet: its own, else its VPC's main one."""
    main = None
    for table in tables:
        for link in table.get("Associations", []):
            if link.get("SubnetId") == subnet["SubnetId"]:
                return table
            if link.get("Main") and table.get("VpcId") == subnet["VpcId"]:
                main = table
    return main


def _asked(call: Callable[[], Any], name: str, right: str) -> Any:
    """The reply of a call, or what to say when there is none."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as e:
        code = e.response["Error"].get("Code", "")
        return note(
            name, f"{code}: {e.response['Error'].get('Message', '')}"[:300], f"allow {right} to have this checked"
        )
    except BotoCoreError as e:
        return note(name, str(e)[:300], "check the network")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
