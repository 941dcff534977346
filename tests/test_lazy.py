"""Names that load on first use, and that type checkers see the same ones."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentcore_rl_toolkit

ROOT = Path(agentcore_rl_toolkit.__file__).parent
PACKAGES = sorted(p for p in ROOT.rglob("__init__.py") if "lazy(" in p.read_text())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "lazy_zoo"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from agentcore_rl_toolkit._lazy import lazy\n"
        "__all__, __getattr__, __dir__ = lazy(__name__, {'.cats': ('Lion', 'Lynx'), '.birds': ('Kiwi',)})\n"
    )
    (folder / "cats.py").write_text("class Lion: ...\nclass Lynx: ...\n")
    (folder / "birds.py").write_text("raise RuntimeError('nobody asked for birds')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in [name for name in sys.modules if name.split(".")[0] == folder.name]:
        del sys.modules[name]


def test_a_name_loads_its_module_on_first_use_and_no_other(package: str) -> None:
    zoo = __import__(package)
    assert "lazy_zoo.cats" not in sys.modules
    assert zoo.Lion is sys.modules["lazy_zoo.cats"].Lion
    assert vars(zoo)["Lion"] is zoo.Lion, "it is an ordinary name from then on"
    assert "Lynx" not in vars(zoo)
    assert "lazy_zoo.birds" not in sys.modules
    with pytest.raises(RuntimeError, match="nobody asked"):
        _ = zoo.Kiwi


@pytest.mark.parametrize("path", PACKAGES, ids=lambda p: p.parent.name)
def test_type_checkers_see_the_names_of_the_table_and_no_getattr(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert not [node for node in body if isinstance(node, ast.FunctionDef)], "with `__getattr__`, every name would pass"
    seen = {
        (f".{node.module}", alias.name, alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    (assignment,) = block.orelse
    assert isinstance(assignment, ast.Assign)
    assert isinstance(assignment.value, ast.Call)
    table = ast.literal_eval(assignment.value.args[1])
    assert seen == {(module, name, name) for module, names in table.items() for name in names}
    assert len(block.body) == sum(len(names) for names in table.values())
