"""Execute parts of a Dockerfile without a container engine: WORKDIR, ENV, ARG, COPY and ADD of files in its folder, and RUN.

FROM is ignored, because the programs are those of this machine. If a RUN cannot install its packages, the task needs an engine.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

_NO_EFFECT = frozenset(
    {
        "FROM",
        "USER",
        "EXPOSE",
        "CMD",
        "ENTRYPOINT",
        "LABEL",
        "VOLUME",
        "SHELL",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "MAINTAINER",
    }
)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Files to write below a folder, by path."""

    folder: str
    files: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command of the image's build."""

    argv: list[str]
    workdir: str
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps in their order, and the folder and variables after them."""

    steps: list[Copy | Run]
    workdir: str
    env: Mapping[str, str]


def plan(text: str, context: Mapping[str, bytes]) -> Plan:
    """Read a Dockerfile. ``context``: the files in its folder, by path. Raises: ValueError if it needs a container engine."""
    steps: list[Copy | Run] = []
    env: dict[str, str] = {}
    variables: dict[str, str] = {}
    workdir, stages = "/app", 0
    for word, rest in _instructions(text):
        if word == "FROM":
            stages += 1
            if stages > 1:
                raise ValueError("its Dockerfile has several stages")
        elif word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, _filled(rest, variables)))
            steps.append(Copy(folder=workdir, files={}))
        elif word == "ENV":
            env |= _pairs(rest, variables)
            variables |= env
        elif word == "ARG":
            name, _, value = rest.partition("=")
            variables.setdefault(name.strip(), _filled(value.strip("\"' "), variables))
        elif word in ("COPY", "ADD"):
            steps += _copies(_filled(rest, variables), context, workdir)
        elif word == "RUN":
            argv = json.loads(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
            steps.append(Run(argv=argv, workdir=workdir, env=dict(env)))
        elif word not in _NO_EFFECT:
            raise ValueError(f"its Dockerfile has {word}, which needs a container engine")
    return Plan(steps=steps, workdir=workdir, env=env)


def _instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(row for row in text.splitlines() if not row.lstrip().startswith("#")))
    if re.search(r"<<-?[\"']?\w+", joined):
        raise ValueError("its Dockerfile has a here-document, which needs a container engine")
    rows = (row.strip().partition(" ") for row in joined.splitlines() if row.strip())
    return [(word.upper(), rest.strip()) for word, _, rest in rows]


def _copies(rest: str, context: Mapping[str, bytes], workdir: str) -> list[Copy | Run]:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    while words and words[0].startswith("--"):
        option = words.pop(0)
        if option.startswith("--from"):
            raise ValueError("its Dockerfile copies from another image")
    if len(words) < 2 or any("://" in source for source in words[:-1]):
        raise ValueError(f"its Dockerfile has a COPY or ADD that needs a container engine: {rest}")
    *sources, target = words
    into_folder = target.endswith("/") or len(sources) > 1 or target in (".", "..")
    target = posixpath.normpath(posixpath.join(workdir, target))
    found: dict[str, bytes] = {}
    for source in sources:
        name = posixpath.normpath(source).lstrip("/")
        matching = {path: data for path, data in context.items() if fnmatch.fnmatchcase(path, name)}
        below = {path: data for path, data in context.items() if name == "." or path.startswith(f"{name}/")}
        if not matching and not below:
            raise ValueError(f"its Dockerfile copies {source}, which is not in environment/")
        for path, data in matching.items():
            single = len(matching) == 1 and not into_folder and posixpath.basename(target) != ""
            found[target if single else f"{target}/{posixpath.basename(path)}"] = data
        for path, data in below.items():
            found[f"{target}/{path if name == '.' else path.removeprefix(f'{name}/')}"] = data
    return [Copy(folder="/", files={path.lstrip("/"): data for path, data in found.items()})]


def _pairs(rest: str, variables: Mapping[str, str]) -> dict[str, str]:
    first = rest.partition(" ")[0]
    if "=" not in first:  # ENV NAME all of the rest
        return {first: _filled(rest.partition(" ")[2].strip(), variables)}
    return {name: _filled(value, variables) for name, _, value in (word.partition("=") for word in shlex.split(rest))}


def _filled(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: variables.get(m[1] or m[2], ""), text)
