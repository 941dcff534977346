"""Puts a model on a SageMaker endpoint, step by step. Each step looks at the present state first, so that an interrupted run
continues.

The endpoint keeps its name when the model changes. SageMaker starts the new model beside the old one, and then moves the traffic.

Sources: AWS Deep Learning Containers, "vLLM: Amazon SageMaker AI Deployment" (image, `/opt/ml/model`, `SM_VLLM_*`); API reference
of SageMaker.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ..errors import ConfigError
from . import iam
from .calls import Calls, RefusedError
from .model import ModelFacts
from .settings import TAG

IMAGES = "763104351884"  # the account of AWS's Deep Learning Containers, in most commercial regions
IMAGE, AMI = "vllm:server-sagemaker-cuda-v1", "al2-ami-sagemaker-inference-gpu-3-1"
PREFIX = "agentcore-rl-models"
POLICY, ROLE_POLICY = "agentcore-rl-model", "agentcore-rl"
READY_S, GONE_S, ROLE_S = 3600.0, 900.0, 90.0  # a large model is downloaded, loaded and compiled first
PAUSE_S = 5.0
ABSENT = ("ValidationException", "ResourceNotFound")  # SageMaker's Describe calls say so of what is not there
NO_ENTITY = ("NoSuchEntity",)
NOT_IN_S3 = ("404", "NoSuchKey", "NotFound")


@dataclass(frozen=True, kw_only=True)
class HostingSettings:
    """A model on an endpoint.

    Attributes:
        name: name of the endpoint: letters, digits and hyphens, at most 40.
        bucket: where the weights go.
        instance, gpus: type of the instance, and its number of GPUs.
        tool_parser: vLLM's parser of tool calls; None: the model calls no tools.
        role: ARN of an execution role that exists; None: one is made.
        image: URI of the container; None: AWS's own with vLLM.
    """

    name: str
    bucket: str
    instance: str
    gpus: int = 1
    tool_parser: str | None = None
    role: str | None = None
    image: str | None = None

    @property
    def tags(self) -> list[dict[str, str]]:
        """The tags of everything that is made."""
        return [{"Key": TAG, "Value": f"model-{self.name}"}]


class ModelHosting:
    """The endpoint of ``settings``. ``say`` takes one line for each step.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, settings: HostingSettings, calls: Calls, say: Callable[[str], None]) -> None:
        self.settings, self._call, self._say = settings, calls, say
        self._s3, self._iam, self._sagemaker = (partial(calls, service) for service in ("s3", "iam", "sagemaker"))

    @cached_property
    def _who(self) -> tuple[str, str]:
        """Account and partition."""
        who = self._call("sts", "GetCallerIdentity")
        return str(who["Account"]), str(who["Arn"]).split(":")[1]

    @property
    def endpoint_arn(self) -> str:
        account, partition = self._who
        return f"arn:{partition}:sagemaker:{self._call.region}:{account}:endpoint/{self.settings.name.lower()}"

    @property
    def role_name(self) -> str:
        return f"agentcore-rl-model-{self.settings.name}"

    # -- up

    def up(self, facts: ModelFacts) -> bool:
        """Bring the endpoint to this model, and wait until it serves. Returns True if anything had to change."""
        uri = self._upload(facts)
        container = self._container(uri)
        role = self._role()
        version = hashlib.sha256(json.dumps([container, self.settings.instance, role]).encode()).hexdigest()[:12]
        name = f"{self.settings.name}-{version}"
        tags = self.settings.tags
        if self._sagemaker("DescribeModel", ModelName=name, absent=ABSENT) is None:
            self._say(f"model {name}: is created")
            model: dict[str, Any] = {
                "ModelName": name,
                "PrimaryContainer": container,
                "ExecutionRoleArn": role,
                "Tags": tags,
            }
            self._until_role_is_known(lambda: self._sagemaker("CreateModel", **model))
        if self._sagemaker("DescribeEndpointConfig", EndpointConfigName=name, absent=ABSENT) is None:
            variant = {
                "VariantName": "model",
                "ModelName": name,
                "InstanceType": self.settings.instance,
                "InitialInstanceCount": 1,
                "InitialVariantWeight": 1.0,
                "InferenceAmiVersion": AMI,
            }
            self._sagemaker("CreateEndpointConfig", EndpointConfigName=name, ProductionVariants=[variant], Tags=tags)
        return self._endpoint(name)

    def _upload(self, facts: ModelFacts) -> str:
        """Upload the files that are not there yet. Returns the address of their folder."""
        bucket = self.settings.bucket
        if self._s3("HeadBucket", Bucket=bucket, absent=(*NOT_IN_S3, "NoSuchBucket")) is None:
            self._say(f"bucket {bucket}: is created")
            where = None if self._call.region == "us-east-1" else {"LocationConstraint": self._call.region}
            there = ("BucketAlreadyOwnedByYou",)
            self._s3("CreateBucket", Bucket=bucket, CreateBucketConfiguration=where, absent=there)
        prefix = f"{PREFIX}/{self.settings.name}/{facts.digest}/"
        for file in facts.files:
            found = self._s3("HeadObject", Bucket=bucket, Key=prefix + file.name, absent=(*NOT_IN_S3, "NoSuchBucket"))
            if found is not None and found["ContentLength"] == file.stat().st_size:
                continue
            self._say(f"{file.name} ({file.stat().st_size / 10**6:.1f} MB): is uploaded to s3://{bucket}/{prefix}")
            self._call.upload(file, bucket, prefix + file.name)
        return f"s3://{bucket}/{prefix}"

    def _container(self, uri: str) -> dict[str, Any]:
        s, region = self.settings, self._call.region
        source = {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
        environment = {"SM_VLLM_TENSOR_PARALLEL_SIZE": str(s.gpus)}
        if s.tool_parser is not None:
            environment |= {"SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true", "SM_VLLM_TOOL_CALL_PARSER": s.tool_parser}
        return {
            "Image": s.image or f"{IMAGES}.dkr.ecr.{region}.amazonaws.com/{IMAGE}",
            "ModelDataSource": {"S3DataSource": source},
            "Environment": environment,
        }

    def _role(self) -> str:
        if self.settings.role is not None:
            return self.settings.role
        account, partition = self._who
        trust = iam.text(iam.hosting_trust(account))
        policy = iam.text(iam.hosting(partition, self.settings.bucket, f"{PREFIX}/{self.settings.name}/"))
        role: dict[str, Any] = {"RoleName": self.role_name}
        found = self._iam("GetRole", **role, absent=NO_ENTITY)
        if found is None:
            self._say(f"role {self.role_name}: is created")
            about = {"Description": f"The model endpoint {self.settings.name}", "Tags": self.settings.tags}
            self._iam("CreateRole", **role, AssumeRolePolicyDocument=trust, **about, absent=("EntityAlreadyExists",))
        elif self.settings.tags[0] not in found["Role"].get("Tags", []):
            raise ConfigError(
                f"the role {self.role_name} exists and has no tag {TAG}: use it with --role, or another --name"
            )
        now = self._iam("GetRolePolicy", **role, PolicyName=ROLE_POLICY, absent=NO_ENTITY)
        if now is None or now["PolicyDocument"] != json.loads(policy):
            self._iam("PutRolePolicy", **role, PolicyName=ROLE_POLICY, PolicyDocument=policy)
        return f"arn:{partition}:iam::{account}:role/{self.role_name}"

    def _until_role_is_known(self, create: Callable[[], Any]) -> None:
        """A role that was just made is known to SageMaker after some seconds."""
        deadline = time.monotonic() + ROLE_S
        while True:
            try:
                create()
                return
            except RefusedError as e:
                if self.settings.role is not None or "role" not in str(e).lower() or time.monotonic() > deadline:
                    raise
                self._say("the role is not known everywhere yet: waiting")
                time.sleep(PAUSE_S)

    def _endpoint(self, config: str) -> bool:
        name = self.settings.name
        found = self._settled()
        if found is not None and found["EndpointStatus"] == "Failed":
            self._say(f"endpoint {name}: failed before, so it is deleted first")
            self._delete_endpoint()
            found = None
        if found is None:
            self._say(f"endpoint {name}: is created")
            self._sagemaker("CreateEndpoint", EndpointName=name, EndpointConfigName=config, Tags=self.settings.tags)
        elif found["EndpointConfigName"] != config:
            self._must_be_ours()
            self._say(f"endpoint {name}: is updated")
            self._sagemaker("UpdateEndpoint", EndpointName=name, EndpointConfigName=config)
        else:
            self._say(f"endpoint {name}: is up to date")
            return False
        if self._call.rehearse:
            self._say("would wait until it is in service")
            return True
        now = self._settled()
        if now is None or now["EndpointStatus"] != "InService" or now["EndpointConfigName"] != config:
            reason = "it was deleted" if now is None else now.get("FailureReason") or f"status {now['EndpointStatus']}"
            raise ConfigError(f"endpoint {name} does not serve the model: {reason}")
        return True

    def _settled(self) -> Mapping[str, Any] | None:
        """Wait while the endpoint changes. Returns its description. Raises: ConfigError when that does not end in time."""
        deadline, said = time.monotonic() + READY_S, ""
        while True:
            now: Mapping[str, Any] | None
            now = self._sagemaker("DescribeEndpoint", EndpointName=self.settings.name, absent=ABSENT)
            status = "" if now is None else str(now["EndpointStatus"])
            if (
                status not in ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")
                or self._call.rehearse
            ):
                return now
            if status != said:
                self._say(f"endpoint {self.settings.name}: {status}")
                said = status
            if time.monotonic() > deadline:
                raise ConfigError(f"endpoint {self.settings.name} is still {status} after {READY_S:.0f} s")
            time.sleep(PAUSE_S)

    # -- down

    def remove(self) -> None:
        """Remove the endpoint, its configurations, models, role, and uploaded weights, as far as this command made them."""
        if self._sagemaker("DescribeEndpoint", EndpointName=self.settings.name, absent=ABSENT) is not None:
            self._must_be_ours()
            self._say(f"endpoint {self.settings.name}: is removed")
            self._settled()
            self._delete_endpoint()
        for listed, entries, key, kind in (
            ("ListEndpointConfigs", "EndpointConfigs", "EndpointConfigName", "configuration"),
            ("ListModels", "Models", "ModelName", "model"),
        ):
            for name in self._names(listed, entries, key):
                self._say(f"{kind} {name}: is removed")
                self._sagemaker(f"Delete{key.removesuffix('Name')}", **{key: name}, absent=ABSENT)
        role: dict[str, Any] = {"RoleName": self.role_name}
        found = self._iam("GetRole", **role, absent=NO_ENTITY)
        if found is not None and self.settings.tags[0] in found["Role"].get("Tags", []):
            self._say(f"role {self.role_name}: is removed")
            self._iam("DeleteRolePolicy", **role, PolicyName=ROLE_POLICY, absent=NO_ENTITY)
            self._iam("DeleteRole", **role, absent=NO_ENTITY)
        self._remove_weights()

    def _remove_weights(self) -> None:
        bucket, prefix = self.settings.bucket, f"{PREFIX}/{self.settings.name}/"
        while found := (self._s3("ListObjectsV2", Bucket=bucket, Prefix=prefix, absent=("NoSuchBucket",)) or {}).get(
            "Contents"
        ):
            for item in found:
                self._say(f"s3://{bucket}/{item['Key']}: is removed")
                self._s3("DeleteObject", Bucket=bucket, Key=item["Key"])
            if self._call.rehearse:
                return

    def _names(self, operation: str, entries: str, key: str) -> list[str]:
        """Return the names of all models or configurations that begin with the endpoint's name."""
        names: list[str] = []
        token: str | None = None
        while True:
            page = self._sagemaker(operation, NameContains=self.settings.name, NextToken=token) or {}
            names += [entry[key] for entry in page.get(entries, [])]
            token = page.get("NextToken")
            if token is None:
                return [name for name in names if name.rpartition("-")[0] == self.settings.name]

    def _must_be_ours(self) -> None:
        tags = (self._sagemaker("ListTags", ResourceArn=self.endpoint_arn) or {}).get("Tags", [])
        if self.settings.tags[0] not in tags and not self._call.rehearse:
            raise ConfigError(
                f"the endpoint {self.settings.name} was not made by `agentcore-rl promote` (it lacks the tag {TAG}): choose "
                "another --name"
            )

    def _delete_endpoint(self) -> None:
        self._sagemaker("DeleteEndpoint", EndpointName=self.settings.name, absent=ABSENT)
        deadline = time.monotonic() + GONE_S
        while not self._call.rehearse and self._settled() is not None:
            if time.monotonic() > deadline:
                raise ConfigError(f"endpoint {self.settings.name} is still there after {GONE_S:.0f} s")
            time.sleep(PAUSE_S)
