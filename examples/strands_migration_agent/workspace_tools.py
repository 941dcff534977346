"""The workspace of a rollout, with a shell and an editor."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import maven
from java_project import JavaProject, read_tree
from strands import tool

COMMAND_LIMIT_S = 300.0
SHOWN_CHARACTERS = 12_000


class Workspace:
    """A project unpacked into a folder of this rollout, and a home for the commands that run in it. Use as a context manager."""

    def __init__(self, project: JavaProject) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="migration-agent-"))
        self._project = project
        self.tree = self._folder / project.name
        self.home = self._folder / "home"
        project.write(self.tree)
        maven.write_settings(self.home / ".m2")

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, command: str, limit_s: float = COMMAND_LIMIT_S) -> str:
        """Run a command in the project's folder. Return its output, with its exit code if it is not 0."""
        finished = maven.run(["bash", "-c", command], folder=self.tree, home=self.home, limit_s=limit_s)
        shown = _shortened(finished.output)
        if finished.code is None:
            return f"{shown}\n[ended: it took longer than {limit_s:g} s]"
        return shown if finished.code == 0 else f"{shown}\n[exit code {finished.code}]"

    def patch(self) -> str:
        """Return the changes as a unified diff."""
        after = read_tree(self.tree)
        rows: list[str] = []
        for path in sorted({*self._project.files, *after}):
            old, new = (files.get(path, b"").decode(errors="replace") for files in (self._project.files, after))
            if old != new:
                rows += difflib.unified_diff(old.splitlines(), new.splitlines(), f"a/{path}", f"b/{path}", lineterm="")
        return "\n".join(rows)

    def edit(self, command: str, path: str, text: str, old: str, line: int) -> str:
        """View or change one file. Errors are in the returned text, which the model reads."""
        target = (self.tree / path).resolve()
        if not target.is_relative_to(self.tree.resolve()) or target == self.tree.resolve():
            return f"error: {path!r} is not a file inside the project; paths are relative to its root"
        try:
            return self._edit(command, target, path, text, old, line)
        except (OSError, UnicodeDecodeError) as e:
            return f"error: {path}: {e.strerror if isinstance(e, OSError) else 'no text file'}"

    def _edit(self, command: str, target: Path, path: str, text: str, old: str, line: int) -> str:
        if command == "create":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            return f"wrote {path}"
        content = target.read_text()
        if command == "view":
            return _shortened("".join(f"{i}\t{row}\n" for i, row in enumerate(content.splitlines(), 1)))
        if command == "replace":
            if not old or content.count(old) != 1:
                return f"error: `old` must occur in {path} exactly once, it occurs {content.count(old) if old else 0} times"
            target.write_text(content.replace(old, text))
            return f"changed {path}"
        if command == "insert":
            rows = content.splitlines(keepends=True)
            if not 0 <= line <= len(rows):
                return f"error: `line` must be between 0 and {len(rows)}"
            target.write_text("".join([*rows[:line], text if text.endswith("\n") else f"{text}\n", *rows[line:]]))
            return f"changed {path}"
        return f"error: unknown command {command!r}; there are view, create, replace and insert"


def make_tools(workspace: Workspace) -> list[Callable[..., Any]]:
    """The two tools of the agent, bound to its workspace."""

    @tool
    def shell(command: str) -> str:
        """Run a bash command line in the project's folder. Maven is `mvn`, offline where this machine has no network.

        Args:
            command: Like mvn -q clean verify 2>&1 | tail -n 60
        """
        return workspace.run(command)

    @tool
    def editor(command: str, path: str, text: str = "", old: str = "", line: int = 0) -> str:
        """View or change one file of the project.

        Args:
            command: view; create (writes `text`); replace (`old`, which occurs exactly once, by `text`); or insert
            path: Relative to the project's root, like src/main/java/example/Main.java
            text: The new text
            old: What to replace
            line: Insert after this line; 0 is the beginning
        """
        return workspace.edit(command, path, text, old, line)

    return [shell, editor]


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
