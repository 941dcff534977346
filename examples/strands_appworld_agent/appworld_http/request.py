"""The payload, and the prompt of the model."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from .world import Task

MAX_TURNS = 50
MAX_TOKENS = 2048  # limit of a reply


class TaskRequest(BaseModel):
    """A payload: the id of an AppWorld task, like 82e2fac_1."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task_id: str = Field(pattern=r"^[0-9a-f]{7}_\d$")

    @field_validator("task_id", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Refuse a content block (`{"toolUse": ...}`) instead of a text."""
        if not isinstance(value, str):
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


def system_prompt(task: Task) -> str:
    """The system prompt: the agent's user, and how to use the world."""
    return (
        f"You are the assistant of {task.first_name} {task.last_name} ({task.email}, {task.phone_number}). "
        f"It is {task.datetime}. Solve the task alone, by Python code that you run with the tool `execute`; variables stay from "
        "one run to the next. The apps are called as apis.APP.API(...), and print(...) shows you what they return. Begin with "
        "print(apis.api_docs.show_app_descriptions()), then print(apis.api_docs.show_api_descriptions(app_name='...')), and "
        "print(apis.api_docs.show_api_doc(app_name='...', api_name='...')) before you call an API for the first time. Passwords "
        "of the user's accounts are in apis.supervisor.show_account_passwords(). Lists come in pages: read them all. When you "
        "are done, call apis.supervisor.complete_task(), with answer=... if the task asks for one."
    )
