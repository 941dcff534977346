"""The settings of a model in production."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model in production.

    Attributes:
        name: name of the model: letters, digits and single hyphens, at most 40.
        service: `sagemaker` or `bedrock`.
        region: the service's AWS region.
        bucket: where the weights go.
        role: ARN of an existing role that reads them. None creates a role.
        instance: type of an endpoint's instance; None: the smallest that fits.
        image: URI of an endpoint's container; None: AWS's own with vLLM.
    """

    name: str
    service: str
    region: str
    bucket: str
    role: str | None = None
    instance: str | None = None
    image: str | None = None

    @property
    def role_name(self) -> str:
        return f"agentcore-rl-model-{self.name}"

    @property
    def prefix(self) -> str:
        """The keys of the weights begin with it. A bucket can hold the models of several regions."""
        return f"agentcore-rl-models/{self.service}/{self.region}/{self.name}/"

    @property
    def tag(self) -> str:
        """The tag of every created resource. Roles belong to no region, so the tag names it."""
        return f"model-{self.service}-{self.region}-{self.name}"
