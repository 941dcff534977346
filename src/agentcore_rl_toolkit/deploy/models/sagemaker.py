"""Puts a model on a SageMaker endpoint, step by step. Each step checks the present state, so an interrupted run continues.

The endpoint keeps its name when the model changes. SageMaker starts the new model first, and then
moves the traffic.

Sources: AWS Deep Learning Containers, "vLLM: Amazon SageMaker AI Deployment" (image, `/opt/ml/model`, `SM_VLLM_*`); API reference
of SageMaker.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from ...errors import ConfigError
from .. import cost, iam
from ..calls import Calls
from ..resources import Resources
from .facts import ModelFacts, instance_for
from .settings import ModelSettings

IMAGES = "763104351884"  # the account of AWS's Deep Learning Containers, in most commercial regions
IMAGE, AMI = "vllm:server-sagemaker-cuda-v1", "al2-ami-sagemaker-inference-gpu-3-1"
READY_S = 3600.0  # a large model is downloaded, loaded and compiled first
PAUSE_S = 5.0
RUNTIME_URL = "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"
ABSENT = ("ValidationException", "ResourceNotFound")  # SageMaker's Describe calls say so of what is not there
BEFORE = "agentcore-rl-before"  # tag of an endpoint: the configuration that the last update replaced
_CHANGING = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")


def dollars_per_hour_of(name: str, region: str | None) -> float | None:
    """Return the price of an endpoint's instance. None if AWS does not tell this user."""
    try:
        calls = Calls(region=region, rehearse=False, say=lambda line: None)
        found = calls("sagemaker", "DescribeEndpoint", EndpointName=name)
        config = calls("sagemaker", "DescribeEndpointConfig", EndpointConfigName=found["EndpointConfigName"])
        instance = config["ProductionVariants"][0]["InstanceType"]
    except (ConfigError, LookupError):
        return None
    return cost.dollars_per_hour(instance, str(calls.region), calls.price_list())


