"""Lets a deployed agent call another model, and lets it call the earlier one again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from ...errors import ConfigError
from .. import iam
from ..agent import CONTROL, GONE, VARIABLES, Agent, model_variables
from ..calls import Calls
from ..resources import NO_ENTITY, Resources
from .sagemaker import ABSENT

POLICY = "agentcore-rl-model-"
OURS = "agentcore-rl-"  # names of models of this command begin with it
_ENDPOINT = re.compile(rf"/endpoints/({OURS}[^/]+)/openai/v1")
_REGION = re.compile(r"(?:\.sagemaker\.|^arn:[^:]+:bedrock:)([a-z0-9-]+)[.:]")
_ARN = re.compile(r"arn:[^:]+:bedrock-agentcore:([^:]+):\d+:runtime/([^/]+)")


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
        self._iam = partial(calls, "iam")

    def allow(self, name: str, rights: iam.Policy) -> None:
        """Give the agent's role these rights, under this name: each model and bundle has its own, so roll-backs keep theirs."""
        role = self._role_of(self._current())
        if Resources("", self._call).put_role_policy(role, POLICY + name, rights):
            self._call.step(f"role {role}", f"given the rights {POLICY}{name}")

    def forbid(self, name: str) -> None:
        """Take the rights of this name from the agent's role."""
        if self._agent.version() is None:
            return
        which: dict[str, Any] = {"RoleName": self._role_of(self._current()), "PolicyName": POLICY + name}
        if self._iam("GetRolePolicy", **which, absent=NO_ENTITY) is not None:
            self._call.step(f"the rights {POLICY}{name} of the role {which['RoleName']}", "removed")
            self._iam("DeleteRolePolicy", **which)

    def use(self, address: Mapping[str, str]) -> tuple[str | None, str]:
        """Let the agent call the model at this address.

        Returns the version before, which is the same but for its model (None: there is none), and the new one.
        """
        variables = {VARIABLES[name]: value for name, value in address.items()}
        now = self._current()
        same = self._without_model(now)

        def fits(each: Mapping[str, Any]) -> bool:
            other = model_variables(each) != variables and self._without_model(each) == same
            return other and None not in self._models_of(each)

        earlier = self._last(now, fits)
        return None if earlier is None else str(earlier["agentRuntimeVersion"]), self._change(now, variables)

    def leave(self, addresses: Collection[str]) -> None:
        """Let the agent call the model that it called before `promote`.

        Raises: ConfigError if another endpoint of the agent still uses one of these addresses.
        """
        if self._agent.version() is None:
            self._call.say(f"agent {self._agent.id}: does not exist")
            return
        now, changed = self._current(), {self._endpoint}
        if _uses(now, addresses):
            before = self._last(now, lambda each: all(n and not n.startswith(OURS) for n in self._models_of(each)))
            self._change(now, {} if before is None else model_variables(before))
            changed.add("DEFAULT")  # has the newest version
        for endpoint in (each for each in self._agent.endpoints() if each["name"] not in changed):
            for version in {endpoint.get("liveVersion"), endpoint.get("targetVersion")} - {None}:
                if _uses(self._agent.version(str(version)) or {}, addresses):
                    raise ConfigError(
                        f"the endpoint {endpoint['name']} of the agent {self._agent.id} uses version {version}, which "
                        f"calls the model: repeat the command with --endpoint {endpoint['name']} first"
                    )

    def roll_back(self, version: str) -> str:
        """Let the endpoint use an earlier version. Returns the version that it uses.

        For `DEFAULT`, the earlier version becomes the newest again.
        """
        self._agent.ready()
        earlier = self._agent.version(version)
        if earlier is None:
            raise ConfigError(f"agent {self._agent.id} has no version {version}")
        if None in self._models_of(earlier):
            raise ConfigError(f"version {version} calls a model that is removed")
        if self._endpoint == "DEFAULT":
            return self._update(earlier, model_variables(earlier))
        self._agent.point(self._endpoint, version)
        return version

    def _current(self) -> Mapping[str, Any]:
        """Wait until the agent is ready. Returns the version that the endpoint uses."""
        newest = self._agent.ready()
        if self._endpoint == "DEFAULT":
            return newest
        if (version := self._agent.version_at(self._endpoint)) is None:
            raise ConfigError(f"agent {self._agent.id} has no endpoint {self._endpoint}")
        return self._agent.version(version) or newest

    def _last(self, now: Mapping[str, Any], fits: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any] | None:
        """Return the last version, up to ``now``, that fits."""
        versions = (self._agent.version(str(number)) for number in range(int(now["agentRuntimeVersion"]), 0, -1))
        return next((each for each in versions if each is not None and fits(each)), None)

    def _models_of(self, version: Mapping[str, Any]) -> Iterator[str | None]:
        """Yield the name or the address of each model that a version calls. None: the model is removed."""
        for address in model_variables(version).values():
            region = _REGION.search(address)
            if region is not None and region[1] != self._call.region:
                yield address  # not of this command, which puts models into the agent's region
            elif ":imported-model/" in address:
                which: dict[str, Any] = {"modelIdentifier": address, "absent": ("ResourceNotFoundException",)}
                yield (self._call("bedrock", "GetImportedModel", **which) or {}).get("modelName")
            elif (endpoint := _ENDPOINT.search(address)) is not None:
                found = self._call("sagemaker", "DescribeEndpoint", EndpointName=endpoint[1], absent=ABSENT)
                yield None if found is None else endpoint[1]
            else:
                yield address

    def _without_model(self, version: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a version but for its model."""
        others = {k: v for k, v in version.get("environmentVariables", {}).items() if k not in VARIABLES.values()}
        return {**self._agent.settings(version), "environmentVariables": others}

    def _change(self, now: Mapping[str, Any], variables: Mapping[str, str]) -> str:
        """Bring the endpoint to a version with these variables of a model. Returns its number."""
        version = str(now["agentRuntimeVersion"])
        if model_variables(now) == variables:
            self._call.say(f"agent {self._agent.id}: version {version} has the model's address")
        else:
            version = self._update(now, variables)
        if self._endpoint != "DEFAULT":
            self._agent.point(self._endpoint, version)
        return version

    def _update(self, source: Mapping[str, Any], variables: Mapping[str, str]) -> str:
        """Make a version like ``source`` with these variables of a model, and wait until it is ready."""
        of = ", ".join(variables.values()) or "the model in its code"
        self._call.step(f"agent {self._agent.id}", f"updated from version {source['agentRuntimeVersion']} to call {of}")
        others = self._without_model(source)["environmentVariables"]
        version = self._agent.update(source, environmentVariables={**others, **variables})
        self._agent.ready()
        return version or "the new version"

    @staticmethod
    def _role_of(version: Mapping[str, Any]) -> str:
        return str(version["roleArn"]).rsplit("/", 1)[1]


def _uses(version: Mapping[str, Any], addresses: Collection[str]) -> bool:
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
        now = self._now() or {}
        components: dict[str, Any] = dict(now.get("components", {}))
        entries = components.get(agent, {}).get("configuration", {})
        wanted = {name: value for name, value in entries.items() if name not in (*VARIABLES, "api_key")} | dict(address)
        before = now.get("versionId")
        if now and entries == wanted:
            self._call.say(f"bundle {self.name}: version {before} is up to date")
            parents = now.get("lineageMetadata", {}).get("parentVersionIds", [])
            return {"bundle": now["bundleArn"], "version": before, "version_before": next(iter(parents), None)}
        components[agent] = {"configuration": wanted}
        message = f"Model: {next(iter(address.values()))}"
        if now:
            made = self._update(now, components, message)
        else:
            self._call.step(f"bundle {self.name}", "created")
            new: dict[str, Any] = {"bundleName": self.name, "tags": {self._tag["Key"]: self._tag["Value"]}}
            made = self._control("CreateConfigurationBundle", **new, components=components, commitMessage=message)
        made = made or {"bundleArn": "the-bundle", "versionId": "the-new-version"}  # values of a rehearsal
        return {"bundle": made["bundleArn"], "version": made["versionId"], "version_before": before}

    def remove(self, agent: str, addresses: Collection[str]) -> bool:
        """Take these addresses from the agent's entry, and remove a bundle of this command that has no other entries.

        Returns False if the entry has another model's address.
        """
        now = self._now()
        if now is None:
            return True
        entries = now["components"].get(agent, {}).get("configuration", {})
        rest = {name: value for name, value in entries.items() if name not in VARIABLES or value not in addresses}
        components = {**now["components"], agent: {"configuration": rest}}
        tags = (self._control("ListTagsForResource", resourceArn=now["bundleArn"]) or {}).get("tags", {})
        ours = tags.get(self._tag["Key"]) == self._tag["Value"]
        if ours and not any(entry.get("configuration") for entry in components.values()):
            self._call.step(f"bundle {self.name}", "removed")
            self._control("DeleteConfigurationBundle", bundleId=now["bundleId"], absent=GONE)
        elif rest != entries:
            self._update(now, components, "The model is removed")
        return set(rest).isdisjoint(VARIABLES)

    def _update(self, now: Mapping[str, Any], components: Mapping[str, Any], message: str) -> Any:
        self._call.step(f"bundle {self.name}", "given a new version")
        which = {"bundleId": now["bundleId"], "parentVersionIds": [now["versionId"]]}
        return self._control("UpdateConfigurationBundle", **which, components=components, commitMessage=message)

    def _now(self) -> Mapping[str, Any] | None:
        """Return the newest version, or None without the bundle."""
        listed = self._call.every(CONTROL, "ListConfigurationBundles", "bundles")
        found = next((bundle["bundleId"] for bundle in listed if bundle["bundleName"] == self.name), None)
        return None if found is None else self._control("GetConfigurationBundle", bundleId=found)
