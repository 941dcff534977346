"""Rehearsals of runs on SageMaker: the built-in policy in the service's place, and the agent's file on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...runtime import LocalRuntime
from ..options import sandbox_words

if TYPE_CHECKING:
    from ...backends.sagemaker.job import JobConfig
    from ...backends.training.service_settings import ServiceTrainingConfig

T = TypeVar("T", "ServiceTrainingConfig", "JobConfig")
MODEL = "arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/builtin-policy"
# The agent of settings without one: `agent_here` starts it under this name.
NO_AGENT = {
    "agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:000000000000:runtime/rehearsal",
    "s3_bucket": "file:///rehearsal",
}


def rehearsed(config: T) -> T:
    """Return the same run with the built-in policy as its model, in another folder, which the service's run cannot resume."""
    from ...policy import WEIGHTS_DIR

    folder = config.output_dir / "rehearsal"
    changes: dict[str, Any] = {"base_model": MODEL, "output_dir": folder}
    if hasattr(config, "model_dir"):
        changes |= {"model_dir": WEIGHTS_DIR, "gateway_url": None, "gateway_context_tokens": None}
    else:
        changes |= {"output_s3": f"file://{folder.resolve()}/s3", "start_from": None, "poll_s": 1.0}
    return config.replace(**changes)


@contextlib.contextmanager
def agent_here(agent: Path, config: T, environment: Mapping[str, str]) -> Iterator[T]:
    """Serve an agent's file on a local runtime, and yield the run with it. Its sessions get ``environment``."""
    records = (config.output_dir / "records").resolve()
    records.mkdir(parents=True, exist_ok=True)
    options = ["--store", str(records), *(word for name in environment for word in ("--session-env", name))]
    options += sandbox_words((), (), (config.data_path, config.eval_data_path, config.output_dir))
    with LocalRuntime({"rehearsal": agent}, options, env=environment) as runtime:
        changes: dict[str, Any] = {"agent_runtime_arn": runtime.arns["rehearsal"]}
        if hasattr(config, "endpoint_url"):
            changes |= {"endpoint_url": runtime.url, "s3_bucket": records.as_uri()}
            changes |= {"gateway_host": "127.0.0.1", "gateway_public_url": None}
        else:
            os.environ["AWS_ENDPOINT_URL_BEDROCK_AGENTCORE"] = runtime.url
        yield config.replace(**changes)


@contextlib.contextmanager
def local_sagemaker(folder: Path) -> Iterator[Mapping[str, str]]:
    """Start the local service of training sessions and jobs, which boto3 finds. It saves into the run's folder.

    Yield the variables of its clients in other processes.
    """
    from ...backends.sagemaker.local.service import running
    from ...backends.training.local import LocalModel

    with contextlib.closing(LocalModel(checkpoint_dir=folder / "checkpoints")) as model, running(model) as service:
        os.environ.update(service.endpoints)
        yield service.environment
