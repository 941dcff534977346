"""The policies that a deployed agent, a trainer and a deployer need: documents only, no calls.

Sources, as of November 2026. Developer guide of Bedrock AgentCore: "IAM Permissions for AgentCore Runtime" for the execution
role, "Using service-linked roles for Amazon Bedrock AgentCore" and "Troubleshooting direct code deployment" for the deployer.
User guide of ECR: "IAM permissions for pushing an image to an Amazon ECR private repository".
Rights that a trained agent does not need (Bedrock's models, workload identities) are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Policy = dict[str, Any]
LOGS = "log-group:/aws/bedrock-agentcore/runtimes/*"
# What the service itself holds a session to, and CloudWatch's namespace of its metrics.
SERVICE, NAMESPACE = "bedrock-agentcore.amazonaws.com", "bedrock-agentcore"
ARCHIVES = (
    "agentcore-rl-deployments"  # keys of the archives that `--code` uploads begin with it, whatever the records' prefix
)
# AgentCore makes these itself with the rights of who makes the first agent in an account: identities of its agents, and network
# interfaces of agents in a VPC.
LINKED_ROLES = {
    "runtime-identity.bedrock-agentcore.amazonaws.com": "AWSServiceRoleForBedrockAgentCoreRuntimeIdentity",
    "network.bedrock-agentcore.amazonaws.com": "AWSServiceRoleForBedrockAgentCoreNetwork",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an agent is deployed, as far as policies name it.

    Attributes:
        partition: `aws`, `aws-cn` or `aws-us-gov`.
        repository: name of the ECR repository; None for an agent deployed as an archive.
        bucket: bucket of the records; None when the agent is given none.
        prefix: keys of the records begin with it; "" is the whole bucket.
        agent_id: id of the agent runtime; None before it exists, then policies name the agents that begin with ``name``.
        jobs: whether the agent serves SageMaker's multi-turn RL jobs.
    """

    account: str
    region: str
    name: str
    partition: str = "aws"
    repository: str | None = None
    bucket: str | None = None
    prefix: str = ""
    agent_id: str | None = None
    jobs: bool = False

    def arn(self, service: str, rest: str, *, region: str | None = None) -> str:
        return f"arn:{self.partition}:{service}:{self.region if region is None else region}:{self.account}:{rest}"

    @property
    def runtimes(self) -> list[str]:
        """The agent runtime and its endpoints."""
        name = self.agent_id or f"{self.name}-*"
        return [self.arn("bedrock-agentcore", f"runtime/{name}"), self.arn("bedrock-agentcore", f"runtime/{name}/*")]

    @property
    def objects(self) -> str:
        return f"arn:{self.partition}:s3:::{self.bucket}/{self.prefix}*"


def execution_trust(place: Place) -> Policy:
    """Trust of the execution role: AgentCore may take it, for agents of this account and region."""
    return _document(
        {
            "Sid": "AgentCoreRunsTheAgent",
            "Effect": "Allow",
            "Principal": {"Service": SERVICE},
            "Action": "sts:AssumeRole",
            "Condition": {
                "StringEquals": {"aws:SourceAccount": place.account},
                "ArnLike": {"aws:SourceArn": place.arn("bedrock-agentcore", "*")},
            },
        }
    )


