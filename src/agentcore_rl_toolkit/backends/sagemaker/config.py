"""Settings of a run on SageMaker Training Sessions, and the plan they stand for."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..._installation import install_command
from ...gateway.sampling_services.sagemaker import POLL_S, RUNTIME
from ..settings import Count, Plan, Positive, planned
from ..training.config import ServiceTrainingConfig


@dataclass(frozen=True, kw_only=True)
class SageMakerConfig(ServiceTrainingConfig):
    """Everything a run needs. Read from YAML, TOML or JSON with `from_file`.

    `base_model` is the ARN of a model of SageMaker's hub, whose licence `accept_eula` accepts; the session runs in the region
    in it. `role_arn` is the session's
    role; it writes below `output_s3` and makes model packages in `model_package_group_arn`, or in the service's own group.
    `rank` and `alpha` are those of the LoRA adapters. `poll_s` is the longest time between two questions for a result.
    Units: seconds. Raises: ConfigError.
    """

    form: Literal["session"] = "session"
    output_dir: Path = Path("runs/sagemaker")
    learning_rate: Annotated[float, Field(gt=0, le=0.01)] = 2e-5
    base_model: Annotated[str, Field(pattern="^arn:[^:]+:sagemaker:[^:]+:")]
    role_arn: str
    output_s3: str
    model_package_group_arn: str | None = None
    accept_eula: bool = False
    rank: Count = 32
    alpha: Count = 64
    poll_s: Positive = POLL_S
    start_timeout_s: Positive = 1800.0
    operation_timeout_s: Positive = 1800.0

    @property
    def region(self) -> str:
        return self.base_model.split(":")[3]

    def plan(self, *, rehearse: bool = False) -> Plan:
        """The plan of the run. Raises: ConfigError when the data cannot be read."""
        where = "a rehearsal: a local service over the built-in policy" if rehearse else "SageMaker Training Sessions"
        facts = [("service", where), *planned(self, data=self.data_path)]
        needs = self.needs() + needs_of_botocore()
        if rehearse and not importlib.util.find_spec("torch"):
            needs.append(install_command("policy"))
        return Plan(backend="sagemaker", facts=facts, needs=needs)


def needs_of_botocore() -> list[str]:
    """What the installed botocore lacks."""
    import botocore.session

    known = RUNTIME in botocore.session.get_session().get_available_services()
    return [] if known else [f"botocore 1.43.112 or later: {install_command('gateway', 'sagemaker')}"]
