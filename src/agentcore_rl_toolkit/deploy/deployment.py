"""Deploying an agent, step by step. Every step looks at what is there first, so that a deployment that was interrupted goes on.

Nothing is remembered on this machine: what a deployment made carries its tag on AWS, and only that is ever removed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._installation import wheel_digest
from ..contract import Outcome
from ..errors import AgentCoreRLError, ConfigError
from . import iam
from .artifact import Engine, digest_of, make_archive, put_wheel_beside
from .calls import Calls, RefusedError

TAG = "agentcore-rl-deployment"
POLICY = "agentcore-rl"
ARCHIVES = "agentcore-rl-deployments"
READY_S, GONE_S, ROLE_S = 900.0, 600.0, 90.0
POLL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One deployment.

    Attributes:
        name: of the agent runtime: letters, digits, underscores.
        folder: the agent's; None when only an existing image is deployed.
        entry: the file that is started, inside ``folder``.
        image: URI of an image that exists; None: it is built from the folder's Dockerfile.
        code: deploy an archive instead of an image. ``python`` is then the version it runs with.
        platform: what is built for.
        bucket, prefix: where records go.
        role: ARN of an execution role that exists; None: one is made.
        environment: environment variables of the sessions.
        subnets, security_groups: of a VPC; both empty: public network.
        idle_s, lifetime_s: the sessions' limits, in seconds; None: the service's own.
        endpoint: name of an endpoint that is to point at the new version; None: `DEFAULT` alone, which always does.
        tags: more tags of everything that is made.
        engine: command of Docker or Podman; None: the one that is found.
        smoke: payload of the rollout that proves the deployment; None: none is run.
    """

    name: str
    folder: Path | None = None
    entry: str = "agent.py"
    image: str | None = None
    code: bool = False
    python: str = "3.13"
    platform: str
    bucket: str | None = None
    prefix: str = ""
    role: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()
    idle_s: int | None = None
    lifetime_s: int | None = None
    endpoint: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    engine: str | None = None
    smoke: Mapping[str, Any] | None = None

    @property
    def repository(self) -> str | None:
        """The ECR repository of an image that is built."""
        return None if self.image is not None or self.code else f"agentcore-rl/{self.name.lower()}"

    @property
    def role_name(self) -> str:
        return f"agentcore-rl-{self.name}"

    def check(self) -> None:
        """Raises: ConfigError for settings that contradict each other or lack something."""
        if self.image is None and self.folder is None:
            raise ConfigError("what is to be deployed? --agent FOLDER, or --image URI")
        if self.image is not None and self.code:
            raise ConfigError("--image and --code contradict each other: an archive has no image")
        if self.code and self.bucket is None:
            raise ConfigError("--code uploads an archive: --bucket NAME says where to")
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError("a VPC takes both --subnet and --security-group")
        if self.smoke is not None and self.bucket is None:
            raise ConfigError("a rollout leaves a record: --bucket NAME says where, or --no-smoke leaves it out")
        if self.folder is not None and self.image is None:
            needed = self.entry if self.code else "Dockerfile"
            if not (self.folder / needed).is_file():
                raise ConfigError(f"{self.folder} has no {needed}")


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """What a deployment came to. In a rehearsal ``arn`` is None for an agent that is not there yet."""

    arn: str | None
    version: str | None
    changed: bool
    smoke: str | None = None


