"""Lets a deployed agent call another model, and lets it call the earlier one again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import ConfigError
from . import iam
from .agent import CONTROL, PAUSE_S, READY_S
from .calls import Calls

VARIABLES = ("AGENTCORE_RL_MODEL_URL", "AGENTCORE_RL_MODEL_ID")
POLICY = "agentcore-rl-model"
NO_ENTITY = ("NoSuchEntity",)


class AgentSwitch:
    """The agent with this ARN, and its endpoint ``endpoint``. `DEFAULT` always leads to the newest version.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, arn: str, endpoint: str, calls: Calls, say: Callable[[str], None]) -> None:
        if ":runtime/" not in arn:
            raise ConfigError(f"{arn} is not the ARN of an agent runtime")
        self._id = arn.rsplit("/", 1)[1]
        self._endpoint, self._call, self._say = endpoint, calls, say
        self._control, self._iam = partial(calls, CONTROL), partial(calls, "iam")

    def use(self, variables: Mapping[str, str], endpoint_arn: str) -> tuple[str, str]:
        """Let the agent call the model that the variables name. Returns the version before, and the new one.

        The agent's role gets the rights to call the model first.
        """
        now = self._control("GetAgentRuntime", agentRuntimeId=self._id)
        self._allow(now["roleArn"].rsplit("/", 1)[1], endpoint_arn)
        before = self._version()
        environment = {k: v for k, v in now.get("environmentVariables", {}).items() if k not in VARIABLES} | dict(
            variables
        )
        if environment == now.get("environmentVariables", {}):
            version = str(now["agentRuntimeVersion"])
            self._say(f"agent {self._id}: version {version} has the model's address")
        else:
            self._say(f"agent {self._id}: gets the model's address")
            version = self._update(now, environment)
        self._point(version)
        return before, version

    def roll_back(self, version: str) -> str:
        """Let the endpoint lead to an earlier version. Returns the version that it leads to.

        For `DEFAULT`, the earlier version is made the newest again.
        """
        if self._endpoint != "DEFAULT":
            self._point(version)
            return version
        earlier = self._control("GetAgentRuntime", agentRuntimeId=self._id, agentRuntimeVersion=version)
        self._say(f"agent {self._id}: version {version} is made the newest again")
        return self._update(earlier, earlier.get("environmentVariables", {}))

    def _update(self, source: Mapping[str, Any], environment: Mapping[str, str]) -> str:
        """Make a version with the settings of ``source`` and this environment, and wait until it is ready."""
        # An update replaces every field, so each one is sent as it is.
        takes = self._call.parameters_of(CONTROL, "UpdateAgentRuntime")
        fields = {name: value for name, value in source.items() if name in takes and value}
        fields |= {"agentRuntimeId": self._id, "environmentVariables": dict(environment)}
        made = self._control("UpdateAgentRuntime", **fields)
        if made is None:  # a rehearsal
            return "the new version"
        deadline = time.monotonic() + READY_S
        while (now := self._control("GetAgentRuntime", agentRuntimeId=self._id))["status"] != "READY":
            if now["status"] not in ("CREATING", "UPDATING") or time.monotonic() > deadline:
                raise ConfigError(f"agent {self._id}: {now['status']}: {now.get('failureReason', 'no reason given')}")
            time.sleep(PAUSE_S)
        return str(made["agentRuntimeVersion"])

    def _version(self) -> str:
        """Return the version to which the endpoint leads."""
        found = self._control("GetAgentRuntimeEndpoint", agentRuntimeId=self._id, endpointName=self._endpoint)
        return str(found.get("targetVersion") or found.get("liveVersion"))

    def _point(self, version: str) -> None:
        if self._endpoint == "DEFAULT":
            return
        self._say(f"endpoint {self._endpoint}: leads to version {version}")
        which: dict[str, Any] = {"agentRuntimeId": self._id, "endpointName": self._endpoint}
        self._control("UpdateAgentRuntimeEndpoint", **which, agentRuntimeVersion=version)

    def _allow(self, role: str, endpoint_arn: str) -> None:
        policy = iam.text(iam.model_user(endpoint_arn))
        now = self._iam("GetRolePolicy", RoleName=role, PolicyName=POLICY, absent=NO_ENTITY)
        if now is None or now["PolicyDocument"] != json.loads(policy):
            self._say(f"role {role}: may call {endpoint_arn}")
            self._iam("PutRolePolicy", RoleName=role, PolicyName=POLICY, PolicyDocument=policy)
