"""Settings of a run on SageMaker Training Sessions, and its plan."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..._installation import install_command
from ...errors import ConfigError
from ...gateway.sampling_services.sagemaker import POLL_S, RUNTIME
from ..settings import Count, Plan, Positive, SettingsGroup, planned
from ..training.service_settings import ServiceTrainingConfig

MOST_LEARNING_RATE = 0.01


class SessionSettings(SettingsGroup):
    """The session on SageMaker. ``role_arn`` is its role.

    It writes below ``output_s3`` and makes model packages in ``model_package_group_arn``, or in the service's own group.
    ``accept_eula`` accepts the license of the model. ``rank`` and ``alpha`` are those of the LoRA adapters. ``poll_s`` is the
    longest time between two questions for a result. Units: seconds.
    """

    role_arn: str
    output_s3: str
    model_package_group_arn: str | None = None
    accept_eula: bool = False
    rank: Count = 32
    alpha: Count = 64
    poll_s: Positive = POLL_S
    start_timeout_s: Positive = 1800.0
    operation_timeout_s: Positive = 1800.0


class SageMakerConfig(ServiceTrainingConfig):
    """The settings of a run. `base_model` is the ARN of a model of SageMaker's hub; the session runs in its region."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {**ServiceTrainingConfig.DEFAULTS, "output_dir": Path("runs/sagemaker")}

    form: Literal["session"] = "session"
    session: SessionSettings

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not re.match("arn:[^:]+:sagemaker:[^:]+:", self.data.base_model):
            raise ConfigError(f"base_model {self.data.base_model!r} is not the ARN of a model of SageMaker's hub")
        if self.optimizer.learning_rate > MOST_LEARNING_RATE:
            raise ConfigError(f"learning_rate is at most {MOST_LEARNING_RATE} on SageMaker")

    @property
    def region(self) -> str:
        return self.data.base_model.split(":")[3]

    def plan(self, *, rehearse: bool = False) -> Plan:
        """Return the plan of the run. Raises: ConfigError when the data cannot be read."""
        where = "a rehearsal: a local service over the built-in policy" if rehearse else "SageMaker Training Sessions"
        facts = [("service", where), *planned(self, data=self.data.data_path)]
        needs = self.needs() + needs_of_botocore()
        if rehearse and not importlib.util.find_spec("torch"):
            needs.append(install_command("policy"))
        return Plan(backend="sagemaker", facts=facts, needs=needs)


def needs_of_botocore() -> list[str]:
    """Return the operations that the installed botocore lacks."""
    import botocore.session

    known = RUNTIME in botocore.session.get_session().get_available_services()
    return [] if known else [f"botocore 1.43.112 or later: {install_command('gateway', 'sagemaker')}"]
