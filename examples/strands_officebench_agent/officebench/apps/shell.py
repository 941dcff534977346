"""A shell of fourteen commands over the workspace. They are written in Python. They start no program, and no path leads out."""

from __future__ import annotations

import fnmatch
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from .. import documents
from ..errors import OfficeError
from ..workspace import Workspace

MAX_COMMAND = 4_000
MAX_SHOWN = 8_000
_SIGNS = "|&;<>()$`\n"


class ShellApp:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._commands: dict[str, Callable[[list[str], set[str]], str]] = {
            "ls": self._ls,
            "cat": self._cat,
            "head": self._head,
            "tail": self._tail,
            "wc": self._wc,
            "grep": self._grep,
            "find": self._find,
            "pwd": lambda words, options: "/testbed",
            "echo": lambda words, options: " ".join(words),
            "mkdir": self._mkdir,
            "touch": self._touch,
            "cp": self._cp,
            "mv": self._mv,
            "rm": self._rm,
        }

    def command(self, command: str) -> str:
        """Run shell commands in the workspace: ls, cat, head, tail, wc, grep, find, pwd, echo, mkdir, touch, cp, mv, rm.

        Several can be joined by && or ;, and > or >> writes what a command prints to a file. There are no pipes and no
        variables. Paths are relative to the workspace, which is /testbed: data/score.xlsx.

        Args:
            command: Like: mkdir data/old && mv data/a.docx data/old
        """
        if len(command) > MAX_COMMAND:
            raise OfficeError(f"the command is longer than {MAX_COMMAND} characters")
        try:
            lexer = shlex.shlex(command, posix=True, punctuation_chars=_SIGNS)
            lexer.whitespace_split, lexer.whitespace, lexer.commenters = True, " \t\r", ""
            words = list(lexer)
        except ValueError as e:
            raise OfficeError(f"the command cannot be read: {e}") from None
        outputs, line = [], list[str]()
        for word in [*words, ";"]:
            if word and word.strip("\n") in ("", ";", "&&"):
                if line:
                    outputs.append(self._run(line))
                line = []
            elif word not in (">", ">>") and word and all(character in _SIGNS for character in word):
                raise OfficeError(f"{word} is not understood: there are no pipes, variables or background commands")
            else:
                line.append(word)
        text = "\n".join(output for output in outputs if output)
        return text[:MAX_SHOWN] or "Done."

    def _run(self, words: list[str]) -> str:
        target = None
        for sign in (">>", ">"):
            if sign in words:
                at = words.index(sign)
                if at != len(words) - 2 or at == 0:
                    raise OfficeError(f"{sign} is followed by one file name, at the end of a command")
                target, words = (sign, words[-1]), words[:at]
                break
        name, arguments = words[0], words[1:]
        if name not in self._commands:
            raise OfficeError(f"there is no command {name}; there are {', '.join(self._commands)}")
        if name in ("echo", "find", "head", "tail"):
            options, plain = set[str](), arguments
        else:
            options = {letter for word in arguments if _is_option(word) for letter in word.lstrip("-")}
            plain = [word for word in arguments if not _is_option(word)]
            if name != "grep":
                plain = [found for word in plain for found in self._matching(word)]
        output = self._commands[name](plain, options)
        if target is None:
            return output
        sign, file = target
        before = self._workspace.read(file) if sign == ">>" and self._workspace.path(file).is_file() else b""
        self._workspace.write(file, before + f"{output}\n".encode())
        return ""

    def _matching(self, word: str) -> list[str]:
        """The names that a word with `*` or `?` stands for; the word itself if it has none or nothing matches."""
        if not any(sign in word for sign in "*?["):
            return [word]
        folder, _, pattern = word.rpartition("/")
        if any(sign in folder for sign in "*?["):
            raise OfficeError("* works only in the last part of a path")
        home = self._workspace.path(folder or ".")
        names = sorted(path.name for path in home.iterdir()) if home.is_dir() else []
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern) and not name.startswith(".")]
        return [f"{folder}/{name}" if folder else name for name in found] or [word]

    def _there(self, name: str) -> Path:
        path = self._workspace.path(name)
        if not path.exists():
            raise OfficeError(f"there is no file or folder {name}")
        return path

    def _ls(self, words: list[str], options: set[str]) -> str:
        lines = []
        for word in words or ["."]:
            path = self._there(word)
            if not path.is_dir():
                lines.append(word)
                continue
            if len(words) > 1 or "R" in options:
                lines.append(f"{word}:")
            inside = sorted(path.rglob("*") if "R" in options else path.iterdir())
            lines += [f"{other.relative_to(path).as_posix()}{'/' if other.is_dir() else ''}" for other in inside]
        return "\n".join(lines) or "(empty)"

    def _text(self, name: str) -> str:
        return documents.read_text(self._workspace.file(name))

    def _cat(self, words: list[str], options: set[str]) -> str:
        return "\n".join(self._text(word).rstrip("\n") for word in words)

    def _lines(self, words: list[str]) -> tuple[list[str], int]:
        """File names and number of lines of `head -n 5 file`, `head -5 file`."""
        files, count, rest = [], 10, iter(words)
        for word in rest:
            if word == "-n":
                word = f"-{next(rest, '')}"
            if word.startswith("-"):
                digits = word.lstrip("-").removeprefix("n")
                if not digits.isdecimal():
                    raise OfficeError(f"{word} is not understood: write -n 5")
                count = int(digits[:6])
            else:
                files.append(word)
        if not files:
            raise OfficeError("which file?")
        return files, count

    def _head(self, words: list[str], options: set[str]) -> str:
        files, count = self._lines(words)
        return "\n".join(line for file in files for line in self._text(file).splitlines()[:count])

    def _tail(self, words: list[str], options: set[str]) -> str:
        files, count = self._lines(words)
        return "\n".join(line for file in files for line in self._text(file).splitlines()[-count or None :])

    def _wc(self, words: list[str], options: set[str]) -> str:
        texts = [(word, self._text(word)) for word in words]
        return "\n".join(f"{len(t.splitlines())} {len(t.split())} {len(t.encode())} {word}" for word, t in texts)

    def _grep(self, words: list[str], options: set[str]) -> str:
        """Plain text, not patterns: a pattern of the policy's could take forever."""
        if len(words) < 2:
            raise OfficeError("write grep TEXT FILE")
        wanted, names = words[0], [found for word in words[1:] for found in self._matching(word)]
        files: list[str] = []
        for name in names:
            path = self._there(name)
            inside = sorted(other for other in path.rglob("*") if other.is_file()) if path.is_dir() else [path]
            files += [self._workspace.name(other) for other in inside]
        fold = str.lower if "i" in options else str
        lines = [(file, line) for file in files for line in self._text(file).splitlines() if fold(wanted) in fold(line)]
        return "\n".join(f"{file}: {line}" if len(files) > 1 else line for file, line in lines)

    def _find(self, words: list[str], options: set[str]) -> str:
        place, pattern = (words[0] if words and not words[0].startswith("-") else "."), "*"
        rest = words[1:] if words and not words[0].startswith("-") else words
        if rest[:1] in (["-name"], ["-iname"]) and len(rest) == 2:
            pattern = rest[1]
        elif rest:
            raise OfficeError("write find FOLDER or find FOLDER -name '*.pdf'")
        home = self._workspace.folder(place)
        found = [path for path in sorted(home.rglob("*")) if fnmatch.fnmatch(path.name.lower(), pattern.lower())]
        return "\n".join(self._workspace.name(path) for path in found)

    def _mkdir(self, words: list[str], options: set[str]) -> str:
        for word in words:
            if self._workspace.path(word).is_dir() and "p" not in options:
                raise OfficeError(f"{word} is there already")
            self._workspace.make_folder(word)
        return ""

    def _touch(self, words: list[str], options: set[str]) -> str:
        for word in words:
            if not self._there_or_none(word):
                self._workspace.write(word, b"")
        return ""

    def _there_or_none(self, name: str) -> Path | None:
        path = self._workspace.path(name)
        return path if path.exists() else None

    def _cp(self, words: list[str], options: set[str]) -> str:
        for source, target in self._pairs(words):
            if not source.is_dir():
                self._workspace.write(target, self._workspace.read(self._workspace.name(source)))
                continue
            if not options & {"r", "R", "a"}:
                raise OfficeError(f"{self._workspace.name(source)} is a folder: use cp -r")
            place = self._workspace.path(target)
            if place.is_relative_to(source):
                raise OfficeError("a folder cannot be copied into itself")
            self._workspace.make_folder(target)
            for inside in sorted(source.rglob("*")):
                copy = f"{target}/{inside.relative_to(source).as_posix()}"
                if inside.is_dir():
                    self._workspace.make_folder(copy)
                else:
                    self._workspace.write(copy, self._workspace.read(self._workspace.name(inside)))
        return ""

    def _mv(self, words: list[str], options: set[str]) -> str:
        for source, target in self._pairs(words):
            place = self._workspace.path(target)
            if source in (self._workspace.root, place) or place.is_relative_to(source):
                raise OfficeError(f"{target} is the same or is inside the moved folder")
            if place.exists() and place.is_dir():
                raise OfficeError(f"{target} is a folder that is there already")
            self._workspace.make_folder(self._workspace.name(place.parent))
            source.replace(place)
        return ""

    def _pairs(self, words: list[str]) -> list[tuple[Path, str]]:
        """Return each source of `cp` or `mv` with its new name."""
        if len(words) < 2:
            raise OfficeError("write SOURCE TARGET")
        *sources, target = words
        into = self._workspace.path(target).is_dir()
        if not into and (len(sources) > 1 or target.endswith("/")):
            raise OfficeError(f"there is no folder {target}")
        pairs = []
        for word in sources:
            source = self._there(word)
            pairs.append((source, f"{target.rstrip('/')}/{source.name}" if into else target))
        return pairs

    def _rm(self, words: list[str], options: set[str]) -> str:
        for word in words:
            path = self._there_or_none(word)
            if path is None:
                if "f" not in options:
                    raise OfficeError(f"there is no file or folder {word}")
            elif path == self._workspace.root:
                raise OfficeError("the workspace itself stays")
            elif not path.is_dir():
                path.unlink()
            elif options & {"r", "R"}:
                shutil.rmtree(path)
            else:
                raise OfficeError(f"{word} is a folder: use rm -r")
        return ""


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1
