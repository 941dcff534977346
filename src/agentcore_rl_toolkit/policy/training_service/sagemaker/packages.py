"""Model packages: names of saved weights, kept in a file beside them, so that they outlive the service."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...._servers.process import write_private
from . import wire

HUB = "SageMakerPublicHub"


class Package(Struct, kw_only=True):
    """One version of a group. ``checkpoint``: it has the optimizer's state, too. Units: ``created_s`` in unix seconds."""

    arn: str
    group: str
    version: int
    description: str
    checkpoint: bool
    base_model_arn: str
    created_s: float

    def summary(self) -> dict[str, Any]:
        """The fields that ListModelPackages and DescribeModelPackage share."""
        return {
            "ModelPackageArn": self.arn,
            "ModelPackageGroupName": self.group,
            "ModelPackageVersion": self.version,
            "ModelPackageDescription": self.description,
            "CreationTime": self.created_s,
            "ModelPackageStatus": "Completed",
        }

    def described(self) -> dict[str, Any]:
        name, version = content_of(self.base_model_arn)
        base = {"HubContentName": name, "HubContentVersion": version}
        return {
            **self.summary(),
            "ModelPackageName": f"{self.group}-{self.version}",
            "ModelPackageStatusDetails": {"ValidationStatuses": []},
            "InferenceSpecification": {"Containers": [{"IsCheckpoint": self.checkpoint, "BaseModel": base}]},
        }


class Packages:
    """All model packages, oldest first. ``directory``: None keeps them in memory."""

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None else directory / "packages.json"
        kept = self._file.read_bytes() if self._file is not None and self._file.exists() else b"[]"
        self._all = {package.arn: package for package in msgspec.json.decode(kept, type=list[Package])}

    def next_arn(self, group: str) -> str:
        """The name of the next version of a group."""
        version = 1 + max((p.version for p in self._all.values() if p.group == group), default=0)
        return wire.arn(f"model-package/{group}/{version}")

    def add(self, arn: str, *, description: str, checkpoint: bool, base_model_arn: str) -> None:
        """Register weights that are saved under this name."""
        _, group, version = arn.split("/")
        self._all[arn] = Package(
            arn=arn,
            group=group,
            version=int(version),
            description=description,
            checkpoint=checkpoint,
            base_model_arn=base_model_arn,
            created_s=time.time(),
        )
        if self._file is not None:
            write_private(self._file, msgspec.json.encode(list(self._all.values())).decode())

    def get(self, arn: str) -> Package:
        """Raises: RefusedError."""
        if arn not in self._all:
            raise wire.RefusedError(f"Model package {arn} does not exist.", code="ResourceNotFound")
        return self._all[arn]

    def of_group(self, group: str | None) -> Iterable[Package]:
        """``group``: name or ARN; None: of all groups."""
        name = group and group.rpartition("/")[2]
        return [p for p in list(self._all.values()) if name in (None, p.group)]


def content_of(base_model_arn: str) -> tuple[str, str]:
    """Name and version of a base model at the hub."""
    name, _, version = base_model_arn.partition("/Model/")[2].partition("/")
    return name, version or "1.0.0"


def hub_content(name: str, tokenizer: str) -> dict[str, Any]:
    """DescribeHubContent of a base model. ``tokenizer``: the folder or hub name that the SDK loads its tokenizer from."""
    content = f"arn:aws:sagemaker:{wire.REGION}:aws:hub-content/{HUB}/Model/{name}/1.0.0"
    return {
        "HubContentName": name,
        "HubContentArn": content,
        "HubContentVersion": "1.0.0",
        "HubContentType": "Model",
        "DocumentSchemaVersion": "2.0.0",
        "HubName": HUB,
        "HubArn": f"arn:aws:sagemaker:{wire.REGION}:aws:hub/{HUB}",
        "HubContentDocument": msgspec.json.encode({"HuggingfaceId": tokenizer}).decode(),
        "HubContentSearchKeywords": ["@capability:training_session"],
        "HubContentStatus": "Available",
        "CreationTime": 0,
    }
