"""A task: the prompt, the files at the beginning, and the check of the files at the end. Both apps use it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


def default_program() -> str:
    """Return the session's variable. It is read late, because this file may be loaded before the session begins."""
    return os.environ.get("CLI_AGENT", "claude")


class Task(BaseModel):
    """A payload. ``check`` is a shell command that runs in the workspace at the end. The reward is 1 if its exit code is 0.

    ``files`` are the files of the workspace by path. The default of ``program`` is the variable CLI_AGENT, or claude.
    """

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1)
    files: dict[str, str] = {}
    check: str = "false"
    program: Literal["claude", "claude-bedrock", "codex", "opencode", "qwen", "gemini", "pi"] = Field(
        default_factory=default_program, validate_default=True
    )
    limit_s: float = Field(default=600.0, gt=0)

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        if bad := [name for name in files if os.path.isabs(name) or ".." in name.split("/")]:
            raise ValueError(f"{bad[0]} is outside of the workspace")
        return files

    @classmethod
    def of(cls, payload: dict[str, Any]) -> Task:
        """Read a payload without the client's ``_rollout``. Raises: ValueError with the name of each wrong field."""
        return cls.model_validate({name: value for name, value in payload.items() if name != "_rollout"})

    def lay_out(self, workspace: Path, home: Path) -> None:
        """Make both folders, and the files of the workspace."""
        home.mkdir()
        workspace.mkdir()
        for name, text in self.files.items():
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).write_text(text)

    def read_back(self, workspace: Path) -> dict[str, str]:
        """The task's files as the program left them."""
        return {name: (workspace / name).read_text() for name in self.files if (workspace / name).is_file()}
