"""The payload, its checks, and the prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from java_project import JavaProject
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

SYSTEM_PROMPT = """You migrate Java projects from Java 8 to Java 17 with a shell and an editor.
You are done when
- `mvn clean verify` succeeds on Java 17,
- every class file has major version 61, that is, the compiler's source and target, or its release, are 17,
- all tests pass and test as much as before: none deleted, emptied, ignored, skipped or left out.
Change tests only where they cannot compile on 17, and keep what they assert.
Keep output short: mvn -q clean verify 2>&1 | tail -n 60.
When you are done, say in a few sentences what you changed, without calling a tool."""
PROMPT = "Migrate the project {name} in the current folder to Java 17. It has {tests} tests."


class MigrationRequest(BaseModel):
    """``project`` is a project of this example. ``repo_uri`` is a .tar.gz at s3://bucket/key or file:///path.

    ``prompt`` may contain {name} and {tests}. ``max_turns`` bounds the model calls.
    """

    model_config = ConfigDict(extra="forbid")

    prompt: StrictStr = PROMPT
    project: StrictStr | None = None
    repo_uri: StrictStr | None = None
    tests_that_must_change: list[StrictStr] = []
    max_turns: StrictInt = Field(default=60, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> MigrationRequest:
        if (self.project is None) == (self.repo_uri is None):
            raise ValueError("a payload has either a project or a repo_uri")
        return self

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> MigrationRequest:
        """Read a payload. Keys that begin with `_` are the client's. Raises: ValueError, which names the key."""
        return cls.model_validate({key: value for key, value in payload.items() if not key.startswith("_")})

    def load(self) -> JavaProject:
        """Return the project of the payload. Raises: ValueError."""
        if self.project is not None:
            return JavaProject.named(self.project)
        assert self.repo_uri is not None
        return JavaProject.from_archive(self.repo_uri, self.tests_that_must_change)

    def question(self, project: JavaProject, tests: int) -> str:
        return self.prompt.replace("{name}", project.name).replace("{tests}", str(tests))
