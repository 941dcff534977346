"""The control plane's records: agent runtimes, their versions and endpoints, for as long as the runtime lives.

A runtime's fields are stored as AWS's API names them, so that reading one back gives what was written. The caller loads the
agents; this module has the records and their rules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..wire import Target, WireError, not_found
from .agent import Agent, make_runtime_id, runtime_arn
from .version_fields import LOCAL_ARTIFACT

DEFAULT = "DEFAULT"


@dataclass
class Version:
    """One immutable version: AWS's request fields, the interpreter of its environment, and the agent once it is loaded."""

    number: int
    fields: dict[str, Any]
    status: str
    created_s: float = field(default_factory=time.time)
    updated_s: float = field(default_factory=time.time)
    failure: str | None = None
    python: Path | None = None
    agent: Agent | None = None
    loading: asyncio.Task[None] | None = None

    @property
    def script(self) -> Path:
        """The agent's file, if it is no image."""
        uri: str = self.fields["agentRuntimeArtifact"]["containerConfiguration"]["containerUri"]
        return Path(uri.removeprefix(LOCAL_ARTIFACT))


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
    versions: dict[int, Version]
    tags: dict[str, str] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=lambda: {DEFAULT: Endpoint(DEFAULT, 1)})
    created_s: float = field(default_factory=time.time)

    @property
    def latest(self) -> Version:
        return self.versions[max(self.versions)]

    def version(self, number: int) -> Version:
        if number not in self.versions:
            raise not_found(f"Version {number} of agent runtime {self.id}")
        return self.versions[number]

    def endpoint(self, name: str) -> Endpoint:
        if name not in self.endpoints:
            raise not_found(f"Endpoint {name} of agent runtime {self.id}")
        return self.endpoints[name]


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

    def find(self, target: Target) -> Record:
        """Raises: WireError 404, of other accounts and regions too."""
        if target.account_id != self.account_id or target.region not in (None, self.region):
            where = f"account {self.account_id}, region {self.region}"
            raise not_found(f"Agent runtime {target.runtime_id} of another account or region (here is {where})")
        return self.get(target.runtime_id)

    def by_name(self, name: str) -> Record | None:
        return next((r for r in self.records.values() if r.name == name), None)

    def create(
        self, name: str, fields: dict[str, Any], *, salt: str | None = None, tags: Mapping[str, str] | None = None
    ) -> Record:
        """A new runtime with version 1 and its DEFAULT endpoint. Raises: WireError 409."""
        if self.by_name(name) is not None:
            raise WireError("ConflictException", f"An agent runtime named {name} already exists")
        identity = make_runtime_id(name, salt if salt is not None else str(time.time_ns()))
        record = self.records[identity] = Record(identity, name, {1: Version(1, fields, "CREATING")}, dict(tags or {}))
        return record

    def update(self, record: Record, fields: dict[str, Any]) -> Version:
        """A new version; DEFAULT follows it once it is loaded."""
        number = record.latest.number + 1
        version = record.versions[number] = Version(number, fields, "UPDATING")
        return version

    def set_loaded(self, record: Record, version: Version, failure: str | None) -> None:
        """Set the status of a version that was loaded, or not, for this reason."""
        failed = "CREATE_FAILED" if version.number == 1 else "UPDATE_FAILED"
        version.status = "READY" if failure is None else failed
        version.failure, version.updated_s = failure, time.time()
        default = record.endpoints[DEFAULT]
        if failure is None and version.number > default.version:
            default.version, default.updated_s = version.number, version.updated_s
