"""Puts a model on a SageMaker endpoint, step by step. Each step checks the present state, so an interrupted run continues.

The endpoint keeps its name when the model changes. SageMaker starts the new model first, and then moves the traffic.

Sources: AWS Deep Learning Containers, "vLLM: Amazon SageMaker AI Deployment" (image, `/opt/ml/model`, `SM_VLLM_*`); API reference
of SageMaker.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ...errors import ConfigError
from .. import cost, iam
from ..calls import Calls
from .facts import ModelFacts, instance_for
from .host import Host, Part

IMAGES = "763104351884"  # the account of AWS's Deep Learning Containers, in most commercial regions
IMAGE, AMI = "vllm:server-sagemaker-cuda-v1", "al2-ami-sagemaker-inference-gpu-3-1"
READY_S = 3600.0  # a large model is downloaded, loaded and compiled first
PAUSE_S = 5.0
RUNTIME_URL = "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"
ABSENT = ("ValidationException", "ResourceNotFound")  # SageMaker's Describe calls say so of what is not there
# Tags of an endpoint: the configuration that has not passed its checks, and the one before it. They survive a killed command.
UNPROVEN, EARLIER = "agentcore-rl-unproven", "agentcore-rl-earlier"
_CHANGING = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")


def dollars_per_hour_at(url: str) -> float | None:
    """Return the price of the endpoint with this address. None for another address, and if AWS does not tell this user."""
    local = re.escape(os.environ.get(RUNTIME_URL, "").rstrip("/") or "-")
    found = re.match(rf"(?:{local}|https://runtime\.sagemaker\.([a-z0-9-]+)\.[a-z.]+)/endpoints/([^/]+)/openai/v1", url)
    if found is None:
        return None
    try:
        calls = Calls(region=found[1], rehearse=False, say=lambda line: None)
        endpoint = calls("sagemaker", "DescribeEndpoint", EndpointName=found[2])
        config = calls("sagemaker", "DescribeEndpointConfig", EndpointConfigName=endpoint["EndpointConfigName"])
        instance = config["ProductionVariants"][0]["InstanceType"]
        count = endpoint["ProductionVariants"][0]["CurrentInstanceCount"]
    except (ConfigError, LookupError):
        return None
    price = cost.dollars_per_hour(instance, str(calls.region), calls.price_list())
    return None if price is None else price * count


class SageMakerEndpoint(Host):
    """An endpoint on an instance, None: the smallest that fits.

    Attributes:
        address: the model's address, as `app.model()` takes it.
        rights: the statements that an agent's role needs to call the endpoint.
    """

    service = "sagemaker"

    def __init__(self, name: str, bucket: str, calls: Calls, instance: str | None) -> None:
        super().__init__(name, bucket, calls)
        self._instance = instance
        self._arn = f"arn:{self._where}:endpoint/{self.name}"
        self._version = ""  # the configuration of the model that `up` was given
        self._earlier: str | None = None  # the last configuration that passed its checks
        base = os.environ.get(RUNTIME_URL) or f"https://runtime.sagemaker.{calls.region}.amazonaws.com"
        self.address = {"base_url": f"{base.rstrip('/')}/endpoints/{self.name}/openai/v1"}
        self.rights = iam.endpoint_user(self._arn)

    def addresses(self) -> list[str]:
        """Return all addresses that agents may have of the model."""
        return list(self.address.values())

    def check(self, facts: ModelFacts) -> str:
        """Return the instance and its price, for people. Raises: ConfigError if the model does not fit."""
        instance, _ = instance_for(facts, self._instance)
        price = cost.dollars_per_hour(instance, str(self._call.region), self._call.price_list())
        return f"on {instance}: " + ("price per hour unknown" if price is None else f"${price:.2f} per hour")

    def up(self, facts: ModelFacts) -> None:
        """Bring the endpoint to this model, and wait until it serves."""
        self._own_endpoint()
        instance, gpus = instance_for(facts, self._instance)
        environment = {"SM_VLLM_TENSOR_PARALLEL_SIZE": str(gpus)}
        if facts.tool_parser is not None:
            environment |= {"SM_VLLM_ENABLE_AUTO_TOOL_CHOICE": "true", "SM_VLLM_TOOL_CALL_PARSER": facts.tool_parser}
        source = {"S3Uri": self._upload(facts), "S3DataType": "S3Prefix", "CompressionType": "None"}
        image = f"{IMAGES}.dkr.ecr.{self._call.region}.amazonaws.com/{IMAGE}"
        container = {"Image": image, "ModelDataSource": {"S3DataSource": source}, "Environment": environment}
        version = hashlib.sha256(json.dumps([container, instance]).encode()).hexdigest()[:12]
        name, tags = f"{self.name}-{version}", [self._resources.tag]
        self._version = name
        if self._api("DescribeModel", ModelName=name, absent=ABSENT) is None:
            self._call.step(f"model {name}", "created")
            policies = iam.hosting(self._call.partition, self._call.account, self._bucket, self._prefix)
            model: dict[str, Any] = {"ModelName": name, "PrimaryContainer": container, "Tags": tags}
            self._with_role(*policies, "CreateModel", "ExecutionRoleArn", **model)
        if self._api("DescribeEndpointConfig", EndpointConfigName=name, absent=ABSENT) is None:
            variant = {
                "VariantName": "model",
                "ModelName": name,
                "InstanceType": instance,
                "InitialInstanceCount": 1,
                "InitialVariantWeight": 1.0,
                "InferenceAmiVersion": AMI,
            }
            self._api("CreateEndpointConfig", EndpointConfigName=name, ProductionVariants=[variant], Tags=tags)
        found = self._own_endpoint()  # the upload may have taken hours, in which another command changed the endpoint
        if found is not None and found["EndpointStatus"] == "Failed":
            self._call.step(f"the failed endpoint {self.name}", "removed")
            self._delete()
            found = None
        if found is None:
            self._call.step(f"endpoint {self.name}", "created")
            marked = [*tags, {"Key": UNPROVEN, "Value": name}]
            self._api("CreateEndpoint", EndpointName=self.name, EndpointConfigName=name, Tags=marked)
            self._check_service(name)
            return
        now, marks = found["EndpointConfigName"], self._tags(self._arn)
        last = marks.get(EARLIER) if marks.get(UNPROVEN) == now else now
        self._earlier = None if last == name else last
        if now != name:
            new = [
                {"Key": key, "Value": value} for key, value in ((UNPROVEN, name), (EARLIER, last)) if value is not None
            ]
            self._api("AddTags", ResourceArn=self._arn, Tags=new)
            self._update(name)
        else:
            self._check_service(name)
            self._call.say(f"endpoint {self.name}: is up to date")

    def accept(self) -> None:
        """Remove the mark of an unproven configuration: the new model passed its checks."""
        if self._tags(self._arn).get(UNPROVEN) == self._version:  # and not that of another command's model
            # An empty value needs no right that the creation of the endpoint does not need.
            self._api("AddTags", ResourceArn=self._arn, Tags=[{"Key": UNPROVEN, "Value": ""}])

    def reject(self) -> None:
        """Let the endpoint serve its earlier configuration again, if it had one: the new model failed its check."""
        if self._earlier is None:
            self._call.say(
                "the new model is not proven: its endpoint stays, and is billed until `promote --remove`. To have an "
                "earlier model there, promote that one again"
            )
        else:
            self._call.say("the new model is not proven: the endpoint gets its earlier one")
            self._update(self._earlier)

    def _update(self, config: str) -> None:
        """Let the endpoint use another configuration, and wait until it serves."""
        self._call.step(f"endpoint {self.name}", f"updated to {config}")
        self._api("UpdateEndpoint", EndpointName=self.name, EndpointConfigName=config)
        self._check_service(config)

    def _check_service(self, config: str) -> None:
        """Wait until the endpoint does not change. Raises: ConfigError unless it serves this configuration."""
        now = self._settled() or {"EndpointStatus": "it was deleted", "EndpointConfigName": ""}
        if (now["EndpointStatus"], now["EndpointConfigName"]) != ("InService", config) and not self._call.rehearse:
            reason = now.get("FailureReason") or now["EndpointStatus"]
            raise ConfigError(f"endpoint {self.name} does not serve the model: {reason}")

    def _own_endpoint(self) -> Mapping[str, Any] | None:
        """Return the endpoint when it does not change. Raises: ConfigError if it does not have this model's tag."""
        found = self._settled()
        if found is not None:
            self._check_ours(f"the endpoint {self.name}", self._arn)
        return found

    def _settled(self) -> Mapping[str, Any] | None:
        find = partial(self._api, "DescribeEndpoint", EndpointName=self.name, absent=ABSENT)
        return self._call.settled(find, f"endpoint {self.name}", _CHANGING, (READY_S, PAUSE_S), "EndpointStatus")

    def logprobs(self, ids: list[int]) -> list[float]:
        """Ask vLLM for the logprob of each token but the first, at temperature 1. Shapes: (T,) -> (T - 1,).

        Source: vLLM, `entrypoints/sagemaker/api_router.py`: invocations take what `/v1/completions` takes.
        """
        body = json.dumps({"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}).encode()
        which: dict[str, Any] = {"EndpointName": self.name, "ContentType": "application/json", "Body": body}
        text = self._call("sagemaker-runtime", "InvokeEndpoint", **which)["Body"].read()
        try:
            given = json.loads(text)["choices"][0]["prompt_logprobs"]
            return [float(each[str(token)]["logprob"]) for token, each in zip(ids[1:], given[1:], strict=True)]
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise ConfigError(f"the endpoint gave no logprobs: {text[:200]!r}") from e

    def _parts(self) -> Iterator[Part]:
        if self._own_endpoint() is not None:  # another one may need the role and the weights
            yield f"endpoint {self.name}", self._arn, self._delete
        for kind in ("EndpointConfig", "Model"):
            listed = [*self._call.every("sagemaker", f"List{kind}s", f"{kind}s", NameContains=self.name)]
            for name, arn in ((each[f"{kind}Name"], each[f"{kind}Arn"]) for each in listed):
                if self._is_version(name):
                    delete = partial(self._api, f"Delete{kind}", absent=ABSENT, **{f"{kind}Name": name})
                    yield f"{kind} {name}", arn, delete

    def _tags(self, arn: str) -> Mapping[str, str]:
        listed = self._call.every("sagemaker", "ListTags", "Tags", ResourceArn=arn)
        return {tag["Key"]: tag["Value"] for tag in listed}

    def _delete(self) -> None:
        self._api("DeleteEndpoint", EndpointName=self.name, absent=ABSENT)
        self._settled()
