"""The settings of one deployment. The options describe all of the agent.

A missing option is AgentCore's default, also for a deployed agent with another value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

TAG = "agentcore-rl-deployment"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a deployment.

    Attributes:
        name: of the agent runtime: letters, digits, underscores.
        folder: the agent's; None when only an existing image is deployed.
        entry: the file that is started, inside ``folder``.
        module, import_paths: name of the agent's module if ``entry`` is not a file of the folder itself, and the folders inside
            ``folder`` that its import path begins with.
        excluded: paths that are not packed.
        image: URI of an image that exists; None: it is built from the folder's Dockerfile.
        code: deploy an archive instead of an image. ``python`` is then the version it runs with.
        score_ready: create a version for rollouts of an agent without a rollout function.
        platform: what is built for.
        bucket, prefix: where records go. The prefix is "" or ends with a slash.
        role: ARN of an existing execution role. None creates a role.
        environment: environment variables of the sessions.
        subnets, security_groups: of a VPC; both empty: public network.
        endpoint: name of an endpoint that is to point at the new version; None: `DEFAULT` alone, which always does.
        smoke: payload of the rollout that proves the deployment; None: none is run.
    """

    name: str
    folder: Path | None = None
    entry: str = "agent.py"
    module: str | None = None
    import_paths: Sequence[str] = ()
    excluded: Sequence[Path] = ()
    image: str | None = None
    code: bool = False
    score_ready: bool = False
    python: str = "3.13"
    platform: str
    bucket: str | None = None
    prefix: str = ""
    role: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()
    endpoint: str | None = None
    smoke: Mapping[str, Any] | None = None

    @property
    def repository(self) -> str | None:
        """The ECR repository of an image that is built."""
        built = self.image is None or self.score_ready
        return f"agentcore-rl/{self.name.lower()}" if built and not self.code else None

    @property
    def store(self) -> str | None:
        """The store of the records, as clients take it."""
        return f"s3://{self.bucket}/{self.prefix}" if self.bucket is not None and self.prefix else self.bucket

    @property
    def tags(self) -> dict[str, str]:
        """The tags of every created resource."""
        return {TAG: self.name}

    @property
    def role_name(self) -> str:
        return f"agentcore-rl-{self.name}"

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other or lack something."""
        if self.image is None and self.folder is None:
            raise ConfigError("nothing to deploy: give --agent FOLDER, or --image URI")
        if self.image is not None and self.code:
            raise ConfigError("--image and --code contradict each other: an archive has no image")
        if self.code and self.bucket is None:
            raise ConfigError("--code uploads an archive: give its bucket with --bucket NAME")
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError("a VPC takes both --subnet and --security-group")
        if self.smoke is not None and self.bucket is None:
            raise ConfigError(
                "the rollout writes a record: give its bucket with --bucket NAME, or leave the rollout out with --smoke none"
            )
        if self.folder is not None and self.image is None and self.module is None:
            started_by = (self.entry,) if self.code else (self.entry, "Dockerfile")
            if not any((self.folder / name).is_file() for name in started_by):
                raise ConfigError(f"{self.folder} has no {self.entry}: name the agent's file or module with --agent")