def execution(place: Place) -> Policy:
    """Rights of the agent's sessions: pull the image, log, trace, write records."""
    statements = [
        _allow("CreateLogs", ["logs:CreateLogGroup", "logs:DescribeLogStreams"], place.arn("logs", LOGS)),
        _allow("FindLogs", ["logs:DescribeLogGroups"], place.arn("logs", "log-group:*")),
        _allow("WriteLogs", ["logs:CreateLogStream", "logs:PutLogEvents"], place.arn("logs", f"{LOGS}:log-stream:*")),
        _allow(
            "Traces",
            ["xray:GetSamplingRules", "xray:GetSamplingTargets", "xray:PutTelemetryRecords", "xray:PutTraceSegments"],
            "*",
        ),
        {
            **_allow("Metrics", ["cloudwatch:PutMetricData"], "*"),
            "Condition": {"StringEquals": {"cloudwatch:namespace": NAMESPACE}},
        },
    ]
    if place.repository is not None:
        image = place.arn("ecr", f"repository/{place.repository}")
        statements += [
            _allow("PullImage", ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"], image),
            _allow("LogInToRegistry", ["ecr:GetAuthorizationToken"], "*"),
        ]
    if place.bucket is not None:
        statements.append(_allow("Records", ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"], place.objects))
    if place.jobs:
        calls = ("Sample", "SampleWithResponseStream", "CompleteRollout", "UpdateReward")
        statements.append(_allow("Jobs", [f"sagemaker:{call}" for call in calls], place.arn("sagemaker", "job/*")))
    return _document(*statements)


def trainer(place: Place) -> Policy:
    """Rights of a trainer's client: start and stop sessions, read records."""
    statements = [
        _allow(
            "Rollouts", ["bedrock-agentcore:InvokeAgentRuntime", "bedrock-agentcore:StopRuntimeSession"], place.runtimes
        ),
        _allow("Quotas", ["servicequotas:ListServiceQuotas"], "*"),
    ]
    if place.bucket is not None:
        listing = _allow("ListRecords", ["s3:ListBucket"], f"arn:{place.partition}:s3:::{place.bucket}")
        if place.prefix:
            listing["Condition"] = {"StringLike": {"s3:prefix": f"{place.prefix}*"}}
        statements += [
            _allow("ReadRecords", ["s3:GetObject"], place.objects),
            listing,
            # heartbeats of sessions that left no record, `cleanup` of an experiment, and the doctor's own object
            _allow("KeepAndRemoveRecords", ["s3:DeleteObject", "s3:PutObject"], place.objects),
        ]
    return _document(*statements)


def doctor(place: Place) -> Policy:
    """Rights of `agentcore-rl doctor --aws` beyond a trainer's."""
    return _document(_allow("Agent", ["bedrock-agentcore:GetAgentRuntime"], place.runtimes))


def deployer(place: Place, *, role: str) -> Policy:
    """Rights of the user of `agentcore-rl deploy`. ``role``: ARN of the execution role."""
    runtime = "bedrock-agentcore:"
    statements = [
        _allow(
            "Runtimes",
            [
                *(f"{runtime}{verb}AgentRuntime" for verb in ("Create", "Delete", "Get", "Update")),
                *(f"{runtime}{verb}AgentRuntimeEndpoint" for verb in ("Create", "Delete", "Get", "Update")),
                f"{runtime}ListAgentRuntimeEndpoints",
                f"{runtime}ListTagsForResource",
                f"{runtime}TagResource",
            ],
            place.arn("bedrock-agentcore", "runtime/*"),
        ),
        _allow("FindRuntimes", [f"{runtime}ListAgentRuntimes"], "*"),
        _allow(
            "Identity",
            [f"{runtime}CreateWorkloadIdentity", f"{runtime}DeleteWorkloadIdentity"],
            place.arn("bedrock-agentcore", "workload-identity-directory/*"),
        ),
        _allow("SmokeTest", [f"{runtime}InvokeAgentRuntime", f"{runtime}StopRuntimeSession"], place.runtimes),
        _allow(
            "ExecutionRole",
            [
                *("iam:CreateRole", "iam:DeleteRole", "iam:DeleteRolePolicy", "iam:GetRole", "iam:GetRolePolicy"),
                *("iam:PutRolePolicy", "iam:TagRole", "iam:UpdateAssumeRolePolicy"),
            ],
            role,
        ),
        {
            **_allow("GiveRoleToAgentCore", ["iam:PassRole"], role),
            "Condition": {"StringEquals": {"iam:PassedToService": SERVICE}},
        },
        {
            **_allow(
                "AgentCoresOwnRoles",
                ["iam:CreateServiceLinkedRole"],
                [
                    place.arn("iam", f"role/aws-service-role/{service}/{name}", region="")
                    for service, name in LINKED_ROLES.items()
                ],
            ),
            "Condition": {"StringEquals": {"iam:AWSServiceName": list(LINKED_ROLES)}},
        },
    ]
    if place.repository is not None:
        actions = [
            *(
                "ecr:BatchCheckLayerAvailability",
                "ecr:BatchGetImage",
                "ecr:CompleteLayerUpload",
                "ecr:CreateRepository",
            ),
            *("ecr:DeleteRepository", "ecr:DescribeImages", "ecr:DescribeRepositories", "ecr:GetDownloadUrlForLayer"),
            *(
                "ecr:InitiateLayerUpload",
                "ecr:ListTagsForResource",
                "ecr:PutImage",
                "ecr:TagResource",
                "ecr:UploadLayerPart",
            ),
        ]
        statements += [
            _allow("Repository", actions, place.arn("ecr", f"repository/{place.repository}")),
            _allow("LogInToRegistry", ["ecr:GetAuthorizationToken"], "*"),
        ]
    if place.bucket is not None:
        # AgentCore reads an archive with the rights of who makes the agent.
        archives = f"arn:{place.partition}:s3:::{place.bucket}/{ARCHIVES}/{place.name}/*"
        objects = ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
        statements += [_allow("Records", objects, place.objects), _allow("Archives", objects, archives)]
        actions = ["s3:CreateBucket", "s3:ListBucket"]
        statements.append(_allow("Bucket", actions, f"arn:{place.partition}:s3:::{place.bucket}"))
    return _document(*statements)


def text(policy: Policy) -> str:
    """The document as IAM takes it, in a fixed order."""
    return json.dumps(policy, indent=2)


def _document(*statements: Policy) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(sid: str, actions: list[str], resources: str | list[str]) -> Policy:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resources}
