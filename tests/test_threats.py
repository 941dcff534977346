"""The threat table of the documentation is what the marked tests say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def threats() -> ModuleType:
    spec = importlib.util.spec_from_file_location("threats", ROOT / "scripts" / "threats.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["threats"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_holds_the_table_that_the_tests_make(threats: ModuleType) -> None:
    text = threats.PAGE.read_text()
    made = threats.page(text, threats.table(threats.threats()))
    assert made == text, "run: python scripts/threats.py --write"


def test_a_mark_that_lacks_a_field_is_named(threats: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text("@pytest.mark.threat(who='a session', tries='x')\ndef test_it() -> None: ...\n")
    with pytest.raises(ValueError, match=r"tests/test_x.py::test_it: a threat has who, tries, stopped_by, leaves"):
        threats.threats(folder)


def test_a_mark_becomes_a_row_below_its_attacker(threats: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_x.py").write_text(
        "@pytest.mark.threat(who='a session', tries='read a|b', stopped_by='the kernel', leaves='')\n"
        "async def test_reading() -> None: ...\n"
    )
    assert threats.table(threats.threats(folder)).splitlines() == [
        "### A session",
        "",
        "| tries to | is stopped by | what that leaves | test |",
        "|---|---|---|---|",
        "| read a\\|b | the kernel | - | `tests/test_x.py` reading |",
    ]
