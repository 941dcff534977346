"""Names that load on first use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "lazy_zoo"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from agentcore_rl_toolkit._lazy import lazy\n"
        "TYPE_CHECKING = False\n"
        "if TYPE_CHECKING:\n"
        "    from .birds import Kiwi as Kiwi\n"
        "    from .cats import Lion as Lion\n"
        "    from .cats import Lynx as Lynx\n"
        "else:\n"
        "    __all__, __getattr__, __dir__ = lazy(__name__)\n"
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
