"""The payload and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Request(BaseModel):
    """A payload. Unknown keys are refused, and keys that begin with an underscore (``_rollout``) are ignored.

    ``rendering``: the form of prompts, tools and replies (`wording.py`). ``max_turns``: the limit of model calls.
    ``ticket_number`` is written before a telecom ticket. ``partial_credit``: the reward for the share of the published actions
    (`reward.py`). ``repaired``: indexes of the published solution. These actions were taken before the agent begins.
    ``user_lines``: the texts of a scripted user. Without them, a model plays the user of a retail or airline task.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    domain: Literal["telecom", "retail", "airline"] = "telecom"
    task_id: str = Field(min_length=1, max_length=500)
    rendering: Literal["full", "compact"] = "full"
    max_turns: int = Field(default=60, ge=1, le=200)
    partial_credit: float = Field(default=0.0, ge=0.0, le=10.0)
    repaired: list[int] = Field(default_factory=list)
    ticket_number: int | None = Field(default=None, ge=0)
    user_lines: list[str] | None = Field(default=None, min_length=1)

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Request:
        """Raises: ValueError with one line for each key that is wrong."""
        try:
            return cls.model_validate({key: value for key, value in payload.items() if not key.startswith("_")})
        except ValidationError as e:
            lines = [f"  {'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors()]
            raise ValueError("the payload is not a task of the benchmark:\n" + "\n".join(lines)) from e
