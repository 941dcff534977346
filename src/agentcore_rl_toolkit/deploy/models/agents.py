"""Lets a deployed agent call another model, by its environment or by a configuration bundle, and the earlier one again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from ...errors import ConfigError
from .. import iam
from ..agent import CONTROL, GONE, VARIABLES, Agent, model_variables
from ..calls import Calls
from ..resources import NO_ENTITY, Resources

POLICY = "agentcore-rl-model-"
_ARN = re.compile(r"arn:[^:]+:bedrock-agentcore:([^:]+):\d+:runtime/([^/]+)")
_PROMOTED = re.compile(r"/endpoints/agentcore-rl-|:imported-model/")  # parts of the addresses of promoted models
Version = Mapping[str, Any]


class AgentSwitch:
    """The agent with this ARN, and its endpoint ``endpoint``. `DEFAULT` always uses the newest version.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, arn: str, endpoint: str, calls: Calls) -> None:
        found = _ARN.fullmatch(arn)
        if found is None:
            raise ConfigError(f"{arn} is not the ARN of an agent runtime")
        if found[1] != calls.region:
            raise ConfigError(f"the agent is in the region {found[1]}, and the model in {calls.region}: use --region")
        self._agent, self._endpoint, self._call = Agent(found[2], calls), endpoint, calls

    def allow(self, name: str, rights: iam.Policy) -> None:
        """Give the agent's role these rights, under this name: each model and bundle has its own, so roll-backs keep theirs."""
        role = self._role()
        if Resources("", self._call).put_role_policy(role, POLICY + name, rights):
            self._call.step(f"role {role}", f"given the rights {POLICY}{name}")

    def forbid(self, name: str) -> None:
        """Take the rights of this name from the agent's role."""
        if self._agent.version() is None:
            return
        which: dict[str, Any] = {"RoleName": self._role(), "PolicyName": POLICY + name}
        if self._call("iam", "GetRolePolicy", **which, absent=NO_ENTITY) is not None:
            self._call.step(f"the rights {POLICY}{name} of the role {which['RoleName']}", "removed")
            self._call("iam", "DeleteRolePolicy", **which)

    def use(self, address: Mapping[str, str]) -> tuple[str | None, str]:
        """Let the agent call the model at this address.

        Returns the version before, which is the same but for its model (None: there is none), and the new one.
        """
        now, variables = self._current(), {VARIABLES[name]: value for name, value in address.items()}
        same = self._without_model(now)
        before = self._last(now, lambda v: model_variables(v) != variables and self._without_model(v) == same)
        return None if before is None else str(before["agentRuntimeVersion"]), self._change(now, variables)

    def leave(self, addresses: Collection[str]) -> None:
        """Let the agent call the model that it called before `promote`.

        Raises: ConfigError if another endpoint of the agent still uses one of these addresses.
        """
        if self._agent.version() is None:
            self._call.say(f"agent {self._agent.id}: does not exist")
            return
        now, changed = self._current(), {self._endpoint}
        if _uses(now, addresses):
            before = self._last(now, lambda v: not _PROMOTED.search(" ".join(model_variables(v).values())))
            self._change(now, model_variables(before or {}))
            changed.add("DEFAULT")  # has the newest version
        for name in {endpoint["name"] for endpoint in self._agent.endpoints()} - changed:
            version = self._agent.version_at(name)
            if _uses(self._agent.version(version) or {}, addresses):
                raise ConfigError(
                    f"the endpoint {name} of the agent {self._agent.id} uses version {version}, which calls the model: repeat "
                    f"the command with --endpoint {name} first"
                )

    def roll_back(self, version: str) -> str:
        """Let the endpoint use an earlier version. Returns the version that it uses.

        For `DEFAULT`, the earlier version becomes the newest again.
        """
        self._agent.ready()
        earlier = self._agent.version(version)
        if earlier is None:
            raise ConfigError(f"agent {self._agent.id} has no version {version}")
        if self._endpoint == "DEFAULT":
            return self._update(earlier, model_variables(earlier))
        self._agent.point(self._endpoint, version)
        return version

    def _current(self) -> Version:
        """Wait until the agent is ready. Returns the version that the endpoint uses."""
        newest = self._agent.ready()
        if self._endpoint == "DEFAULT":
            return newest
        if (version := self._agent.version_at(self._endpoint)) is None:
            raise ConfigError(f"agent {self._agent.id} has no endpoint {self._endpoint}")
        return self._agent.version(version) or newest

    def _last(self, now: Version, fits: Callable[[Version], bool]) -> Version | None:
        """Return the last version, up to ``now``, that fits."""
        versions = (self._agent.version(str(number)) for number in range(int(now["agentRuntimeVersion"]), 0, -1))
        return next((each for each in versions if each is not None and fits(each)), None)

    def _without_model(self, version: Version) -> dict[str, Any]:
        """Return the settings of a version but for its model."""
        others = {k: v for k, v in version.get("environmentVariables", {}).items() if k not in VARIABLES.values()}
        return {**self._agent.settings(version), "environmentVariables": others}

    def _change(self, now: Version, variables: Mapping[str, str]) -> str:
        """Bring the endpoint to a version with these variables of a model. Returns its number."""
        version = str(now["agentRuntimeVersion"])
        if model_variables(now) == variables:
            self._call.say(f"agent {self._agent.id}: version {version} has the model's address")
        else:
            version = self._update(now, variables)
        if self._endpoint != "DEFAULT":
            self._agent.point(self._endpoint, version)
        return version

    def _update(self, source: Version, variables: Mapping[str, str]) -> str:
        """Make a version like ``source`` with these variables of a model, and wait until it is ready."""
        of = ", ".join(variables.values()) or "the model in its code"
        self._call.step(f"agent {self._agent.id}", f"updated from version {source['agentRuntimeVersion']} to call {of}")
        environment = {**self._without_model(source)["environmentVariables"], **variables}
        version = self._agent.update(source, environmentVariables=environment)
        self._agent.ready()
        return version or "the new version"

    def _role(self) -> str:
        return str(self._current()["roleArn"]).rsplit("/", 1)[1]