class Deployment:
    """Deploys what ``settings`` say through ``calls``, telling ``say`` one line a step.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, settings: Settings, calls: Calls, say: Callable[[str], None]) -> None:
        self.settings, self._call, self._say = settings, calls, say
        self._tags = {TAG: settings.name, **settings.tags}
        self._identity: tuple[str, str] | None = None

    # -- up

    def up(self) -> Deployed:
        """Make, or bring up to date, everything the settings name."""
        self.settings.check()
        self._bucket()
        artifact = self._artifact()
        role = self._role()
        arn, version, changed = self._runtime(artifact, role)
        if arn is None or version is None:
            return Deployed(arn=arn, version=version, changed=changed)
        self._must_be_ready(arn)
        self._endpoint(arn, version)
        return Deployed(arn=arn, version=version, changed=changed, smoke=self._smoke(arn))

    def place(self) -> iam.Place:
        """What policies name of this deployment."""
        account, partition = self._who()
        s = self.settings
        repository = s.repository
        if s.image is not None and ".dkr.ecr." in s.image:
            repository = s.image.split("/", 1)[1].split("@")[0].rsplit(":", 1)[0]
        assert self._call.region is not None
        return iam.Place(
            account=account,
            region=self._call.region,
            partition=partition,
            name=s.name,
            repository=repository,
            bucket=s.bucket,
            prefix=s.prefix,
        )

    def _who(self) -> tuple[str, str]:
        if self._identity is None:
            who = self._call("sts", "GetCallerIdentity")
            self._identity = str(who["Account"]), str(who["Arn"]).split(":")[1]
        return self._identity

    def _bucket(self) -> None:
        bucket = self.settings.bucket
        if bucket is None:
            return
        if self._call("s3", "HeadBucket", Bucket=bucket, absent=("404", "NoSuchBucket", "NotFound")) is not None:
            return
        self._say(f"bucket {bucket}: is made")
        region = self._call.region
        where = None if region == "us-east-1" else {"LocationConstraint": region}
        self._call(
            "s3", "CreateBucket", Bucket=bucket, CreateBucketConfiguration=where, absent=("BucketAlreadyOwnedByYou",)
        )  # closed to the public by S3's own default

    def _artifact(self) -> dict[str, Any]:
        s = self.settings
        if s.image is not None:
            return {"containerConfiguration": {"containerUri": s.image}}
        return self._archive() if s.code else self._image()

    def _image(self) -> dict[str, Any]:
        s = self.settings
        assert s.folder is not None
        assert s.repository is not None
        found = self._call(
            "ecr", "DescribeRepositories", repositoryNames=[s.repository], absent=("RepositoryNotFoundException",)
        )
        if found is None:
            self._say(f"repository {s.repository}: is made")
            tags = [{"Key": k, "Value": v} for k, v in self._tags.items()]
            found = self._call("ecr", "CreateRepository", repositoryName=s.repository, tags=tags)
            uri = found["repository"]["repositoryUri"] if found else f"{self._registry()}/{s.repository}"
        else:
            uri = found["repositories"][0]["repositoryUri"]
        if not self._call.rehearse:
            put_wheel_beside(s.folder)
        tag = digest_of(s.folder, s.platform)
        image = f"{uri}:{tag}"
        known = self._call(
            "ecr",
            "DescribeImages",
            repositoryName=s.repository,
            imageIds=[{"imageTag": tag}],
            absent=("ImageNotFoundException", "RepositoryNotFoundException"),
        )
        if known is not None:
            self._say(f"image {tag}: is there")
        elif self._call.rehearse:
            self._say(f"would build {s.folder} for {s.platform} and push {image}")
        else:
            engine = Engine.find(s.engine)
            self._say(f"image {tag}: is built for {s.platform}")
            engine.build(s.folder, uri=image, target=s.platform)
            token = self._call("ecr", "GetAuthorizationToken")["authorizationData"][0]["authorizationToken"]
            self._say(f"image {tag}: is pushed")
            engine.push(image, password=_password(token))
        return {"containerConfiguration": {"containerUri": image}}

    def _registry(self) -> str:
        account, partition = self._who()
        return f"{account}.dkr.ecr.{self._call.region}.amazonaws.com{'.cn' if partition == 'aws-cn' else ''}"

    def _archive(self) -> dict[str, Any]:
        s = self.settings
        assert s.folder is not None
        assert s.bucket is not None
        key = f"{ARCHIVES}/{s.name}/{digest_of(s.folder, s.platform, s.python, wheel_digest())}.zip"
        if self._call(
            "s3", "HeadObject", Bucket=s.bucket, Key=key, absent=("404", "NoSuchKey", "NotFound", "NoSuchBucket")
        ):
            self._say(f"archive {Path(key).stem}: is there")
        elif self._call.rehearse:
            self._say(f"would make an archive of {s.folder} for {s.platform} and put it to s3://{s.bucket}/{key}")
        else:
            self._say(f"archive {Path(key).stem}: is made for {s.platform}, Python {s.python}")
            with tempfile.TemporaryDirectory() as work:
                made = make_archive(s.folder, target=s.platform, python=s.python, into=Path(work))
                self._call("s3", "PutObject", Bucket=s.bucket, Key=key, Body=made.read_bytes())
        return {
            "codeConfiguration": {
                "code": {"s3": {"bucket": s.bucket, "prefix": key}},
                "runtime": f"PYTHON_{s.python.replace('.', '_')}",
                "entryPoint": [s.entry],
            }
        }

    def _role(self) -> str:
        s = self.settings
        if s.role is not None:
            return s.role
        place = self.place()
        trust, policy = iam.text(iam.execution_trust(place)), iam.text(iam.execution(place))
        arn = place.arn("iam", f"role/{s.role_name}", region="")
        found = self._call("iam", "GetRole", RoleName=s.role_name, absent=("NoSuchEntity",))
        if found is None:
            self._say(f"role {s.role_name}: is made")
            self._call(
                "iam",
                "CreateRole",
                RoleName=s.role_name,
                AssumeRolePolicyDocument=trust,
                Description=f"Sessions of the agent {s.name}",
                Tags=[{"Key": k, "Value": v} for k, v in self._tags.items()],
                absent=("EntityAlreadyExists",),
            )
        elif found["Role"]["AssumeRolePolicyDocument"] != json.loads(trust):
            self._call("iam", "UpdateAssumeRolePolicy", RoleName=s.role_name, PolicyDocument=trust)
        now = self._call("iam", "GetRolePolicy", RoleName=s.role_name, PolicyName=POLICY, absent=("NoSuchEntity",))
        if now is None or now["PolicyDocument"] != json.loads(policy):
            self._call("iam", "PutRolePolicy", RoleName=s.role_name, PolicyName=POLICY, PolicyDocument=policy)
        return arn

    def _runtime(self, artifact: dict[str, Any], role: str) -> tuple[str | None, str | None, bool]:
        s = self.settings
        lifecycle = {"idleRuntimeSessionTimeout": s.idle_s, "maxLifetime": s.lifetime_s}
        lifecycle = {k: v for k, v in lifecycle.items() if v is not None}
        wanted: dict[str, Any] = {
            "agentRuntimeArtifact": artifact,
            "roleArn": role,
            "networkConfiguration": {"networkMode": "PUBLIC"},
            "environmentVariables": dict(s.environment),
        }
        if s.subnets:
            config = {"subnets": list(s.subnets), "securityGroups": list(s.security_groups)}
            wanted["networkConfiguration"] = {"networkMode": "VPC", "networkModeConfig": config}
        if lifecycle:
            wanted["lifecycleConfiguration"] = lifecycle
        found = self._find()
        if found is not None and self._settled(found["agentRuntimeArn"]) == "CREATE_FAILED":
            self._say(f"agent {s.name}: what failed to be made is removed")
            self._remove_runtime(found["agentRuntimeId"])
            found = None
        if found is None:
            self._say(f"agent {s.name}: is made")
            made = self._until_role_is_known(
                lambda: self._call(
                    "bedrock-agentcore-control",
                    "CreateAgentRuntime",
                    agentRuntimeName=s.name,
                    tags=self._tags,
                    **wanted,
                )
            )
            return (None, None, True) if made is None else (made["agentRuntimeArn"], made["agentRuntimeVersion"], True)
        arn, runtime = found["agentRuntimeArn"], found["agentRuntimeId"]
        now = self._call("bedrock-agentcore-control", "GetAgentRuntime", agentRuntimeId=runtime)
        if all(_same(now.get(name), value) for name, value in wanted.items()) and now["status"] == "READY":
            self._say(f"agent {s.name}: version {now['agentRuntimeVersion']} is up to date")
            return arn, str(now["agentRuntimeVersion"]), False
        self._say(f"agent {s.name}: is updated")
        made = self._until_role_is_known(
            lambda: self._call("bedrock-agentcore-control", "UpdateAgentRuntime", agentRuntimeId=runtime, **wanted)
        )
        return arn, None if made is None else str(made["agentRuntimeVersion"]), True

    def _until_role_is_known(self, make: Callable[[], Any]) -> Any:
        """A role that was just made is known to AgentCore after some seconds."""
        deadline = time.monotonic() + ROLE_S
        while True:
            try:
                return make()
            except RefusedError as e:
                about_role = "role" in str(e).lower() and e.code in ("ValidationException", "AccessDeniedException")
                if self.settings.role is not None or not about_role or time.monotonic() > deadline:
                    raise
                self._say("the role is not known everywhere yet: waiting")
                time.sleep(5)

    def _find(self) -> dict[str, Any] | None:
        token: str | None = None
        while True:
            page = self._call("bedrock-agentcore-control", "ListAgentRuntimes", maxResults=100, nextToken=token)
            for runtime in page.get("agentRuntimes", []):
                if runtime["agentRuntimeName"] == self.settings.name and runtime.get("status") != "DELETING":
                    return dict(runtime)
            token = page.get("nextToken")
            if token is None:
                return None

    def _settled(self, arn: str) -> str:
        """Wait while something goes on. Gives the status then; raises: ConfigError when it does not end in time."""
        runtime, deadline = arn.rsplit("/", 1)[1], time.monotonic() + READY_S
        while True:
            now = self._call("bedrock-agentcore-control", "GetAgentRuntime", agentRuntimeId=runtime)
            if now["status"] not in ("CREATING", "UPDATING") or self._call.rehearse:
                return str(now["status"])
            if time.monotonic() > deadline:
                raise ConfigError(f"agent {self.settings.name} is still {now['status']} after {READY_S:.0f} s")
            time.sleep(POLL_S)

    def _must_be_ready(self, arn: str) -> None:
        if self._settled(arn) != "READY" and not self._call.rehearse:
            now = self._call("bedrock-agentcore-control", "GetAgentRuntime", agentRuntimeId=arn.rsplit("/", 1)[1])
            raise ConfigError(
                f"agent {self.settings.name}: {now['status']}: {now.get('failureReason', 'no reason given')}"
            )

    def _endpoint(self, arn: str, version: str) -> None:
        name, runtime = self.settings.endpoint, arn.rsplit("/", 1)[1]
        if name is None:
            return
        control = "bedrock-agentcore-control"
        found = self._call(
            control,
            "GetAgentRuntimeEndpoint",
            agentRuntimeId=runtime,
            endpointName=name,
            absent=("ResourceNotFoundException",),
        )
        if found is None:
            self._say(f"endpoint {name}: is made for version {version}")
            self._call(
                control,
                "CreateAgentRuntimeEndpoint",
                agentRuntimeId=runtime,
                name=name,
                agentRuntimeVersion=version,
                tags=self._tags,
            )
        elif str(found.get("targetVersion") or found.get("liveVersion")) != version:
            self._say(f"endpoint {name}: now version {version}")
            self._call(
                control,
                "UpdateAgentRuntimeEndpoint",
                agentRuntimeId=runtime,
                endpointName=name,
                agentRuntimeVersion=version,
            )

    def _smoke(self, arn: str) -> str | None:
        """Run one rollout. Gives its outcome. Raises: ConfigError when its session left no record."""
        s = self.settings
        if s.smoke is None or s.bucket is None or self._call.rehearse:
            return None
        from ..client import Deadlines, RolloutClient

        self._say("one rollout: is run")
        bucket = s.bucket if not s.prefix else f"s3://{s.bucket}/{s.prefix.rstrip('/')}"
        deadlines = Deadlines(run_s=300)
        with RolloutClient(arn, bucket, "agentcore-rl-smoke", deadlines=deadlines) as client:
            future = client.invoke(dict(s.smoke))
            try:
                record = future.result()
            except AgentCoreRLError as e:
                raise ConfigError(f"the rollout left no record: {e}") from e
            if future.outcome is not Outcome.OK:
                reason = str(record.get("stop_reason", "")).partition("\n")[0]
                return f"{future.outcome}: it ran and left a record, and raised: {reason}"
        return "ok"

    # -- down

    def remove(self) -> list[str]:
        """Take away what deployments of this name made. Gives what is left on purpose, one line each."""
        s, control = self.settings, "bedrock-agentcore-control"
        left: list[str] = []
        found = self._find()
        if found is not None:
            runtime, arn = found["agentRuntimeId"], found["agentRuntimeArn"]
            tags = self._call(control, "ListTagsForResource", resourceArn=arn).get("tags", {})
            if tags.get(TAG) != s.name:
                raise ConfigError(
                    f"the agent {s.name} was not made by `agentcore-rl deploy` (it lacks the tag {TAG}); nothing is removed"
                )
            self._remove_runtime(runtime)
        self._remove_role(left)
        self._remove_repository(left)
        if s.bucket is not None:
            self._remove_archives(s.bucket)
            left.append(f"the bucket {s.bucket}, with its records")
        left.append(f"the log groups /aws/bedrock-agentcore/runtimes/{s.name}-*")
        return left

    def _remove_runtime(self, runtime: str) -> None:
        control, name = "bedrock-agentcore-control", self.settings.name
        gone = ("ResourceNotFoundException",)
        endpoints = self._call(
            control, "ListAgentRuntimeEndpoints", agentRuntimeId=runtime, maxResults=100, absent=gone
        )
        for endpoint in (endpoints or {}).get("runtimeEndpoints", []):
            if endpoint["name"] != "DEFAULT":
                self._say(f"endpoint {endpoint['name']}: is removed")
                self._call(
                    control,
                    "DeleteAgentRuntimeEndpoint",
                    agentRuntimeId=runtime,
                    endpointName=endpoint["name"],
                    absent=gone,
                )
        self._say(f"agent {name}: is removed")
        deadline = time.monotonic() + GONE_S
        self._call(control, "DeleteAgentRuntime", agentRuntimeId=runtime, absent=(*gone, "ConflictException"))
        while not self._call.rehearse:
            if self._call(control, "GetAgentRuntime", agentRuntimeId=runtime, absent=gone) is None:
                return
            if time.monotonic() > deadline:
                raise ConfigError(f"agent {name} is still there after {GONE_S:.0f} s")
            time.sleep(POLL_S)
            self._call(control, "DeleteAgentRuntime", agentRuntimeId=runtime, absent=(*gone, "ConflictException"))

    def _remove_role(self, left: list[str]) -> None:
        name, gone = self.settings.role_name, ("NoSuchEntity",)
        role = self._call("iam", "GetRole", RoleName=name, absent=gone)
        if role is None:
            return
        if not any(t["Key"] == TAG and t["Value"] == self.settings.name for t in role["Role"].get("Tags", [])):
            left.append(f"the role {name}, which this command did not make")
            return
        self._say(f"role {name}: is removed")
        if self._call("iam", "GetRolePolicy", RoleName=name, PolicyName=POLICY, absent=gone) is not None:
            self._call("iam", "DeleteRolePolicy", RoleName=name, PolicyName=POLICY, absent=gone)
        self._call("iam", "DeleteRole", RoleName=name, absent=gone)

    def _remove_repository(self, left: list[str]) -> None:
        name, gone = f"agentcore-rl/{self.settings.name.lower()}", ("RepositoryNotFoundException",)
        found = self._call("ecr", "DescribeRepositories", repositoryNames=[name], absent=gone)
        if found is None:
            return
        tags = self._call("ecr", "ListTagsForResource", resourceArn=found["repositories"][0]["repositoryArn"]).get(
            "tags", []
        )
        if not any(t.get("Key") == TAG and t.get("Value") == self.settings.name for t in tags):
            left.append(f"the repository {name}, which this command did not make")
            return
        self._say(f"repository {name}: is removed with its images")
        self._call("ecr", "DeleteRepository", repositoryName=name, force=True, absent=gone)

    def _remove_archives(self, bucket: str) -> None:
        prefix = f"{ARCHIVES}/{self.settings.name}/"
        found = self._call("s3", "ListObjectsV2", Bucket=bucket, Prefix=prefix, absent=("NoSuchBucket",))
        for item in (found or {}).get("Contents", []):
            self._say(f"archive {Path(item['Key']).stem}: is removed")
            self._call("s3", "DeleteObject", Bucket=bucket, Key=item["Key"])


def _password(token: str) -> str:
    import base64

    return base64.b64decode(token).decode().partition(":")[2]


def _same(now: Any, wanted: Any) -> bool:
    """Whether what is there is what is wanted; what the service added of itself does not count."""
    if isinstance(wanted, dict):
        return all(_same((now or {}).get(name), value) for name, value in wanted.items()) and (bool(wanted) or not now)
    if isinstance(wanted, list):
        return sorted(map(json.dumps, now or [])) == sorted(map(json.dumps, wanted))
    return bool(now == wanted)
