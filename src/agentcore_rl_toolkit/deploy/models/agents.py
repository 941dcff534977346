"""Lets a deployed agent call another model, and lets it call the earlier one again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import ConfigError
from .. import iam
from ..agent import CONTROL, GONE, PAUSE_S, READY_S, VARIABLES
from ..calls import Calls, wait_for
from ..resources import NO_ENTITY, Resources

POLICY = "agentcore-rl-model-"


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

    def allow(self, name: str, rights: iam.Policy) -> None:
        """Give the agent's role these rights, under this name: each model and bundle has its own, so roll-backs keep theirs."""
        role = self._role()
        if Resources("", self._call, self._say).put_role_policy(role, POLICY + name, rights):
            self._say(f"role {role}: gets the rights {POLICY}{name}")

    def use(self, address: Mapping[str, str]) -> tuple[str | None, str]:
        """Let the agent call the model at this address; empty: that of its code.

        Returns the version before, which calls another model (None: there is none), and the new one.
        """
        variables = {VARIABLES[name]: value for name, value in address.items()}
        now = self._current()
        before = self._version()
        if self._variables(now) == variables:
            version = str(now["agentRuntimeVersion"])
            self._say(f"agent {self._id}: version {version} has the model's address")
        else:
            self._say(f"agent {self._id}: gets the model's address" if variables else f"agent {self._id}: loses it")
            others = {k: v for k, v in now.get("environmentVariables", {}).items() if k not in VARIABLES.values()}
            version = self._update(now, {**others, **variables})
        self._point(version)
        return self._earlier(before, variables), version

    def _earlier(self, version: str, variables: Mapping[str, str]) -> str | None:
        """Return this version, or the last one before it, that calls another model. An interrupted run may have switched."""
        for number in range(int(version), 0, -1):
            found = self._control(
                "GetAgentRuntime", agentRuntimeId=self._id, agentRuntimeVersion=str(number), absent=GONE
            )
            if found is not None and self._variables(found) != variables:
                return str(number)
        return None

    def roll_back(self, version: str) -> str:
        """Let the endpoint lead to an earlier version. Returns the version that it leads to.

        For `DEFAULT`, the earlier version becomes the newest again.
        """
        if self._endpoint != "DEFAULT":
            self._point(version)
            return version
        self._ready()
        earlier = self._control("GetAgentRuntime", agentRuntimeId=self._id, agentRuntimeVersion=version)
        self._say(f"agent {self._id}: version {version} becomes the newest again")
        return self._update(earlier, earlier.get("environmentVariables", {}))

    def remove(self, name: str, addresses: Collection[str] = ()) -> None:
        """Take a model from the agent: its endpoint loses these addresses, and its role the rights of this name.

        Raises: ConfigError if another endpoint of the agent still leads to the model.
        """
        if self._uses(self._current(), addresses):
            self.use({})
        for endpoint in self._call.every(
            CONTROL, "ListAgentRuntimeEndpoints", "runtimeEndpoints", agentRuntimeId=self._id
        ):
            for version in {endpoint.get("liveVersion"), endpoint.get("targetVersion")} - {None}:
                if self._uses(self._at(str(version)), addresses):
                    raise ConfigError(
                        f"the endpoint {endpoint['name']} of the agent {self._id} leads to version {version}, which calls the "
                        f"model: repeat the command with --endpoint {endpoint['name']} first"
                    )
        role = self._role()
        listed = self._iam("ListRolePolicies", RoleName=role, absent=NO_ENTITY) or {}
        if POLICY + name in listed.get("PolicyNames", []):
            self._say(f"role {role}: loses the rights {POLICY}{name}")
            self._iam("DeleteRolePolicy", RoleName=role, PolicyName=POLICY + name, absent=NO_ENTITY)

    def _uses(self, version: Mapping[str, Any], addresses: Collection[str]) -> bool:
        return not set(addresses).isdisjoint(self._variables(version).values())

    def _variables(self, version: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of a version that name a model."""
        return {k: v for k, v in version.get("environmentVariables", {}).items() if k in VARIABLES.values()}

    def _role(self) -> str:
        return str(self._control("GetAgentRuntime", agentRuntimeId=self._id)["roleArn"]).rsplit("/", 1)[1]

    def _update(self, source: Mapping[str, Any], environment: Mapping[str, str]) -> str:
        """Make a version with the settings of ``source`` and this environment, and wait until it is ready."""
        # An update replaces every field, so each one is sent as it is.
        takes = self._call.parameters_of(CONTROL, "UpdateAgentRuntime")
        fields = {name: value for name, value in source.items() if name in takes and value}
        fields |= {"agentRuntimeId": self._id, "environmentVariables": dict(environment)}
        made = self._control("UpdateAgentRuntime", **fields)
        if made is None:  # a rehearsal
            return "the new version"
        self._ready()
        return str(made["agentRuntimeVersion"])

    def _ready(self) -> Mapping[str, Any]:
        """Wait until the agent is ready. Returns its newest version."""

        def look() -> Mapping[str, Any] | None:
            now: Mapping[str, Any] = self._control("GetAgentRuntime", agentRuntimeId=self._id)
            if now["status"] not in ("CREATING", "UPDATING", "READY"):
                raise ConfigError(f"agent {self._id}: {now['status']}: {now.get('failureReason', 'no reason given')}")
            return now if now["status"] == "READY" else None

        return wait_for(look, READY_S, PAUSE_S, f"agent {self._id} is not ready")

    def _at(self, version: str) -> Mapping[str, Any]:
        found: Mapping[str, Any]
        found = self._control("GetAgentRuntime", agentRuntimeId=self._id, agentRuntimeVersion=version)
        return found

    def _current(self) -> Mapping[str, Any]:
        """Wait until the agent is ready. Returns the version to which the endpoint leads."""
        newest = self._ready()
        return newest if self._endpoint == "DEFAULT" else self._at(self._version())

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


@dataclass(frozen=True, kw_only=True)
class BundleVersion:
    """A version of a configuration bundle. ``before`` is the version that it follows. None: it is the first one."""

    arn: str
    version: str
    before: str | None

    @property
    def baggage(self) -> str:
        """The header `baggage` of a call that uses it."""
        return f"aws.agentcore.configbundle_arn={self.arn},aws.agentcore.configbundle_version={self.version}"

    @property
    def rights(self) -> iam.Policy:
        """Return the statements that an agent's role needs to read it."""
        return iam.bundle_user(self.arn)


class ConfigurationBundle:
    """The configuration bundle with this name. Calls that name a version of it let an agent read its model from there.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, name: str, calls: Calls, say: Callable[[str], None]) -> None:
        self.name, self._call, self._say = name, calls, say
        self._control, self._tag = partial(calls, CONTROL), Resources(f"bundle-{name}", calls, say).tag

    @property
    def policy(self) -> str:
        """The name of the rights to read it."""
        return f"bundle-{self.name}"

    def put(self, agent: str, address: Mapping[str, str]) -> BundleVersion:
        """Make a version in which the agent with this ARN calls the model at the address. Other entries stay."""
        found = self._find()
        now = None if found is None else self._control("GetConfigurationBundle", bundleId=found["bundleId"])
        components = {} if now is None else dict(now["components"])
        entries = components.get(agent, {}).get("configuration", {})
        wanted = {name: value for name, value in entries.items() if name not in (*VARIABLES, "api_key")} | dict(address)
        if now is not None and entries == wanted:
            self._say(f"bundle {self.name}: version {now['versionId']} is up to date")
            parents = now.get("lineageMetadata", {}).get("parentVersionIds", [])
            return BundleVersion(arn=now["bundleArn"], version=now["versionId"], before=next(iter(parents), None))
        new: dict[str, Any] = {"components": {**components, agent: {"configuration": wanted}}}
        new["commitMessage"] = f"Model: {next(iter(address.values()))}"
        if now is None:
            self._say(f"bundle {self.name}: is created")
            tags = {self._tag["Key"]: self._tag["Value"]}
            made = self._control("CreateConfigurationBundle", bundleName=self.name, tags=tags, **new)
        else:
            self._say(f"bundle {self.name}: gets a new version")
            parent = {"bundleId": now["bundleId"], "parentVersionIds": [now["versionId"]]}
            made = self._control("UpdateConfigurationBundle", **parent, **new)
        made = made or {"bundleArn": "the-bundle", "versionId": "the-new-version"}  # values of a rehearsal
        before = None if now is None else now["versionId"]
        return BundleVersion(arn=made["bundleArn"], version=made["versionId"], before=before)

    def remove(self, agent: str, addresses: Collection[str]) -> bool:
        """Take these addresses from the agent's entry, and remove a bundle of this command that has no other entries.

        Returns False if the entry has another model's address.
        """
        found = self._find()
        if found is None:
            return True
        now = self._control("GetConfigurationBundle", bundleId=found["bundleId"])
        entries = now["components"].get(agent, {}).get("configuration", {})
        rest = {name: value for name, value in entries.items() if name not in VARIABLES or value not in addresses}
        components = {**now["components"], agent: {"configuration": rest}}
        tags = (self._control("ListTagsForResource", resourceArn=found["bundleArn"]) or {}).get("tags", {})
        ours = tags.get(self._tag["Key"]) == self._tag["Value"]
        if ours and not any(entry.get("configuration") for entry in components.values()):
            self._say(f"bundle {self.name}: is removed")
            self._control("DeleteConfigurationBundle", bundleId=found["bundleId"], absent=GONE)
        elif rest != entries:
            self._say(f"bundle {self.name}: loses the model's address")
            parent = {"bundleId": now["bundleId"], "parentVersionIds": [now["versionId"]]}
            message = "The model is removed"
            self._control("UpdateConfigurationBundle", **parent, components=components, commitMessage=message)
        return set(rest).isdisjoint(VARIABLES)

    def _find(self) -> Mapping[str, Any] | None:
        listed = self._call.every(CONTROL, "ListConfigurationBundles", "bundles")
        return next((bundle for bundle in listed if bundle["bundleName"] == self.name), None)
