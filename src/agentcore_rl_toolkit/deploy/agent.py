"""The agent runtime and its endpoints at the control plane: makes, updates and removes them, each step from the present state."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def model_variables(version: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of an agent's version that name its model."""
    return {k: v for k, v in version.get("environmentVariables", {}).items() if k in VARIABLES.values()}


class Agent:
    """An agent runtime, by its id. Raises (all its methods): ConfigError, RefusedError."""

    def __init__(self, runtime_id: str, calls: Calls) -> None:
        self.id, self._call = runtime_id, calls
        self._control = partial(calls, CONTROL, agentRuntimeId=runtime_id)
        self._settled = partial(calls.settled, changing=("CREATING", "UPDATING"), times_s=(READY_S, PAUSE_S))

    def version(self, number: str | None = None) -> Mapping[str, Any] | None:
        """Return the description of a version, or of the newest one. None: it does not exist."""
        found: Mapping[str, Any] | None
        found = self._control("GetAgentRuntime", agentRuntimeVersion=number, absent=GONE)
        return found

    def settled(self) -> Mapping[str, Any] | None:
        """Wait while it is created or updated. Returns the newest version, or None if it does not exist."""
        return self._settled(self.version, f"agent {self.id}")

    def ready(self) -> Mapping[str, Any]:
        """Wait until it is ready. Returns the newest version. Raises: ConfigError with AgentCore's reason if it failed."""
        now = self.settled()
        if now is None or (now["status"] != "READY" and not self._call.rehearse):
            found = {"status": "does not exist"} if now is None else now
            raise ConfigError(f"agent {self.id}: {found['status']}: {found.get('failureReason', 'no reason given')}")
        return now

    def settings(self, version: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a version that an update takes. An update replaces every field, so each one is sent as it is."""
        takes = self._call.parameters_of(CONTROL, "UpdateAgentRuntime") - {"agentRuntimeId"}
        return {name: value for name, value in version.items() if name in takes and value}

    def update(self, now: Mapping[str, Any], **changes: Any) -> str | None:
        """Make a version like ``now`` with these changes. Returns its number, or None in a rehearsal."""
        made = self._control("UpdateAgentRuntime", **{**self.settings(now), **changes})
        return None if made is None else str(made["agentRuntimeVersion"])

    def endpoints(self) -> list[Mapping[str, Any]]:
        """Return the descriptions of its endpoints."""
        which: dict[str, Any] = {"agentRuntimeId": self.id, "absent": GONE}
        return list(self._call.every(CONTROL, "ListAgentRuntimeEndpoints", "runtimeEndpoints", **which))

    def version_at(self, endpoint: str) -> str | None:
        """Return the version to which an endpoint leads. None: there is no such endpoint."""
        found = self._control("GetAgentRuntimeEndpoint", endpointName=endpoint, absent=GONE)
        return None if found is None else str(found.get("targetVersion") or found["liveVersion"])

    def point(self, endpoint: str, version: str) -> None:
        """Let an endpoint lead to a version, and wait until it does."""
        self._call.step(f"endpoint {endpoint}", f"pointed at version {version}")
        self._control("UpdateAgentRuntimeEndpoint", endpointName=endpoint, agentRuntimeVersion=version)
        find = partial(self._control, "GetAgentRuntimeEndpoint", endpointName=endpoint, absent=GONE)
        now = self._settled(find, f"endpoint {endpoint}") or {}
        if now.get("status") != "READY" and not self._call.rehearse:
            raise ConfigError(f"endpoint {endpoint}: {now.get('failureReason', 'it was deleted')}")

    def remove(self) -> None:
        """Remove it with its endpoints, and wait for the end."""
        for endpoint in self.endpoints():
            if endpoint["name"] != "DEFAULT":
                self._call.step(f"endpoint {endpoint['name']}", "removed")
                self._control("DeleteAgentRuntimeEndpoint", endpointName=endpoint["name"], absent=GONE)

        def look() -> bool | None:  # an endpoint that is being deleted refuses the first calls
            self._control("DeleteAgentRuntime", absent=(*GONE, "ConflictException"))
            return self._call.rehearse or self.version() is None or None

        wait_for(look, GONE_S, PAUSE_S, f"agent {self.id} is still there")


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

    def __init__(self, settings: Settings, calls: Calls) -> None:
        self.settings, self._call = settings, calls
        self._control = partial(calls, CONTROL)
        self._until_role_is_known = partial(
            Resources(settings.name, calls).until_role_is_known, own_role=settings.role is None
        )

    # -- up

    def bring(self, artifact: Mapping[str, Any], role: str) -> Deployed:
        """Make it, or give it a new version where anything differs. It may not be ready yet."""
        s = self.settings
        wanted = self._wanted(artifact, role)
        arn = self._find()
        now = None if arn is None else self._agent(arn).settled()
        if arn is not None and (now is None or now["status"] in ("CREATE_FAILED", "DELETING")):
            self._call.step(f"the rest of agent {s.name}", "removed")
            if now is not None and now["status"] == "CREATE_FAILED":
                self._must_be_ours(arn)
            self._agent(arn).remove()
            arn = None
        if arn is None or now is None:
            self._call.step(f"agent {s.name}", "created")
            new = {"agentRuntimeName": s.name, "tags": s.tags, **wanted}
            made = self._until_role_is_known(lambda: self._control("CreateAgentRuntime", **new)) or {}
            return Deployed(arn=made.get("agentRuntimeArn"), version=made.get("agentRuntimeVersion"), changed=True)
        self._must_be_ours(arn, "nothing is changed. Choose another --name")
        if (model := model_variables(now)) and s.environment.keys().isdisjoint(VARIABLES.values()):
            self._call.say(f"agent {s.name}: keeps its model ({', '.join(model)}); `--env` with one of them changes it")
            wanted["environmentVariables"].update(model)
        same = all(_same(now.get(name), value) for name, value in wanted.items())
        if same and now.get("environmentVariables", {}) == wanted["environmentVariables"] and now["status"] == "READY":
            self._call.say(f"agent {s.name}: version {now['agentRuntimeVersion']} is up to date")
            return Deployed(arn=arn, version=str(now["agentRuntimeVersion"]), changed=False)
        self._call.step(f"agent {s.name}", "updated")
        version = self._until_role_is_known(lambda: self._agent(arn).update(now, **wanted))
        return Deployed(arn=arn, version=version, changed=True)

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

    def serve(self, arn: str, version: str) -> None:
        """Wait until it is ready, and let the endpoint of the settings, if there is one, lead to this version."""
        agent, name = self._agent(arn), self.settings.endpoint
        agent.ready()
        if name is None:
            return
        before = agent.version_at(name)
        if before is None:
            self._call.step(f"endpoint {name}", f"created for version {version}")
            new: dict[str, Any] = {"name": name, "agentRuntimeVersion": version, "tags": self.settings.tags}
            self._control("CreateAgentRuntimeEndpoint", agentRuntimeId=agent.id, **new)
        elif before != version:
            agent.point(name, version)

    # -- down

    def remove(self) -> None:
        """Remove it with its endpoints, and wait for the end. Raises: ConfigError if deployments did not create it."""
        arn = self._find()
        if arn is not None:
            self._must_be_ours(arn)
            self._call.step(f"agent {self.settings.name}", "removed")
            self._agent(arn).remove()

    def _must_be_ours(self, arn: str, then: str = "nothing is removed") -> None:
        name = self.settings.name
        listed = self._control("ListTagsForResource", resourceArn=arn, absent=GONE)
        if listed is not None and listed.get("tags", {}).get(TAG) != name:
            raise ConfigError(
                f"the agent {name} was not made by `agentcore-rl deploy` (it lacks the tag {TAG}); {then}"
            )

    # -- what is there

    def _find(self) -> str | None:
        """Return the ARN of the agent with the name of the settings."""
        listed = self._call.every(CONTROL, "ListAgentRuntimes", "agentRuntimes", maxResults=100)
        return next((a["agentRuntimeArn"] for a in listed if a["agentRuntimeName"] == self.settings.name), None)

    def _agent(self, arn: str) -> Agent:
        return Agent(arn.rsplit("/", 1)[1], self._call)


def _same(now: Any, wanted: Any) -> bool:
    """Return True if the present state has everything that is wanted; additions of the service do not count."""
    if isinstance(wanted, dict):
        return all(_same((now or {}).get(name), value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return sorted(map(json.dumps, now or [])) == sorted(map(json.dumps, wanted))
    return bool(now == wanted)
