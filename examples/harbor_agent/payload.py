"""The payload and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents import AGENTS
from harbor_tasks import HarborTask
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, field_validator


class HarborRequest(BaseModel):
    """``task_archive``: a task's folder without its solution, a .tar.gz in base64. `check_tasks.py --rows` makes payloads."""

    model_config = ConfigDict(extra="forbid")

    task: StrictStr
    task_archive: StrictStr
    agent: StrictStr = "mini-swe-agent"
    step_limit: StrictInt = Field(default=50, ge=1)

    @field_validator("agent")
    @classmethod
    def _known(cls, agent: str) -> str:
        if agent not in AGENTS:
            raise ValueError(f"there is no agent {agent!r}; there are: {', '.join(AGENTS)}")
        return agent

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> HarborRequest:
        """Read a payload. Keys that begin with `_` are the client's. Raises: ValueError, which names the key."""
        return cls.model_validate({key: value for key, value in payload.items() if not key.startswith("_")})

    def load(self) -> HarborTask:
        """The task. Raises: ValueError."""
        return HarborTask.from_archive(self.task, self.task_archive)
