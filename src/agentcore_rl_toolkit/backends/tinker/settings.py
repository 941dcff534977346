"""Settings of a Tinker run from the command line, and its plan."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..._installation import install_command
from ...gateway.sampling_services.tinker import KEY_ENV, service_url
from ..settings import Count, Plan, planned
from ..training.service_settings import ServiceTrainingConfig


class TinkerConfig(ServiceTrainingConfig):
    """The settings of a Tinker run. `service_url` None is the SDK's default. `rank` is the rank of the LoRA adapters."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {**ServiceTrainingConfig.DEFAULTS, "output_dir": Path("runs/tinker")}

    service_url: str | None = None
    rank: Count = 32

    @property
    def url(self) -> str:
        return (self.service_url or service_url()).rstrip("/")

    def plan(self) -> Plan:
        facts = [("service", self.url), *planned(self, data=self.data.data_path)]
        needs = [] if importlib.util.find_spec("tinker") else [install_command("tinker")]
        if not os.environ.get(KEY_ENV):
            needs.append(f"{KEY_ENV} in the environment")
        return Plan(backend="tinker", facts=facts, needs=[*needs, *self.needs()])
