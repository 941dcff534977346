"""The policies that a deployed agent, a trainer and a deployer need: documents only, no calls.

Sources, as of November 2026. Developer guide of Bedrock AgentCore: "IAM Permissions for AgentCore Runtime" for the execution
role, "Using service-linked roles for Amazon Bedrock AgentCore" and "Troubleshooting direct code deployment" for the deployer.
User guide of ECR: "IAM permissions for pushing an image to an Amazon ECR private repository". Workload identities are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Policy = dict[str, Any]
LOGS = "log-group:/aws/bedrock-agentcore/runtimes/*"
# What the service itself holds a session to, and CloudWatch's namespace of its metrics.
SERVICE, NAMESPACE = "bedrock-agentcore.amazonaws.com", "bedrock-agentcore"
# Keys of the archives that `--code` uploads begin with it, whatever the records' prefix.
ARCHIVES = "agentcore-rl-deployments"
# AgentCore makes these itself with the rights of who makes the first agent in an account: identities of its agents, and network
# interfaces of agents in a VPC.
LINKED_ROLES = {
    "runtime-identity.bedrock-agentcore.amazonaws.com": "AWSServiceRoleForBedrockAgentCoreRuntimeIdentity",
    "network.bedrock-agentcore.amazonaws.com": "AWSServiceRoleForBedrockAgentCoreNetwork",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The names that policies need of an agent's deployment.

    Attributes:
        partition: `aws`, `aws-cn` or `aws-us-gov`.
        repository: name of the ECR repository; None for an agent deployed as an archive.
        bucket: bucket of the records; None when the agent is given none.
        prefix: keys of the records begin with it; "" is the whole bucket.
        jobs: whether the agent serves SageMaker's multi-turn RL jobs.
    """

    account: str
    region: str
    name: str
    partition: str = "aws"
    repository: str | None = None
    bucket: str | None = None
    prefix: str = ""
    jobs: bool = False

    def arn(self, service: str, rest: str, *, region: str | None = None) -> str:
        return f"arn:{self.partition}:{service}:{self.region if region is None else region}:{self.account}:{rest}"

    @property
    def runtimes(self) -> list[str]:
        """The agent runtime and its endpoints."""
        return [self.arn("bedrock-agentcore", f"runtime/{self.name}-*{rest}") for rest in ("", "/*")]

    @property
    def objects(self) -> str:
        return f"arn:{self.partition}:s3:::{self.bucket}/{self.prefix}*"


def execution_trust(place: Place) -> Policy:
    """Return the trust of the execution role: AgentCore may assume it, for agents of this account and region."""
    condition = {
        "StringEquals": {"aws:SourceAccount": place.account},
        "ArnLike": {"aws:SourceArn": place.arn("bedrock-agentcore", "*")},
    }
    return _document(_trust("AgentCoreRunsTheAgent", SERVICE, condition))


def execution(place: Place) -> Policy:
    """Return the rights of the agent's sessions: pull the image, log, trace, write records, call hosted models."""
    streams = place.arn("logs", f"{LOGS}:log-stream:*")
    tracing = "PutTraceSegments PutTelemetryRecords GetSamplingRules GetSamplingTargets"
    metrics = {"StringEquals": {"cloudwatch:namespace": NAMESPACE}}
    profiles = [place.arn("bedrock", f"{kind}inference-profile/*", region="*") for kind in ("", "application-")]
    models = [f"arn:{place.partition}:bedrock:*::foundation-model/*", *profiles]
    statements = [
        _allow("HostedModel", "bedrock", "InvokeModel InvokeModelWithResponseStream", models),
        _allow("SignBearerTokens", "bedrock", "CallWithBearerToken", "*"),
        _allow("CreateLogs", "logs", "CreateLogGroup DescribeLogStreams", place.arn("logs", LOGS)),
        _allow("FindLogs", "logs", "DescribeLogGroups", place.arn("logs", "log-group:*")),
        _allow("WriteLogs", "logs", "CreateLogStream PutLogEvents", streams),
        _allow("Traces", "xray", tracing, "*"),
        _allow("Metrics", "cloudwatch", "PutMetricData", "*", metrics),
    ]
    if place.repository is not None:
        image = place.arn("ecr", f"repository/{place.repository}")
        statements.append(_allow("PullImage", "ecr", "BatchGetImage GetDownloadUrlForLayer", image))
        statements.append(_allow("LogInToRegistry", "ecr", "GetAuthorizationToken", "*"))
    if place.bucket is not None:
        statements.append(_allow("Records", "s3", "DeleteObject GetObject PutObject", place.objects))
    if place.jobs:
        calls = "Sample SampleWithResponseStream CompleteRollout UpdateReward"
        statements.append(_allow("Jobs", "sagemaker", calls, place.arn("sagemaker", "job/*")))
    return _document(*statements)


