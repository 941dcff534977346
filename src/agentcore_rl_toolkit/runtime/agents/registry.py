"""The control plane's records: agent runtimes, their versions and endpoints, for as long as the runtime lives.

A runtime's fields are stored as AWS's API names them, so that reading one back gives what was written. The caller loads the
agents; this module has the records and their rules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..wire import Named, WireError, not_found
from .agent import Agent, make_runtime_id, runtime_arn

DEFAULT = "DEFAULT"


@dataclass
class Version:
    """One immutable version: AWS's request fields, where the agent is on this machine, and what has been loaded of it."""

    number: int
    fields: dict[str, Any]
    created_s: float
    status: str = "READY"
    failure: str | None = None
    script: str | None = None
    python: str | None = None
    updated_s: float = 0.0
    agent: Agent | None = None
    loading: asyncio.Task[None] | None = None


@dataclass
class Endpoint:
    """A name for a version. DEFAULT follows the latest that loaded."""

    name: str
    version: int
    created_s: float
    updated_s: float
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class Record:
    """An agent runtime."""

    id: str
    name: str
    created_s: float
    versions: dict[int, Version]
    endpoints: dict[str, Endpoint]
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def latest(self) -> Version:
        return self.versions[max(self.versions)]

    def version(self, number: int) -> Version:
        """Raises: WireError 404."""
        if number not in self.versions:
            raise not_found(f"Version {number} of agent runtime {self.id}")
        return self.versions[number]

    def endpoint(self, name: str) -> Endpoint:
        """Raises: WireError 404."""
        if name not in self.endpoints:
            raise not_found(f"Endpoint {name} of agent runtime {self.id}")
        return self.endpoints[name]

    def resolve(self, endpoint: str) -> Version:
        """The version an endpoint serves. Raises: WireError 404."""
        return self.versions[self.endpoint(endpoint).version]


class Registry:
    """All records."""

    def __init__(self, *, region: str, account_id: str) -> None:
        self.region = region
        self.account_id = account_id
        self.records: dict[str, Record] = {}  # by id

    def arn(self, identity: str) -> str:
        return runtime_arn(self.region, self.account_id, identity)

    def get(self, identity: str) -> Record:
        """Raises: WireError 404."""
        if identity not in self.records:
            raise not_found(f"Agent runtime {identity}")
        return self.records[identity]

    def find(self, named: Named) -> Record:
        """Raises: WireError 404, of other accounts and regions too."""
        if named.account_id != self.account_id or named.region not in (None, self.region):
            where = f"account {self.account_id}, region {self.region}"
            raise not_found(f"Agent runtime {named.runtime_id} of another account or region (here is {where})")
        return self.get(named.runtime_id)

    def by_name(self, name: str) -> Record | None:
        return next((r for r in self.records.values() if r.name == name), None)

    def create(
        self, name: str, fields: Mapping[str, Any], *, salt: str | None = None, tags: Mapping[str, str] | None = None
    ) -> Record:
        """A new runtime with version 1 and its DEFAULT endpoint. Raises: WireError 409."""
        if self.by_name(name) is not None:
            raise WireError("ConflictException", f"An agent runtime named {name} already exists")
        now = time.time()
        identity = make_runtime_id(name, salt if salt is not None else str(time.time_ns()))
        version = Version(1, dict(fields), now, status="CREATING", updated_s=now)
        endpoints = {DEFAULT: Endpoint(DEFAULT, 1, now, now)}
        record = Record(identity, name, now, {1: version}, endpoints, dict(tags or {}))
        self.records[identity] = record
        return record

    def update(self, record: Record, fields: Mapping[str, Any]) -> Version:
        """A new version; DEFAULT follows it once it is loaded."""
        now = time.time()
        number = record.latest.number + 1
        record.versions[number] = Version(number, dict(fields), now, status="UPDATING", updated_s=now)
        return record.versions[number]

    def settle(self, record: Record, version: Version, failure: str | None) -> None:
        """Loading a version has ended."""
        failed = "CREATE_FAILED" if version.number == 1 else "UPDATE_FAILED"
        version.status = "READY" if failure is None else failed
        version.failure, version.updated_s = failure, time.time()
        default = record.endpoints[DEFAULT]
        if failure is None and version.number > default.version:
            default.version, default.updated_s = version.number, version.updated_s
