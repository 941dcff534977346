"""An agent runtime and its endpoints at the control plane: reads, updates and removes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import ConfigError
from .calls import Calls, wait_for

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
    """An agent runtime, by its id or ARN. Raises (all its methods): ConfigError, RefusedError."""

    def __init__(self, runtime: str, calls: Calls) -> None:
        self.id, self._call = runtime.rsplit("/", 1)[-1], calls
        self._control = partial(calls, CONTROL, agentRuntimeId=self.id)
        self._settled = partial(calls.settled, changing=("CREATING", "UPDATING"), times_s=(READY_S, PAUSE_S))

    def version(self, number: str | None = None) -> Mapping[str, Any] | None:
        """Return the description of a version, or of the newest one. None: it does not exist."""
        found = self._control("GetAgentRuntime", agentRuntimeVersion=number, absent=GONE)
        return None if found is None else dict(found)

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