def trainer(place: Place) -> Policy:
    """Return the rights of a trainer's client: start and stop sessions, read records."""
    statements = [
        _allow("Rollouts", "bedrock-agentcore", "InvokeAgentRuntime StopRuntimeSession", place.runtimes),
        _allow("Quotas", "servicequotas", "ListServiceQuotas", "*"),
    ]
    if place.bucket is not None:
        below = {"StringLike": {"s3:prefix": f"{place.prefix}*"}} if place.prefix else None
        statements += [
            _allow("ReadRecords", "s3", "GetObject", place.objects),
            _allow("ListRecords", "s3", "ListBucket", f"arn:{place.partition}:s3:::{place.bucket}", below),
            # heartbeats of sessions that left no record, `cleanup` of an experiment, and the doctor's own object
            _allow("KeepAndRemoveRecords", "s3", "DeleteObject PutObject", place.objects),
        ]
    return _document(*statements)


def doctor(place: Place) -> Policy:
    """Return the rights of `agentcore-rl doctor --aws` beyond a trainer's."""
    return _document(_allow("Agent", "bedrock-agentcore", "GetAgentRuntime", place.runtimes))


def deployer(place: Place, *, role: str) -> Policy:
    """Return the rights of the user of `agentcore-rl deploy`. ``role``: ARN of the execution role."""
    control = "bedrock-agentcore"
    runtimes = """CreateAgentRuntime DeleteAgentRuntime GetAgentRuntime UpdateAgentRuntime
        CreateAgentRuntimeEndpoint DeleteAgentRuntimeEndpoint GetAgentRuntimeEndpoint UpdateAgentRuntimeEndpoint
        ListAgentRuntimeEndpoints ListTagsForResource TagResource"""
    identities = place.arn(control, "workload-identity-directory/*")
    roles = """CreateRole DeleteRole DeleteRolePolicy GetRole GetRolePolicy ListRolePolicies PutRolePolicy TagRole
        UpdateAssumeRolePolicy"""
    linked = [place.arn("iam", f"role/aws-service-role/{on}/{name}", region="") for on, name in LINKED_ROLES.items()]
    to_agentcore = {"StringEquals": {"iam:PassedToService": SERVICE}}
    for_agentcore = {"StringEquals": {"iam:AWSServiceName": list(LINKED_ROLES)}}
    statements = [
        _allow("Runtimes", control, runtimes, place.arn(control, "runtime/*")),
        _allow("FindRuntimes", control, "ListAgentRuntimes", "*"),
        _allow("Identity", control, "CreateWorkloadIdentity DeleteWorkloadIdentity", identities),
        _allow("SmokeTest", control, "InvokeAgentRuntime StopRuntimeSession", place.runtimes),
        _allow("ExecutionRole", "iam", roles, role),
        _allow("GiveRoleToAgentCore", "iam", "PassRole", role, to_agentcore),
        _allow("AgentCoresOwnRoles", "iam", "CreateServiceLinkedRole", linked, for_agentcore),
    ]
    if place.repository is not None:
        images = """BatchCheckLayerAvailability BatchGetImage CompleteLayerUpload CreateRepository DeleteRepository
            DescribeImages DescribeRepositories GetDownloadUrlForLayer InitiateLayerUpload ListTagsForResource PutImage
            TagResource UploadLayerPart"""
        statements.append(_allow("Repository", "ecr", images, place.arn("ecr", f"repository/{place.repository}")))
        statements.append(_allow("LogInToRegistry", "ecr", "GetAuthorizationToken", "*"))
    if place.bucket is not None:
        # AgentCore reads an archive with the rights of the user who makes the agent.
        bucket = f"arn:{place.partition}:s3:::{place.bucket}"
        objects = "AbortMultipartUpload DeleteObject GetObject PutObject"
        statements += [
            _allow("Records", "s3", objects, place.objects),
            _allow("Archives", "s3", objects, f"{bucket}/{ARCHIVES}/{place.name}/*"),
            _allow("Bucket", "s3", "CreateBucket ListBucket ListBucketMultipartUploads", bucket),
        ]
    return _document(*statements)


