"""What an image and an archive are called, and what is in the folder they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentcore_rl_toolkit.deploy.artifact import digest_of, files_of, image_digest, put_wheel_beside


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text("app = 1\n")
    (tmp_path / "Dockerfile").write_text("FROM python\nCOPY wheels/ wheels/\nRUN pip install wheels/*.whl\n")
    return tmp_path


def test_an_image_has_the_same_name_before_and_after_its_wheel_lies_there(folder: Path) -> None:
    before = image_digest(folder, "linux/arm64")
    put_wheel_beside(folder)
    [wheel] = (folder / "wheels").iterdir()
    assert wheel.name.startswith("agentcore_rl_toolkit-")
    assert image_digest(folder, "linux/arm64") == before
    (folder / "agent.py").write_text("app = 2\n")
    assert image_digest(folder, "linux/arm64") != before


def test_a_killed_writer_of_a_wheel_leaves_nothing_in_the_image(folder: Path) -> None:
    put_wheel_beside(folder)
    [wheel] = (folder / "wheels").iterdir()
    before = image_digest(folder, "linux/arm64")
    half, old = wheel.with_name(f".{wheel.name}.4711"), wheel.with_name("agentcore_rl_toolkit-0.1.0-py3-none-any.whl")
    half.write_bytes(b"PK")
    old.write_bytes(b"PK")
    assert image_digest(folder, "linux/arm64") == before
    put_wheel_beside(folder)
    assert [path.name for path in (folder / "wheels").iterdir()] == [wheel.name]


def test_settings_of_this_machine_are_no_part_of_an_agent(folder: Path) -> None:
    before = digest_of(folder)
    (folder / ".env").write_text("AGENTCORE_AGENT_ARN=arn\nKEY=secret\n")
    assert digest_of(folder) == before
    assert ".env" not in [path.name for path in files_of(folder)]
