"""The control plane's records: agent runtimes, their versions and endpoints, for as long as the runtime lives.

A runtime's fields are stored under the names of AWS's API, so that a read returns the written fields. The caller loads the
agents. This module has the records and their rules.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..wire import Target, WireError, not_found
from .agent import Agent, make_runtime_id, runtime_arn
from .version_fields import IDLE, LIFETIME, LOCAL_ARTIFACT

DEFAULT = "DEFAULT"
NO_TAGS: Mapping[str, str] = MappingProxyType({})


@dataclass
class Endpoint:
    """A name for a version. DEFAULT follows the latest that loaded."""

    name: str
    version: int
    tags: dict[str, str] = field(default_factory=dict)
    created_s: float = field(default_factory=time.time)
    updated_s: float = field(default_factory=time.time)


@dataclass
class Record:
    """An agent runtime. The look-ups raise WireError 404."""

    id: str
    name: str
    tags: dict[str, str] = field(default_factory=dict)
    versions: dict[int, Agent] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=lambda: {DEFAULT: Endpoint(DEFAULT, 1)})

    @property
    def latest(self) -> Agent:
        return self.versions[max(self.versions)]

    def version(self, number: str) -> Agent:
        found = next((agent for key, agent in self.versions.items() if str(key) == number), None)
        if found is None:
            raise not_found(f"Version {number} of agent runtime {self.id}")
        return found

    def endpoint(self, name: str) -> Endpoint:
        if name not in self.endpoints:
            raise not_found(f"Endpoint {name} of agent runtime {self.id}")
        return self.endpoints[name]


class Registry:
    """All records. The timeouts are those of versions that set none."""

    def __init__(self, *, region: str, account_id: str, idle_timeout_s: float, max_lifetime_s: float) -> None:
        self.region, self.account_id = region, account_id
        self._idle_timeout_s, self._max_lifetime_s = idle_timeout_s, max_lifetime_s
        self.records: dict[str, Record] = {}  # the keys are ids

    def arn(self, identity: str) -> str:
        return runtime_arn(self.region, self.account_id, identity)

    def get(self, identity: str) -> Record:
        """Return the record of an id. Raises: WireError 404."""
        if identity not in self.records:
            raise not_found(f"Agent runtime {identity}")
        return self.records[identity]

    def find(self, target: Target) -> Record:
        """Return the record of a target. Raises: WireError 404, also for other accounts and regions."""
        if target.account_id != self.account_id or target.region != self.region:
            raise not_found(f"Agent runtime {target.runtime_id} of another account or region")
        return self.get(target.runtime_id)

    def by_name(self, name: str) -> Record | None:
        return next((r for r in self.records.values() if r.name == name), None)

    def create(self, name: str, fields: dict[str, Any], *, salt: str = "", tags: Mapping[str, str] = NO_TAGS) -> Record:
        """Create a runtime with version 1 and its DEFAULT endpoint. Raises: WireError 409."""
        if self.by_name(name) is not None:
            raise WireError("ConflictException", f"An agent runtime named {name} already exists")
        identity = make_runtime_id(name, salt or str(time.time_ns()))
        record = self.records[identity] = Record(identity, name, dict(tags))
        self.update(record, fields)
        return record

    def update(self, record: Record, fields: Mapping[str, Any]) -> Agent:
        """Create a version. DEFAULT follows it once it is loaded.

        A default idle timeout is never above a given lifetime. Source: AWS, "Configure lifecycle settings".
        """
        number = max(record.versions, default=0) + 1
        uri: str = fields["agentRuntimeArtifact"]["containerConfiguration"]["containerUri"]
        given, idle_s = fields.get("lifecycleConfiguration", {}), self._idle_timeout_s
        agent = record.versions[number] = Agent(
            runtime_id=record.id,
            version=number,
            name=record.name,
            script=Path(uri.removeprefix(LOCAL_ARTIFACT)),
            image=None if uri.startswith(LOCAL_ARTIFACT) else uri,
            fields=fields,
            idle_timeout_s=given.get(IDLE, min(idle_s, given.get(LIFETIME, idle_s))),
            max_lifetime_s=given.get(LIFETIME, self._max_lifetime_s),
        )
        return agent

    def set_loaded(self, agent: Agent, failure: str | None) -> None:
        """Set the result of loading a version: the reason why that failed, or None."""
        agent.loaded, agent.failure, agent.updated_s = failure is None, failure, time.time()
        record = self.records.get(agent.runtime_id)
        if agent.loaded and record is not None and agent.version > record.endpoints[DEFAULT].version:
            default = record.endpoints[DEFAULT]
            default.version, default.updated_s = agent.version, agent.updated_s