def _uses(version: Version, addresses: Collection[str]) -> bool:
    return not set(addresses).isdisjoint(model_variables(version).values())


class ConfigurationBundle:
    """The configuration bundle with this name. Calls that name a version of it let an agent read its model from there.

    ``policy`` is the name of the rights to read it. Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.policy, self._call = name, f"bundle-{name}", calls
        self._control, self._tag = partial(calls, CONTROL), Resources(f"bundle-{name}", calls).tag

    def put(self, agent: str, address: Mapping[str, str]) -> dict[str, str | None]:
        """Make a version in which the agent with this ARN calls the model at the address. Other entries stay.

        Returns the bundle's ARN, its version, and the version before, which is None for the first one.
        """
        now = self._now()
        entries = _entries(now, agent)
        wanted = {k: v for k, v in entries.items() if k not in (*VARIABLES, "api_key")} | dict(address)
        before = now.get("versionId")
        if now and entries == wanted:
            self._call.say(f"bundle {self.name}: version {before} is up to date")
            return {"bundle": now["bundleArn"], "version": before, "version_before": None}
        made = self._write(now, agent, wanted, f"Model: {next(iter(address.values()))}")
        made = made or {"bundleArn": "the-bundle", "versionId": "the-new-version"}  # values of a rehearsal
        return {"bundle": made["bundleArn"], "version": made["versionId"], "version_before": before}

    def remove(self, agent: str, addresses: Collection[str]) -> bool:
        """Take these addresses from the agent's entry, and remove a bundle of this command that has no other entries.

        Returns False if the entry has another model's address.
        """
        now = self._now()
        if not now:
            return True
        entries = _entries(now, agent)
        rest = {name: value for name, value in entries.items() if name not in VARIABLES or value not in addresses}
        others = [entry.get("configuration") for name, entry in now["components"].items() if name != agent]
        tags = (self._control("ListTagsForResource", resourceArn=now["bundleArn"]) or {}).get("tags", {})
        if tags.get(self._tag["Key"]) == self._tag["Value"] and not any((rest, *others)):
            self._call.step(f"bundle {self.name}", "removed")
            self._control("DeleteConfigurationBundle", bundleId=now["bundleId"], absent=GONE)
        elif rest != entries:
            self._write(now, agent, rest, "The model is removed")
        return set(rest).isdisjoint(VARIABLES)

    def _write(self, now: Version, agent: str, entries: Mapping[str, Any], message: str) -> Any:
        """Make a version with these entries of the agent, or the bundle if there is none."""
        components = {**now.get("components", {}), agent: {"configuration": entries}}
        if now:
            self._call.step(f"bundle {self.name}", "given a new version")
            new: dict[str, Any] = {"bundleId": now["bundleId"], "parentVersionIds": [now["versionId"]]}
        else:
            self._call.step(f"bundle {self.name}", "created")
            new = {"bundleName": self.name, "tags": {self._tag["Key"]: self._tag["Value"]}}
        operation = "UpdateConfigurationBundle" if now else "CreateConfigurationBundle"
        return self._control(operation, **new, components=components, commitMessage=message)

    def _now(self) -> Version:
        """Return the newest version, empty without the bundle."""
        listed = self._call.every(CONTROL, "ListConfigurationBundles", "bundles")
        found = next((bundle["bundleId"] for bundle in listed if bundle["bundleName"] == self.name), None)
        return {} if found is None else dict(self._control("GetConfigurationBundle", bundleId=found))


def _entries(bundle: Version, agent: str) -> dict[str, Any]:
    return dict(bundle.get("components", {}).get(agent, {}).get("configuration", {}))
