"""The table of who may import whom, and that light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import agentcore_rl_toolkit

ROOT = Path(agentcore_rl_toolkit.__file__).parent
ALWAYS = {"errors", "contract"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "contract": {"errors"},
    "_installation": {"errors"},
    "_bounded_http": {"_connection_room", "_host_check"},
    "_connection_room": {"_open_files"},
    "_host_check": set(),
    "_open_files": set(),
    "_parsing": set(),
    "_server_keys": {"errors"},
    "_portal": {"errors"},
    "logs": set(),
    "proof": set(),
    "store": {"_portal"},
    "app": {"store", "logs", "proof"},
    "reward": set(),
    "client": {"store", "logs", "proof", "_portal", "_connection_room", "_host_check"},
    "trajectory": set(),
    "gateway": {
        "trajectory",
        "store",
        "logs",
        "_portal",
        "_open_files",
        "_connection_room",
        "_host_check",
        "_installation",
        "_server_keys",
    },
    "runtime": {"store", "logs", "_parsing", "_open_files", "_bounded_http", "_host_check", "_installation"},
    "policy": {"logs", "_parsing", "_open_files", "_bounded_http", "_host_check", "_server_keys"},
    "backends": {
        "client",
        "gateway",
        "trajectory",
        "store",
        "logs",
        "_parsing",
        "_portal",
        "_bounded_http",
        "_connection_room",
        "_host_check",
        "_installation",
        "_server_keys",
    },
}


def part(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_parts(path: Path) -> set[str]:
    """Parts of this package that a module names in an import, anywhere in it (also inside functions)."""
    package = ["agentcore_rl_toolkit", *path.relative_to(ROOT).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [module] + [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            pieces = name.split(".")
            if (
                pieces[0] == "agentcore_rl_toolkit"
                and len(pieces) > 1
                and (pieces[1] in MAY_IMPORT or pieces[1] in ("cli", "view"))
            ):
                found.add(".".join(pieces[1:3]) if pieces[1] == "backends" else pieces[1])
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_module_imports_only_what_the_table_allows(path: Path) -> None:
    here = part(path)
    if here in ("cli", "view", "__init__", "__main__", "_examples"):
        return
    for other in imported_parts(path):
        name = other.split(".")[0]
        if here == "backends" and name == "backends":
            mine = path.relative_to(ROOT).parts[1]
            target = other.split(".")[1] if "." in other else ""
            # shared modules of the folder (collect, groups, ...) are files; another backend is a folder
            assert target == mine or not (ROOT / "backends" / target).is_dir() or not target, (
                f"{path.name} imports backend {target}"
            )
            continue
        assert name == here or name in ALWAYS or name in MAY_IMPORT[here], f"{here} must not import {name} ({path})"


LIGHT = {
    "agentcore_rl_toolkit": {"torch", "boto3", "starlette", "uvicorn", "obstore", "transformers"},
    "agentcore_rl_toolkit.contract": {"torch", "boto3", "starlette", "obstore", "asyncio"},
    "agentcore_rl_toolkit.errors": {"torch", "boto3", "starlette", "obstore"},
    "agentcore_rl_toolkit.trajectory": {"torch", "boto3", "starlette", "obstore", "numpy", "transformers"},
    "agentcore_rl_toolkit.store": {"torch", "boto3", "starlette", "uvicorn", "transformers"},
    "agentcore_rl_toolkit.app": {"torch", "transformers", "openai"},
    "agentcore_rl_toolkit.client": {"torch", "transformers", "starlette", "uvicorn"},
    "agentcore_rl_toolkit.gateway": {"torch", "boto3"},
    "agentcore_rl_toolkit.runtime": {"torch", "transformers", "boto3"},
    "agentcore_rl_toolkit.cli.main": {"torch", "transformers", "boto3", "starlette", "uvicorn", "obstore"},
}


@pytest.mark.parametrize("module", sorted(LIGHT))
def test_light_part_stays_light(module: str) -> None:
    code = f"import sys, {module}; print(' '.join(sorted(set(m.split('.')[0] for m in sys.modules))))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & LIGHT[module], f"{module} loads {sorted(loaded & LIGHT[module])}"
