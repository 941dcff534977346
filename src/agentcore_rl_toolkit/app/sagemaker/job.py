"""The invocation of a multi-turn RL job, and the payload that the agent gets instead.

Source: Amazon SageMaker AI, "Prepare your agent for multi-turn RL"; `sagemaker.train.rft` has the older spellings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ...contract import ROLLOUT_FIELD, RolloutConfig
from ...errors import ConfigError

_ARN = re.compile(r"arn:[^:]+:sagemaker:([^:]+):\d{12}:job/AgentRFT(?:Evaluation)?/(.+)")
_MODEL = "default"  # a job has one model


@dataclass(kw_only=True)
class JobRollout:
    """A rollout of a job, which calls it a trajectory.

    Attributes:
        endpoint: of the job runtime; None: the region's.
        row: the agent's part of the payload.
        samples: sampling requests that the job answered.
        ended: the job accepts nothing more for this rollout.
    """

    arn: str
    trajectory_id: str
    region: str
    endpoint: str | None
    row: Mapping[str, Any]
    sampling_params: Mapping[str, Any]
    samples: int = 0
    ended: bool = False
    _name: str = field(repr=False)

    @property
    def key(self) -> str:
        """Its name in logs, and the place of its record."""
        return f"{self._name}/rollout-{quote(self.trajectory_id, safe='')}"

    def client_token(self, operation: str) -> str:
        """Return an operation's token, the same for every attempt and process: the job accepts a reward once."""
        return hashlib.sha256(f"{operation}\n{self.arn}\n{self.trajectory_id}".encode()).hexdigest()[:36]

    def config(self, base_url: str) -> RolloutConfig:
        """Return the `_rollout` block as trainers send it. Its address authorizes the model calls."""
        return RolloutConfig(
            base_url=base_url,
            model_id=_MODEL,
            api_key="none",
            sampling_params=self.sampling_params,
            extra={"job_arn": self.arn, "rollout_id": self.trajectory_id},
        )

    def settle(self, request: dict[str, Any]) -> None:
        """Make a chat request the job's: its sampling parameters win, its `max_tokens` is an upper bound."""
        request["model"] = _MODEL
        request |= {k: v for k, v in self.sampling_params.items() if k != "max_tokens"}
        limit = self.sampling_params.get("max_tokens")
        if limit is not None:
            name = "max_completion_tokens" if request.get("max_completion_tokens") else "max_tokens"
            request[name] = min(request.get(name) or limit, limit)


def job_rollout(payload: Mapping[str, Any]) -> JobRollout | None:
    """Return the rollout for which a job invokes the agent, or None if the payload is not a job's."""
    metadata = payload.get("metadata")
    if ROLLOUT_FIELD in payload or not isinstance(metadata, Mapping):
        return None
    arn = _first(metadata, "jobArn", "job_arn")
    trajectory_id = _first(metadata, "rolloutId", "rollout_id", "trajectoryId", "trajectory_id")
    match = _ARN.fullmatch(arn) if isinstance(arn, str) else None
    if match is None or not isinstance(trajectory_id, str) or not trajectory_id:
        return None
    given = _first(payload, "inferenceParams", "inference_params")
    given = given if isinstance(given, Mapping) else {}
    params = {
        "temperature": given.get("temperature"),
        "top_p": _first(given, "topP", "top_p"),
        "max_tokens": _first(given, "maxTokens", "max_tokens"),
    }
    return JobRollout(
        arn=arn,
        trajectory_id=trajectory_id,
        region=metadata.get("region") or match[1],
        endpoint=metadata.get("endpoint") or None,
        row=_row(_first(payload, "prompt", "instance")),
        sampling_params={k: v for k, v in params.items() if v is not None},
        _name=match[2],
    )


def _first(values: Mapping[str, Any], *names: str) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _row(prompt: Any) -> dict[str, Any]:
    """Return the agent's payload. A job's rows have one column of text; a JSON object in it is the payload."""
    found = prompt
    if isinstance(prompt, str):
        try:
            found = json.loads(prompt)
        except (ValueError, RecursionError):
            found = None
    return dict(found) if isinstance(found, Mapping) else {"prompt": prompt}


def check_reports_nothing(func: Callable[..., Any]) -> None:
    """Raise ConfigError for a function under AWS's `sagemaker_rft_handler`, which reports its rewards itself."""
    inner: Any = func
    while inner is not None:
        module = str(getattr(inner, "__globals__", {}).get("__name__", ""))
        if module.startswith("sagemaker.train.rft"):
            name = getattr(func, "__name__", "this function")
            raise ConfigError(
                f"{name} is under sagemaker_rft_handler, and its rewards would be reported twice: remove that decorator. "
                "rollout_entrypoint serves multi-turn RL jobs by itself"
            )
        inner = getattr(inner, "__wrapped__", None)
