"""What the control plane lists beside sessions: model packages, which outlive the service, and the base model at the hub."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ...._servers.process import write_private
from . import wire

HUB = "SageMakerPublicHub"


class Packages:
    """Model packages by ARN, oldest first, as DescribeModelPackage answers. ``directory`` keeps them; None: memory."""

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None else directory / "packages.json"
        kept = self._file.read_text() if self._file is not None and self._file.exists() else "{}"
        self.all: dict[str, dict[str, Any]] = json.loads(kept)

    def next_arn(self, group: str) -> str:
        """The name of the next version of a group."""
        version = 1 + max((p["ModelPackageVersion"] for p in self._of(group)), default=0)
        return wire.arn(f"model-package/{group}/{version}")

    def add(self, arn: str, *, description: str, checkpoint: bool, base_model_arn: str) -> None:
        """Register weights that are saved under this name. ``checkpoint``: with the optimizer's state."""
        _, group, version = arn.split("/")
        name, _, base_version = base_model_arn.partition("/Model/")[2].partition("/")
        base = {"HubContentName": name, "HubContentVersion": base_version or "1.0.0"}
        self.all[arn] = {
            "ModelPackageArn": arn,
            "ModelPackageName": f"{group}-{version}",
            "ModelPackageGroupName": group,
            "ModelPackageVersion": int(version),
            "ModelPackageDescription": description,
            "CreationTime": time.time(),
            "ModelPackageStatus": "Completed",
            "ModelPackageStatusDetails": {"ValidationStatuses": []},
            "InferenceSpecification": {"Containers": [{"IsCheckpoint": checkpoint, "BaseModel": base}]},
        }
        if self._file is not None:
            write_private(self._file, json.dumps(self.all))

    def summaries(self, group: str) -> list[dict[str, Any]]:
        """ListModelPackages of a group, by its name or ARN, newest first."""
        unlisted = ("ModelPackageStatusDetails", "InferenceSpecification")
        found = self._of(group.rpartition("/")[2])
        return [{key: p[key] for key in p if key not in unlisted} for p in reversed(found)]

    def _of(self, group: str) -> list[dict[str, Any]]:
        return [p for p in self.all.values() if p["ModelPackageGroupName"] == group]


def hub_content(name: str) -> dict[str, Any]:
    """A base model, as ListHubContents answers."""
    return {
        "HubContentName": name,
        "HubContentArn": f"arn:aws:sagemaker:{wire.REGION}:aws:hub-content/{HUB}/Model/{name}/1.0.0",
        "HubContentVersion": "1.0.0",
        "HubContentType": "Model",
        "DocumentSchemaVersion": "2.0.0",
        "HubContentSearchKeywords": ["@capability:training_session"],
        "HubContentStatus": "Available",
        "CreationTime": 0,
    }


def described_hub_content(name: str, tokenizer: str) -> dict[str, Any]:
    """The same, as DescribeHubContent answers. ``tokenizer``: the folder that the SDK loads the tokenizer from."""
    hub = {"HubName": HUB, "HubArn": f"arn:aws:sagemaker:{wire.REGION}:aws:hub/{HUB}"}
    return {**hub_content(name), **hub, "HubContentDocument": json.dumps({"HuggingfaceId": tokenizer})}