class SageMakerEndpoint:
    """The endpoint of ``settings``.

    Attributes:
        address: the model's address, as `app.model()` takes it.
        rights: the statements that an agent's role needs to call the endpoint.
        before: the configuration that `up` replaced, if it replaced one.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, settings: ModelSettings, calls: Calls) -> None:
        self.settings, self._call = settings, calls
        self._resources = Resources(settings.tag, calls)
        self._sagemaker = partial(calls, "sagemaker")
        where = f"{calls.partition}:sagemaker:{calls.region}:{calls.account}"
        self._arn = f"arn:{where}:endpoint/{settings.name.lower()}"
        base = os.environ.get(RUNTIME_URL) or f"https://runtime.sagemaker.{calls.region}.amazonaws.com"
        self.address = {"base_url": f"{base.rstrip('/')}/endpoints/{settings.name}/openai/v1"}
        self.rights = iam.endpoint_user(self._arn)
        self.before: str | None = None

    def addresses(self) -> list[str]:
        """Return all addresses that agents may have of the model."""
        return list(self.address.values())

    # -- up

    def check(self, facts: ModelFacts, *, force: bool = False) -> str:
        """Return the instance and its price, for people. Raises: ConfigError if the model does not fit."""
        instance, _ = instance_for(facts, self.settings.instance)
        price = cost.dollars_per_hour(instance, str(self._call.region), self._call.price_list())
        return f"on {instance}: " + ("price per hour unknown" if price is None else f"${price:.2f} per hour")

    def up(self, facts: ModelFacts) -> None:
        """Bring the endpoint to this model, and wait until it serves."""
        s, tags = self.settings, [self._resources.tag]
        instance, gpus = instance_for(facts, s.instance)
        uri = self._resources.upload(facts.files, s.bucket, f"{s.prefix}{facts.digest}/")
        container = self._container(uri, gpus, facts.tool_parser)
        role = s.role or self._role()
        version = hashlib.sha256(json.dumps([container, instance, role]).encode()).hexdigest()[:12]
        name = f"{s.name}-{version}"
        if self._sagemaker("DescribeModel", ModelName=name, absent=ABSENT) is None:
            self._call.step(f"model {name}", "created")
            model: dict[str, Any] = {
                "ModelName": name,
                "PrimaryContainer": container,
                "ExecutionRoleArn": role,
                "Tags": tags,
            }
            self._resources.until_role_is_known(
                lambda: self._sagemaker("CreateModel", **model), own_role=s.role is None
            )
        if self._sagemaker("DescribeEndpointConfig", EndpointConfigName=name, absent=ABSENT) is None:
            variant = {
                "VariantName": "model",
                "ModelName": name,
                "InstanceType": instance,
                "InitialInstanceCount": 1,
                "InitialVariantWeight": 1.0,
                "InferenceAmiVersion": AMI,
            }
            self._sagemaker("CreateEndpointConfig", EndpointConfigName=name, ProductionVariants=[variant], Tags=tags)
        self._serve(name)

    def _container(self, uri: str, gpus: int, tool_parser: str | None) -> dict[str, Any]:
        source = {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
        environment = {"SM_VLLM_TENSOR_PARALLEL_SIZE": str(gpus)}
        if tool_parser is not None:
            environment |= {"SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true", "SM_VLLM_TOOL_CALL_PARSER": tool_parser}
        return {
            "Image": self.settings.image or f"{IMAGES}.dkr.ecr.{self._call.region}.amazonaws.com/{IMAGE}",
            "ModelDataSource": {"S3DataSource": source},
            "Environment": environment,
        }

    def _role(self) -> str:
        s, calls = self.settings, self._call
        trust, rights = iam.hosting(calls.partition, calls.account, s.bucket, s.prefix)
        return self._resources.role(s.role_name, f"The model endpoint {s.name}", trust, rights)

    def _serve(self, config: str) -> None:
        """Create the endpoint with a configuration, or update it, and wait until it serves."""
        name = self.settings.name
        found = self._settled()
        if found is not None and found["EndpointStatus"] == "Failed":
            self._must_be_ours()
            self._delete("the failed endpoint")
            found = None
        which: dict[str, Any] = {"EndpointName": name, "EndpointConfigName": config}
        if found is None:
            self._call.step(f"endpoint {name}", "created")
            self._sagemaker("CreateEndpoint", **which, Tags=[self._resources.tag])
        elif found["EndpointConfigName"] != config:
            self._must_be_ours()
            self._call.step(f"endpoint {name}", f"updated from {found['EndpointConfigName']} to {config}")
            before = {"Key": BEFORE, "Value": found["EndpointConfigName"]}  # a repeated command reads it from the tag
            self._sagemaker("AddTags", ResourceArn=self._arn, Tags=[before])
            self._sagemaker("UpdateEndpoint", **which)
        else:
            self._call.say(f"endpoint {name}: is up to date")
        if self._call.rehearse:
            return
        replaced = {tag["Key"]: tag["Value"] for tag in self._tags_of(self._arn)}.get(BEFORE, config)
        self.before = replaced if replaced != config else None
        now = self._settled()
        if now is None or now["EndpointStatus"] != "InService" or now["EndpointConfigName"] != config:
            reason = "it was deleted" if now is None else now.get("FailureReason") or f"status {now['EndpointStatus']}"
            raise ConfigError(f"endpoint {name} does not serve the model: {reason}")

    def _settled(self) -> Mapping[str, Any] | None:
        """Wait while the endpoint changes. Returns its description. Raises: ConfigError when that does not end in time."""
        find = partial(self._sagemaker, "DescribeEndpoint", EndpointName=self.settings.name, absent=ABSENT)
        what, times_s = f"endpoint {self.settings.name}", (READY_S, PAUSE_S)
        return self._call.settled(find, what, _CHANGING, times_s, "EndpointStatus")

    def roll_back(self, config: str) -> None:
        """Let the endpoint serve an earlier configuration again. Raises: ConfigError if there is none with this name."""
        if ("EndpointConfig", config) not in self._ours():
            raise ConfigError(
                f"no configuration {config} of the endpoint {self.settings.name} in {self.settings.region}"
            )
        self._serve(config)

    # -- proof

    def logprobs(self, ids: list[int]) -> list[float]:
        """Ask vLLM for the logprob of each token but the first, at temperature 1. Shapes: (T,) -> (T - 1,).

        Source: vLLM, `entrypoints/sagemaker/api_router.py`: invocations take what `/v1/completions` takes.
        """
        body = json.dumps({"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}).encode()
        which: dict[str, Any] = {"EndpointName": self.settings.name, "ContentType": "application/json", "Body": body}
        text = self._call("sagemaker-runtime", "InvokeEndpoint", **which)["Body"].read()
        try:
            given = json.loads(text)["choices"][0]["prompt_logprobs"]
            return [float(each[str(token)]["logprob"]) for token, each in zip(ids[1:], given[1:], strict=True)]
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise ConfigError(f"the endpoint gave no logprobs: {text[:200]!r}") from e

    # -- down

    def find(self) -> None:
        """Check that there is something to remove. Raises: ConfigError if there is nothing, or if the endpoint is another's."""
        s = self.settings
        if self._settled() is not None:
            self._must_be_ours()
        elif not self._ours() and not self._resources.has_any(s.role_name, s.bucket, s.prefix):
            raise ConfigError(f"no endpoint {s.name} in {s.region}, and nothing else that promote made for it there")

    def remove(self) -> None:
        """Remove the endpoint, its configurations, models, role, and uploaded weights, as far as this command made them."""
        s = self.settings
        if self._settled() is not None:
            self._must_be_ours()
            self._delete("endpoint")
        for kind, name in self._ours():
            self._call.step(f"{kind} {name}", "removed")
            self._sagemaker(f"Delete{kind}", **{f"{kind}Name": name}, absent=ABSENT)
        self._resources.remove_role(s.role_name)
        self._resources.remove_objects(s.bucket, s.prefix)

    def _ours(self) -> list[tuple[str, str]]:
        """Return kind and name of the configurations and models that this command made for the endpoint."""
        found = []
        for kind in ("EndpointConfig", "Model"):
            listed = self._call.every("sagemaker", f"List{kind}s", f"{kind}s", NameContains=self.settings.name)
            each = [(entry[f"{kind}Name"], entry[f"{kind}Arn"]) for entry in listed]
            found += [(kind, name) for name, arn in each if self._resources.tag in self._tags_of(arn)]
        return found

    def _tags_of(self, arn: str) -> list[Mapping[str, str]]:
        found: list[Mapping[str, str]] = (self._sagemaker("ListTags", ResourceArn=arn) or {}).get("Tags", [])
        return found

    def _must_be_ours(self) -> None:
        if self._resources.tag not in self._tags_of(self._arn):
            raise ConfigError(
                f"the endpoint {self.settings.name} was not made by `agentcore-rl promote` (it lacks the tag "
                f"{self._resources.tag['Key']}): choose another --name"
            )

    def _delete(self, what: str) -> None:
        self._call.step(f"{what} {self.settings.name}", "removed")
        self._sagemaker("DeleteEndpoint", EndpointName=self.settings.name, absent=ABSENT)
        self._settled()
