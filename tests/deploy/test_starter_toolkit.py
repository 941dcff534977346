"""The image that AWS's starter toolkit generates for an agent with the vendored wheel: built, and run through one rollout.

The image's base has uv. Where its registry is out of reach, uv is installed into the base image of this machine.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.runtime.remote import RuntimeView
from serving import moto_server

from .test_example_images import BASES, Place, engine_storage, mounts, place, podman, reply, rollout, task_of

__all__ = ["engine_storage", "mounts", "place"]  # fixtures

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_agent"
PROJECT = """
[project]
name = "my-agent"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["openai>=1.60", "pydantic>=2.7"]

[tool.setuptools]
py-modules = []
"""

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(3000)]


def test_its_image_has_the_toolkit_and_ends_a_rollout(
    place: Place, mounts: list[str], make_environment: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "my-agent"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns(".*", "Dockerfile", "__pycache__"))
    (folder / "pyproject.toml").write_text(PROJECT)
    vendored = CliRunner().invoke(cli, ["deploy", "--vendor", str(folder)])
    assert vendored.exit_code == 0, vendored.output
    toolkit = Path(make_environment("starter-toolkit", "bedrock-agentcore-starter-toolkit==0.3.14"))
    words = ["--entrypoint", "rl_app.py", "--name", "my_rl_agent", "--requirements-file", "pyproject.toml"]
    words += ["--deployment-type", "container", "--non-interactive", "--disable-memory", "--region", "us-west-2"]
    with moto_server() as aws:
        given = {"AWS_ENDPOINT_URL": aws, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        command = [str(toolkit.parent / "agentcore"), "configure", *words]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **given}, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stdout + done.stderr
    dockerfile = folder / ".bedrock_agentcore" / "my_rl_agent" / "Dockerfile"
    base = dockerfile.read_text().partition("FROM ")[2].splitlines()[0]
    with_uv = tmp_path / "with-uv"
    with_uv.mkdir()
    (with_uv / "Dockerfile").write_text(f"FROM {BASES[0]}\nRUN pip install uv\n")
    build = ["build", "--format=docker", "--pull=never", "--network=host", *mounts]
    podman(*build, "--tag", base, str(with_uv))
    image = "localhost/agentcore-rl-examples/starter-toolkit:test"
    podman(*build, "--tag", image, "--file", str(dockerfile), str(folder))
    payload, reward = task_of(EXAMPLE)
    place.model.decide = reply
    try:
        ended = asyncio.run(rollout(place, RuntimeView(place.runtime).deploy(image, "starter_toolkit", {}), payload))
        assert (str(ended.outcome), ended.reward) == ("ok", reward), (ended.reason, ended.traceback)
    finally:
        podman("rmi", "--force", image, base, check=False)
