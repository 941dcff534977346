"""The table of who may import whom, that light parts stay light, and how large a class may be."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentcore_rl_toolkit

ROOT = Path(agentcore_rl_toolkit.__file__).parent
ALWAYS = {"errors", "contract", "_lazy"}
MOST_MODULES = 14  # in one folder
SHARED = {"collection", "training"}  # folders of `backends` that every trainer may import
DOCUMENT = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()


def table(heading: str) -> list[list[str]]:
    """The cells of the document's table under this heading, row by row."""
    section = DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]


def names_in(text: str) -> list[str]:
    """What is named first in each pair of backticks: `a`, `b/`, and of `c/d` the c."""
    return re.findall(r"`(\w+)", text)


MAY_IMPORT = {
    part: set(names_in(allowed))
    for parts, _, allowed, *_ in table("Parts and their imports")
    for part in names_in(parts)
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]


def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in nodes_of(path) if not isinstance(node, ast.ClassDef)]


def part(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_parts(path: Path) -> set[str]:
    """Parts of this package that a module names in an import, anywhere in it (also inside functions)."""
    package = ["agentcore_rl_toolkit", *path.relative_to(ROOT).parts[:-1]]
    found: set[str] = set()
    for node in imports_of(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [module] + [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "agentcore_rl_toolkit" and len(pieces) > 1 and pieces[1] in MAY_IMPORT:
                found.add(".".join(pieces[1:3]) if pieces[1] == "backends" else pieces[1])
    return found


def test_modules_import_only_what_the_table_allows() -> None:
    wrong = set()
    for path in ROOT.rglob("*.py"):
        here = part(path)
        if here in ("cli", "view", "__init__", "__main__", "_examples"):
            continue
        mine = path.relative_to(ROOT).parts[1:2]
        for other in imported_parts(path):
            name, _, target = other.partition(".")
            if here == name == "backends":
                # what all trainers share are modules and these folders; another folder is another backend
                if target and (target,) != mine and target not in SHARED and (ROOT / "backends" / target).is_dir():
                    wrong.add(f"{path.relative_to(ROOT)} imports backend {target}")
            elif name != here and name not in ALWAYS | MAY_IMPORT[here]:
                wrong.add(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == set()


def rooms_of(part: str, cell: str) -> list[str]:
    """Folders, and modules of the part's own folder, highest first; each imports from those below it only, for types too."""
    below = names_in(re.sub(r"\([^)]*\)", "", cell))
    trainers = [folder.name for folder in sorted((ROOT / part).glob("*/")) if (folder / "__init__.py").exists()]
    return [*(t for t in trainers if t not in below), *below] if part == "backends" else below


ROOMS = {part: rooms_of(part, rooms) for [part], rooms in ((names_in(p), r) for p, r, *_ in table("Modules"))}
del ROOMS["cli"]  # a module per command


def imported_rooms(path: Path, name: str) -> Iterator[str]:
    """Rooms of the part ``name`` that a module names in an import, anywhere in it."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in imports_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            for alias in node.names:
                target = [*base, *(node.module.split(".") if node.module else []), alias.name]
                if target[0] == name and len(target) > 1 and target[1] in ROOMS[name]:
                    yield target[1]


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_import_from_rooms_below(name: str) -> None:
    rank = {room: place for place, room in enumerate(ROOMS[name])}
    parts = (ROOT / name).iterdir()
    found = {
        p.stem for p in parts if p.suffix == ".py" or any(f.is_file() and f.suffix != ".pyc" for f in p.rglob("*"))
    }
    assert found - {"__init__"} == set(rank), "a room is missing in the list, or is gone"
    upwards = set()
    for path in (ROOT / name).rglob("*.py"):
        here = path.relative_to(ROOT / name).parts[0].removesuffix(".py")
        if here != "__init__":
            upwards |= {(here, room) for room in imported_rooms(path, name) if rank[room] < rank[here]}
    assert not upwards


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_say_what_they_are(name: str) -> None:
    for room in ROOMS[name]:
        path = ROOT / name / room / "__init__.py"
        if any(path.parent.glob("*.py")):
            assert ast.get_docstring(tree_of(path)), f"{path} says not what lives there"


def test_no_folder_has_more_modules_than_a_newcomer_can_look_through() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in (ROOT, *ROOT.rglob("*")) if folder.is_dir()}
    assert {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > MOST_MODULES} == {}


def imported_modules(path: Path) -> Iterator[Path]:
    """Modules of the package that one names in an import, anywhere in it: for types and inside functions too."""
    package = path.relative_to(ROOT.parent).parts[:-1]
    for node in imports_of(path):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = package[: len(package) - node.level + 1] if node.level else ()
        folder = ROOT.parent.joinpath(*base, *(node.module.split(".") if node.module else ()))
        for alias in node.names:
            places = (folder / f"{alias.name}.py", folder / alias.name / "__init__.py", folder.with_suffix(".py"))
            found = next((p for p in (*places, folder / "__init__.py") if p.is_file()), None)
            if found is not None and found.is_relative_to(ROOT) and found != path:
                yield found


def test_no_modules_import_each_other_in_a_circle() -> None:
    following = {path: set(imported_modules(path)) for path in ROOT.rglob("*.py")}
    while ends := {path for path, others in following.items() if not others}:  # what imports nothing is in no circle
        following = {path: others - ends for path, others in following.items() if path not in ends}
    circles = set()
    for path in following:
        reached, new = set(), set(following[path])
        while new:
            reached |= new
            new = {other for known in new for other in following[known]} - reached
        if path in reached:
            circles.add(path.relative_to(ROOT).as_posix())
    assert circles == set()


MOST_ATTRIBUTES = 20  # of one class: what its methods assign on self


def attributes(node: ast.ClassDef) -> set[str]:
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def test_no_class_holds_more_than_a_reader_can_keep_in_mind() -> None:
    classes = [(path, node) for path in ROOT.rglob("*.py") for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    larger = {f"{path} {node.name}": n for path, node in classes if (n := len(attributes(node))) > MOST_ATTRIBUTES}
    assert larger == {}


def test_only_calls_of_jobs_load_dialects() -> None:
    app = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "app").rglob("*.py") if "messages" in imported_parts(path)
    }
    assert app == {"app/sagemaker/translation.py"}


# Parts in the order in which a process imports them, with what none of them so far may have loaded.
LIGHT = {
    "agents and trainers": {
        "errors": {"torch", "boto3", "starlette", "uvicorn", "obstore", "transformers", "asyncio"},
        "contract": {"torch", "boto3", "starlette", "uvicorn", "obstore", "transformers", "asyncio"},
        "isolation": {"torch", "boto3", "uvicorn", "starlette", "httptools", "obstore", "msgspec"},
        "trajectory": {"torch", "boto3", "starlette", "obstore", "numpy", "transformers"},
        "weights": {"torch", "transformers", "boto3", "starlette", "obstore", "msgspec"},
        "runs": {"torch", "boto3", "starlette", "obstore", "numpy", "transformers", "tokenizers"},
        "messages.wire": {"torch", "boto3", "obstore", "httptools", "tokenizers", "transformers"},
        "cli.main": {"torch", "transformers", "boto3", "starlette", "uvicorn", "obstore"},
        "store": {"torch", "boto3", "starlette", "uvicorn", "transformers"},
        "client": {"torch", "transformers", "starlette", "uvicorn"},
        "app": {"torch", "transformers", "openai"},
    },
    "agents": {
        "app": {"msgspec", "obstore", "torch", "transformers", "openai"},
        "app.deployed.start": {"httpx", "aiohttp", "uvicorn"},  # agents' environments may lack the first two
        "app.deployed.served": {"httpx", "aiohttp"},
    },
    "servers": {
        "gateway": {"torch", "transformers", "boto3"},
        "runtime": {"torch", "transformers", "boto3", "aiodocker"},
    },
}


@pytest.mark.parametrize("process", LIGHT)
def test_light_parts_stay_light(process: str) -> None:
    code = (
        "import importlib, json, sys\n"
        "for name, banned in json.loads(sys.argv[1]).items():\n"
        "    importlib.import_module('agentcore_rl_toolkit.' + name)\n"
        "    loaded = set(banned) & set(sys.modules)\n"
        "    assert not loaded, f'{name} loads {sorted(loaded)}'\n"
    )
    banned = json.dumps({name: sorted(modules) for name, modules in LIGHT[process].items()})
    command = [sys.executable, "-W", "ignore", "-c", code, banned]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