def hosting(partition: str, account: str, bucket: str, prefix: str) -> tuple[Policy, Policy]:
    """Return trust and rights of a model's endpoint: SageMaker reads the weights, pulls the image, and logs."""
    image = "BatchCheckLayerAvailability BatchGetImage GetAuthorizationToken GetDownloadUrlForLayer"
    logs = f"arn:{partition}:logs:*:*:log-group:/aws/sagemaker/Endpoints/*"
    condition = {"StringEquals": {"aws:SourceAccount": account}}
    return _document(_trust("SageMakerHostsTheModel", "sagemaker.amazonaws.com", condition)), _document(
        *_weights(partition, bucket, prefix),
        _allow("PullImage", "ecr", image, "*"),
        _allow("Logs", "logs", "CreateLogGroup CreateLogStream DescribeLogStreams PutLogEvents", logs),
        _allow("Metrics", "cloudwatch", "PutMetricData", "*"),
    )


def imports(partition: str, account: str, bucket: str, prefix: str, region: str) -> tuple[Policy, Policy]:
    """Return trust and rights of an import's role: Bedrock reads the weights, in import jobs of this account and region.

    Source: User guide of Amazon Bedrock, "Create a service role for model import".
    """
    condition = {
        "StringEquals": {"aws:SourceAccount": account},
        "ArnEquals": {"aws:SourceArn": f"arn:{partition}:bedrock:{region}:{account}:model-import-job/*"},
    }
    trust = _document(_trust("BedrockImportsTheModel", "bedrock.amazonaws.com", condition))
    return trust, _document(*_weights(partition, bucket, prefix))


def endpoint_user(endpoint_arn: str) -> Policy:
    """Return the rights with which an agent's role calls a model's endpoint with a bearer token."""
    return _document(
        _allow("CallTheModel", "sagemaker", "InvokeEndpoint InvokeEndpointWithResponseStream", endpoint_arn),
        _allow("SignBearerTokens", "sagemaker", "CallWithBearerToken", "*"),
    )


def imported_model_user(*model_arns: str) -> Policy:
    """Return the rights with which an agent's role calls imported models."""
    return _document(_allow("CallTheModel", "bedrock", "InvokeModel InvokeModelWithResponseStream", [*model_arns]))


def bundle_user(bundle_arn: str) -> Policy:
    """Return the rights with which an agent's role reads a configuration bundle."""
    return _document(_allow("ReadTheBundle", "bedrock-agentcore", "GetConfigurationBundleVersion", bundle_arn))


def text(policy: Policy) -> str:
    """Return the document as IAM takes it, in a fixed order."""
    return json.dumps(policy, indent=2)


def _document(*statements: Policy) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _trust(sid: str, service: str, condition: Policy) -> Policy:
    statement = {"Sid": sid, "Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return {**statement, "Condition": condition}


def _weights(partition: str, bucket: str, prefix: str) -> list[Policy]:
    below = {"StringLike": {"s3:prefix": f"{prefix}*"}}
    return [
        _allow("ReadWeights", "s3", "GetObject", f"arn:{partition}:s3:::{bucket}/{prefix}*"),
        _allow("ListWeights", "s3", "ListBucket", f"arn:{partition}:s3:::{bucket}", below),
    ]


def _allow(sid: str, service: str, actions: str, resources: str | list[str], condition: Policy | None = None) -> Policy:
    """Return a statement. ``actions`` are the names of the service's actions, separated by blanks."""
    found = {"Sid": sid, "Effect": "Allow", "Action": [f"{service}:{action}" for action in actions.split()]}
    found |= {"Resource": resources}
    return found if condition is None else {**found, "Condition": condition}
