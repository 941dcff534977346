"""The agent runtime and its endpoint at the control plane: makes, updates and removes them, each step from the present state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..contract import AS_IS
from ..errors import ConfigError
from .calls import Calls, wait_for
from .resources import Resources
from .settings import TAG, Settings

CONTROL = "bedrock-agentcore-control"
READY_S, GONE_S = 900.0, 600.0
PAUSE_S = 0.5  # between two looks
GONE = ("ResourceNotFoundException",)
# An address of a model in a bundle and in the environment, as `app.model()` reads it.
VARIABLES = {"base_url": "AGENTCORE_RL_MODEL_URL", "model_id": "AGENTCORE_RL_MODEL_ID"}


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """An agent, and whether it was created or changed. In a rehearsal, ``arn`` is None for an agent that does not exist.

    ``smoke``: what became of the rollout that proves it, where one was run.
    """

    arn: str | None
    version: str | None
    changed: bool
    smoke: str | None = None


class AgentRuntime:
    """The agent of ``settings``. Raises (all its methods): ConfigError, RefusedError."""

    def __init__(self, settings: Settings, calls: Calls, say: Callable[[str], None]) -> None:
        self.settings, self._call, self._say = settings, calls, say
        self._control = partial(calls, CONTROL)
        self._resources = Resources(settings.name, calls, say)

    # -- up

    def bring(self, artifact: Mapping[str, Any], role: str) -> Deployed:
        """Make it, or give it a new version where anything differs. It may not be ready yet."""
        s = self.settings
        wanted = self._wanted(artifact, role)
        found = self._find()
        status = None if found is None else self._settled(found["agentRuntimeArn"])
        if found is not None and status in ("CREATE_FAILED", "DELETING"):
            self._say(f"agent {s.name}: {status}, so its remains are removed first")
            if status == "CREATE_FAILED":
                self._must_be_ours(found["agentRuntimeArn"])
            self._remove(found["agentRuntimeId"])
            found = None
        if found is None:
            self._say(f"agent {s.name}: is created")
            new = {"agentRuntimeName": s.name, "tags": s.tags, **wanted}
            made = self._resources.until_role_is_known(
                lambda: self._control("CreateAgentRuntime", **new), own_role=s.role is None
            )
            if made is None:
                return Deployed(arn=None, version=None, changed=True)
            return Deployed(arn=made["agentRuntimeArn"], version=made["agentRuntimeVersion"], changed=True)
        arn, runtime = found["agentRuntimeArn"], found["agentRuntimeId"]
        if s.score_ready:
            self._must_be_ours(arn, "nothing is changed. Deploy the version for rollouts under another --name")
        now = self._control("GetAgentRuntime", agentRuntimeId=runtime)
        if model := self._promoted_model(now):
            self._say(f"agent {s.name}: keeps its model ({', '.join(model)}); `--env` with one of them changes it")
            wanted["environmentVariables"].update(model)
        same = all(_same(now.get(name), value) for name, value in wanted.items())
        if same and now.get("environmentVariables", {}) == wanted["environmentVariables"] and now["status"] == "READY":
            self._say(f"agent {s.name}: version {now['agentRuntimeVersion']} is up to date")
            return Deployed(arn=arn, version=str(now["agentRuntimeVersion"]), changed=False)
        self._say(f"agent {s.name}: is updated")
        # An update replaces every field. Fields that no option of ours sets stay as they are.
        takes = self._call.parameters_of(CONTROL, "UpdateAgentRuntime")
        theirs = {name: value for name, value in now.items() if name in takes - set(wanted) and value}
        theirs["agentRuntimeId"] = runtime
        made = self._resources.until_role_is_known(
            lambda: self._control("UpdateAgentRuntime", **theirs, **wanted), own_role=s.role is None
        )
        return Deployed(arn=arn, version=None if made is None else str(made["agentRuntimeVersion"]), changed=True)

    def _wanted(self, artifact: Mapping[str, Any], role: str) -> dict[str, Any]:
        s = self.settings
        network: dict[str, Any] = {"networkMode": "PUBLIC"}
        if s.subnets:
            config = {"subnets": list(s.subnets), "securityGroups": list(s.security_groups)}
            network = {"networkMode": "VPC", "networkModeConfig": config}
        return {
            "agentRuntimeArtifact": artifact,
            "roleArn": role,
            "networkConfiguration": network,
            "environmentVariables": {
                "AGENTCORE_RL_ROLLOUTS": "on",
                **({AS_IS: "1"} if s.score_ready else {}),
                **s.environment,
            },
        }

    def _promoted_model(self, now: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of the model that the agent calls now, if the settings name none."""
        if not self.settings.environment.keys().isdisjoint(VARIABLES.values()):
            return {}
        return {k: v for k, v in now.get("environmentVariables", {}).items() if k in VARIABLES.values()}

    def must_be_ready(self, arn: str) -> None:
        """Wait. Raises: ConfigError with AgentCore's reason when it cannot be made."""
        if self._settled(arn) != "READY" and not self._call.rehearse:
            now = self._control("GetAgentRuntime", agentRuntimeId=_id(arn))
            reason = now.get("failureReason", "no reason given")
            raise ConfigError(f"agent {self.settings.name}: {now['status']}: {reason}")

    def point_endpoint(self, arn: str, version: str) -> None:
        """Let the endpoint of the settings, if there is one, lead to this version."""
        name = self.settings.endpoint
        if name is None:
            return
        which: dict[str, Any] = {"agentRuntimeId": _id(arn), "endpointName": name}
        to: dict[str, Any] = {"agentRuntimeVersion": version}
        found = self._control("GetAgentRuntimeEndpoint", **which, absent=GONE)
        if found is None:
            self._say(f"endpoint {name}: is created for version {version}")
            tags = self.settings.tags
            self._control("CreateAgentRuntimeEndpoint", agentRuntimeId=_id(arn), name=name, tags=tags, **to)
        elif str(found.get("targetVersion") or found.get("liveVersion")) != version:
            self._say(f"endpoint {name}: now version {version}")
            self._control("UpdateAgentRuntimeEndpoint", **which, **to)

    # -- down

    def remove(self) -> None:
        """Remove it with its endpoints, and wait for the end. Raises: ConfigError if deployments did not create it."""
        found = self._find()
        if found is not None:
            self._must_be_ours(found["agentRuntimeArn"])
            self._remove(found["agentRuntimeId"])

    def _must_be_ours(self, arn: str, then: str = "nothing is removed") -> None:
        name = self.settings.name
        listed = self._control("ListTagsForResource", resourceArn=arn, absent=GONE)
        if listed is not None and listed.get("tags", {}).get(TAG) != name:
            raise ConfigError(
                f"the agent {name} was not made by `agentcore-rl deploy` (it lacks the tag {TAG}); {then}"
            )

    def _remove(self, runtime: str) -> None:
        which: dict[str, Any] = {"agentRuntimeId": runtime}
        found = self._control("ListAgentRuntimeEndpoints", **which, maxResults=100, absent=GONE) or {}
        for name in (endpoint["name"] for endpoint in found.get("runtimeEndpoints", [])):
            if name != "DEFAULT":
                self._say(f"endpoint {name}: is removed")
                self._control("DeleteAgentRuntimeEndpoint", **which, endpointName=name, absent=GONE)
        self._say(f"agent {self.settings.name}: is removed")

        def look() -> bool | None:  # an endpoint that is being deleted refuses the first calls
            self._control("DeleteAgentRuntime", **which, absent=(*GONE, "ConflictException"))
            return self._call.rehearse or self._control("GetAgentRuntime", **which, absent=GONE) is None or None

        wait_for(look, GONE_S, PAUSE_S, f"agent {self.settings.name} is still there")

    # -- what is there

    def _find(self) -> dict[str, Any] | None:
        listed = self._call.every(CONTROL, "ListAgentRuntimes", "agentRuntimes", maxResults=100)
        return next((runtime for runtime in listed if runtime["agentRuntimeName"] == self.settings.name), None)

    def _settled(self, arn: str) -> str:
        """Wait until it is created or updated. Returns its status. Raises: ConfigError when that does not end in time."""

        def look() -> str | None:
            now = self._control("GetAgentRuntime", agentRuntimeId=_id(arn), absent=GONE)
            status = "DELETING" if now is None else str(now["status"])
            return None if status in ("CREATING", "UPDATING") and not self._call.rehearse else status

        return wait_for(look, READY_S, PAUSE_S, f"agent {self.settings.name} still changes")


def _id(arn: str) -> str:
    return arn.rsplit("/", 1)[1]


def _same(now: Any, wanted: Any) -> bool:
    """Return True if the present state has everything that is wanted; additions of the service do not count."""
    if isinstance(wanted, dict):
        return all(_same((now or {}).get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return sorted(map(json.dumps, now or [])) == sorted(map(json.dumps, wanted))
    return bool(now == wanted)
