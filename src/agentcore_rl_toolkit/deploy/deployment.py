"""Deploys an agent, step by step. Every step checks the present state first, so that an interrupted deployment continues.

Nothing is stored on this machine: the parts of a deployment carry its tag on AWS, and only tagged parts are ever removed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import operator
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .._installation import wheel_digest
from ..contract import AS_IS, Outcome
from ..errors import AgentCoreRLError, ConfigError
from . import iam
from .agent import CONTROL, GONE, VARIABLES, Agent, Deployed, model_variables
from .artifact import (
    ImageBuilder,
    digest_of,
    files_of,
    image_digest,
    make_archive,
    put_wheel_beside,
    requirements_of,
    stage,
    start_file,
    tracing_of,
)
from .calls import Calls
from .resources import Resources
from .score_ready import READY_FILE, STARTER, derive, derived_tag
from .settings import TAG, Settings

NO_REPOSITORY = ("RepositoryNotFoundException",)


class Deployment:
    """Deploys what ``settings`` say through ``calls``. Raises (all its methods): ConfigError, RefusedError."""

    def __init__(self, settings: Settings, calls: Calls) -> None:
        self.settings, self._call, self._say = settings, calls, calls.say
        self._resources = Resources(settings.name, calls)
        self._s3, self._ecr, self._control = partial(calls, "s3"), partial(calls, "ecr"), partial(calls, CONTROL)

    # -- up

    def up(self) -> Deployed:
        """Make, or bring up to date, everything the settings name."""
        s = self.settings
        s.check()
        if (arn := self._find()) is not None:
            self._must_be_ours(arn, "nothing is changed. Choose another --name")
            now = Agent(arn, self._call).version() or {}
            if s.score_ready and AS_IS not in now.get("environmentVariables", {}):
                raise ConfigError(f"the agent {s.name} serves production calls; --score-ready needs another --name")
        if s.bucket is not None:
            self._resources.bucket(s.bucket)
        role = self._role()  # may be refused, so the image comes after it
        done = self._bring(arn, self._wanted(self._artifact(), role))
        if done.arn is None or done.version is None:  # a rehearsal
            then = f", and point endpoint {s.endpoint} at it" if s.endpoint else ""
            self._say(f"would wait until the version is ready{then}")
        else:
            agent = Agent(done.arn, self._call)
            agent.ready()
            if s.endpoint is not None:
                self._point(agent, s.endpoint, done.version)
        return replace(done, smoke=self._smoke(done.arn))

    def place(self) -> iam.Place:
        """Return the names of this deployment in its policies."""
        s = self.settings
        repository = s.repository
        if repository is None and s.image is not None and ".dkr.ecr." in s.image:
            repository = s.image.split("/", 1)[1].split("@")[0].split(":")[0]
        return iam.Place(
            account=self._call.account,
            region=str(self._call.region),
            partition=self._call.partition,
            name=s.name,
            repository=repository,
            bucket=s.bucket,
            prefix=s.prefix,
            jobs=any(name.startswith("AGENTCORE_RL_SAGEMAKER_") for name in s.environment),
        )

    def _artifact(self) -> dict[str, Any]:
        s = self.settings
        if s.image is not None and not s.score_ready:
            return {"containerConfiguration": {"containerUri": s.image}}
        return self._archive() if s.code else self._image()

    def _image(self) -> dict[str, Any]:
        s = self.settings
        assert s.repository is not None
        if self._ecr("DescribeRepositories", repositoryNames=[s.repository], absent=NO_REPOSITORY) is None:
            self._call.step(f"repository {s.repository}", "created")
            self._ecr("CreateRepository", repositoryName=s.repository, tags=[self._resources.tag])
        china = ".cn" if self._call.partition == "aws-cn" else ""
        registry = f"{self._call.account}.dkr.ecr.{self._call.region}.amazonaws.com{china}"
        uri = f"{registry}/{s.repository}"
        with self._staged(python=s.python) if s.image is None else contextlib.nullcontext() as staged:
            base = str(s.image) if staged is None else f"{uri}:{image_digest(staged, s.platform)}"
            tag = derived_tag(base) if s.score_ready else base.rpartition(":")[2]
            image = f"{uri}:{tag}"
            which: dict[str, Any] = {"repositoryName": s.repository, "imageIds": [{"imageTag": tag}]}
            if self._ecr("DescribeImages", **which, absent=("ImageNotFoundException", *NO_REPOSITORY)):
                moves = staged is None and "@" not in base
                then = f", of {base} as it was then. Give another tag for a newer image" if moves else ""
                self._say(f"image {tag}: exists{then}")
            elif self._call.rehearse:
                self._say(f"would build {s.folder if staged else base} for {s.platform} and push {image}")
                ImageBuilder.find()  # without one, the real run would end here
            else:
                engine = ImageBuilder.find()
                self._say(f"image {tag}: is built for {s.platform}")
                if staged is not None:
                    put_wheel_beside(staged)
                    engine.build(staged, uri=base, target=s.platform)
                if s.score_ready:
                    derive(engine, base, uri=image, target=s.platform)
                token = self._ecr("GetAuthorizationToken")["authorizationData"][0]["authorizationToken"]
                self._say(f"image {tag}: is pushed")
                engine.push(image, password=base64.b64decode(token).decode().partition(":")[2])
        return {"containerConfiguration": {"containerUri": image}}

    @contextlib.contextmanager
    def _staged(self, *, python: str | None) -> Iterator[Path]:
        """Yield a copy of the agent's files as they are packed. A rehearsal lists them."""
        s = self.settings
        assert s.folder is not None
        with tempfile.TemporaryDirectory() as work:
            what: dict[str, Any] = {"excluded": s.excluded, "module": s.module, "import_paths": s.import_paths}
            staged = stage(s.folder, Path(work) / "agent", entry=s.entry, python=python, **what)
            if self._call.rehearse:
                for path in files_of(staged):
                    self._say(f"would pack {path.relative_to(staged)}")
            yield staged

    def _archive(self) -> dict[str, Any]:
        s = self.settings
        assert s.folder is not None
        assert s.bucket is not None
        with self._staged(python=None) as staged:
            if s.score_ready:
                (staged / READY_FILE).write_text(start_file(STARTER, arguments=[s.entry]))
            tracing = tracing_of(requirements_of(staged))  # without packages the real run would end here
            key = f"{iam.ARCHIVES}/{s.name}/{digest_of(staged, s.platform, s.python, wheel_digest())}.zip"
            if self._resources.has_object(s.bucket, key):
                self._say(f"archive {Path(key).stem}: exists")
            elif self._call.rehearse:
                self._say(f"would make an archive of {s.folder} for {s.platform} and put it to s3://{s.bucket}/{key}")
            else:
                self._say(f"archive {Path(key).stem}: is created for {s.platform}, Python {s.python}")
                with tempfile.TemporaryDirectory() as work:
                    made = make_archive(staged, target=s.platform, python=s.python, into=Path(work))
                    self._s3("PutObject", Bucket=s.bucket, Key=key, Body=made.read_bytes())
        return {
            "codeConfiguration": {
                "code": {"s3": {"bucket": s.bucket, "prefix": key}},
                "runtime": f"PYTHON_{s.python.replace('.', '_')}",
                "entryPoint": [*tracing, READY_FILE if s.score_ready else s.entry],
            }
        }

    def _role(self) -> str:
        s = self.settings
        if s.role is not None:
            return s.role
        place = self.place()
        trust, rights = iam.execution_trust(place), iam.execution(place)
        return self._resources.role(s.role_name, f"Sessions of the agent {s.name}", trust, rights)

    def _wanted(self, artifact: Mapping[str, Any], role: str) -> dict[str, Any]:
        s = self.settings
        network: dict[str, Any] = {"networkMode": "PUBLIC"}
        if s.subnets:
            config = {"subnets": list(s.subnets), "securityGroups": list(s.security_groups)}
            network = {"networkMode": "VPC", "networkModeConfig": config}
        as_is = {AS_IS: "1"} if s.score_ready else {}
        return {
            "agentRuntimeArtifact": artifact,
            "roleArn": role,
            "networkConfiguration": network,
            "environmentVariables": {"AGENTCORE_RL_ROLLOUTS": "on", **as_is, **s.environment},
        }

    def _bring(self, arn: str | None, wanted: dict[str, Any]) -> Deployed:
        """Make the agent, or give it a new version where anything differs. It may not be ready yet."""
        s = self.settings
        # A role of the user's is not new: what AWS says of it is final.
        until_role_is_known = self._resources.until_role_is_known if s.role is None else operator.call
        now = None if arn is None else Agent(arn, self._call).settled()
        if arn is not None and now is not None and now["status"] == "CREATE_FAILED":
            self._call.step(f"the rest of agent {s.name}", "removed")
            Agent(arn, self._call).remove()
            now = None
        if arn is None or now is None:
            self._call.step(f"agent {s.name}", "created")
            new = {"agentRuntimeName": s.name, "tags": s.tags, **wanted}
            made = until_role_is_known(lambda: self._control("CreateAgentRuntime", **new)) or {}
            return Deployed(arn=made.get("agentRuntimeArn"), version=made.get("agentRuntimeVersion"), changed=True)
        if (model := model_variables(now)) and s.environment.keys().isdisjoint(VARIABLES.values()):
            self._say(f"agent {s.name}: keeps its model ({', '.join(model)}); `--env` with one of them changes it")
            wanted["environmentVariables"].update(model)
        same = all(_same(now.get(name), value) for name, value in wanted.items())
        if same and now.get("environmentVariables", {}) == wanted["environmentVariables"] and now["status"] == "READY":
            self._say(f"agent {s.name}: version {now['agentRuntimeVersion']} is up to date")
            return Deployed(arn=arn, version=str(now["agentRuntimeVersion"]), changed=False)
        self._call.step(f"agent {s.name}", "updated")
        version = until_role_is_known(lambda: Agent(arn, self._call).update(now, **wanted))
        return Deployed(arn=arn, version=version, changed=True)

    def _point(self, agent: Agent, endpoint: str, version: str) -> None:
        """Let the endpoint lead to a version. Create it if it is absent."""
        before = agent.version_at(endpoint)
        if before is None:
            self._call.step(f"endpoint {endpoint}", f"created for version {version}")
            new: dict[str, Any] = {"name": endpoint, "agentRuntimeVersion": version, "tags": self.settings.tags}
            self._control("CreateAgentRuntimeEndpoint", agentRuntimeId=agent.id, **new)
        elif before != version:
            agent.point(endpoint, version)

    def _find(self) -> str | None:
        listed = self._call.every(CONTROL, "ListAgentRuntimes", "agentRuntimes", maxResults=100)
        return next((a["agentRuntimeArn"] for a in listed if a["agentRuntimeName"] == self.settings.name), None)

    def _must_be_ours(self, arn: str, then: str) -> None:
        name = self.settings.name
        listed = self._control("ListTagsForResource", resourceArn=arn, absent=GONE)
        if listed is not None and listed.get("tags", {}).get(TAG) != name:
            raise ConfigError(
                f"the agent {name} was not made by `agentcore-rl deploy` (it lacks the tag {TAG}); {then}"
            )

    def _smoke(self, arn: str | None) -> str | None:
        """Run one rollout. Gives its outcome. Raises: ConfigError when its session left no record."""
        s = self.settings
        if s.smoke is None or s.store is None:
            return None
        if self._call.rehearse:
            self._say(f"would run one rollout of {json.dumps(dict(s.smoke))}; its record goes to {s.store}")
            return None
        assert arn is not None
        from ..client import Deadlines, RolloutClient

        self._say("one rollout: is run")
        deadlines = Deadlines(run_s=300)
        with RolloutClient(arn, s.store, "agentcore-rl-smoke", deadlines=deadlines) as client:
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
        s = self.settings
        left: list[str] = []
        if (arn := self._find()) is not None:
            self._must_be_ours(arn, "nothing is removed")
            self._call.step(f"agent {s.name}", "removed")
            Agent(arn, self._call).remove()
        if not self._resources.remove_role(s.role_name):
            left.append(f"the role {s.role_name}, which this command did not make in {self._call.region}")
        self._remove_repository(left)
        if s.bucket is not None:
            self._resources.remove_objects(s.bucket, f"{iam.ARCHIVES}/{s.name}/")
            left.append(f"the bucket {s.bucket}, with its records")
        else:
            left.append("the bucket of the records; archives of --code in it, too: --bucket NAME removes them")
        left.append("images that were built on this machine, in the storage of Docker or Podman")
        left.append(f"the log groups /aws/bedrock-agentcore/runtimes/{s.name}-*")
        return left

    def _remove_repository(self, left: list[str]) -> None:
        name = f"agentcore-rl/{self.settings.name.lower()}"
        found = self._ecr("DescribeRepositories", repositoryNames=[name], absent=NO_REPOSITORY)
        if found is None:
            return
        arn = found["repositories"][0]["repositoryArn"]
        if self._resources.tag not in self._ecr("ListTagsForResource", resourceArn=arn).get("tags", []):
            left.append(f"the repository {name}, which this command did not make")
            return
        self._call.step(f"repository {name}", "removed with its images")
        self._ecr("DeleteRepository", repositoryName=name, force=True, absent=NO_REPOSITORY)


def _same(now: Any, wanted: Any) -> bool:
    """Return True if the present state has everything that is wanted; additions of the service do not count."""
    if isinstance(wanted, dict):
        return all(_same((now or {}).get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return sorted(map(json.dumps, now or [])) == sorted(map(json.dumps, wanted))
    return bool(now == wanted)
