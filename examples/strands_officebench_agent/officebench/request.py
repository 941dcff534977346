"""The payload and its checks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class TaskRequest(BaseModel):
    """A payload: the id of the task, and optionally another text of the task."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task_id: str = Field(pattern=r"^[123]-\d{1,3}/\d{1,2}$", description='Like "2-15/0"')
    prompt: str | None = Field(default=None, min_length=1, max_length=20_000)

    @field_validator("task_id", "prompt", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Refuse a content block (`{"toolUse": ...}`) instead of a text."""
        if value is not None and not isinstance(value, str):
            kind = f"a {next(iter(value), '')} block" if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"a string is needed, not {kind}")
        return value

    @classmethod
    def of(cls, payload: Any) -> TaskRequest:
        """The request in a payload, without `_rollout` and other fields that begin with an underscore.

        Raises: pydantic.ValidationError, TypeError if the payload is no object.
        """
        if not isinstance(payload, dict):
            raise TypeError(f"the payload must be an object with task_id, not {type(payload).__name__}")
        return cls.model_validate({key: value for key, value in payload.items() if not key.startswith("_")})
