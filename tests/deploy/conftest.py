"""IAM, ECR, STS and S3 of moto, and the local control plane and runtime, as one account."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.backends import get_backend

from agentcore_rl_toolkit.deploy.calls import Calls
from agentcore_rl_toolkit.deploy.deployment import Deployment
from agentcore_rl_toolkit.deploy.settings import Settings
from agentcore_rl_toolkit.runtime.config import RuntimeConfig
from agentcore_rl_toolkit.runtime.http.app import RuntimeApp
from agentcore_rl_toolkit.runtime.runtime import Runtime
from serving import hosted, moto_server, serving

AGENT = """
from agentcore_rl_toolkit import AgentCoreRLApp

app = AgentCoreRLApp()


@app.rollout_entrypoint
def run(payload):
    if payload.get("fail"):
        raise ValueError("the agent does not like this payload")
    return {"rewards": float(len(payload["prompt"]))}


app.run()
"""


@contextlib.contextmanager
def empty_moto() -> Iterator[str]:
    """Where an AWS of moto's is, whose services of deployments have nothing."""
    for service in ("iam", "ecr", "s3", "bedrock-agentcore-control"):
        for regions in get_backend(service).values():
            for backend in regions.values():
                backend.reset()
    with moto_server() as moto:
        yield moto


def environment(moto: str, runtime: str) -> dict[str, str]:
    """The variables with which unmodified clients find both."""
    return {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": runtime,
        "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL": runtime,
        "AWS_ACCESS_KEY_ID": "AKLOCAL",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-west-2",
        "AWS_DEFAULT_REGION": "us-west-2",
    }


@contextlib.contextmanager
def an_aws(folder: Path) -> Iterator[dict[str, str]]:
    """An AWS for tests, and the environment in which unmodified clients find it."""
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    with empty_moto() as moto:
        options = ["--callers", "any", "--agent", f"other={agent}"]
        options += ["--session-env", f"AWS_ENDPOINT_URL_S3={moto}", "--session-env", "AWS_ALLOW_HTTP=true"]
        with serving(folder, "runtime", "serve", *options, AGENTCORE_RL_CREDENTIALS="AKLOCAL:secret") as info:
            yield {**environment(moto, info["url"]), "agent": str(agent)}


class NoProcesses:
    """A launcher whose agents are ready at once. It starts no session."""

    tier = "none"

    async def start(self, agent: Any = None) -> None:
        pass

    close = prepare = forget = start


@contextlib.contextmanager
def without_processes(folder: Path) -> Iterator[dict[str, str]]:
    """The same, with a control plane in this process, whose agents cannot be called."""
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    launcher: Any = NoProcesses()
    runtime = Runtime(RuntimeConfig(callers="any"), launcher=launcher)
    asyncio.run(runtime.start([("other", agent)]))
    with empty_moto() as moto, hosted(RuntimeApp(runtime)) as url:
        yield {**environment(moto, url), "agent": str(agent)}
    asyncio.run(runtime.close())


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with an_aws(tmp_path_factory.mktemp("aws")) as found:
        yield found


@pytest.fixture
def account(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return use(aws, monkeypatch)


def use(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let the test's clients find this AWS."""
    for name, value in aws.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials of whichever test first needed some
    return aws


def deployment(
    what: Settings, lines: list[str] | None = None, *, rehearse: bool = False, calls: Any = None
) -> Deployment:
    say = (lines if lines is not None else []).append
    return Deployment(what, calls or Calls(region=None, rehearse=rehearse, say=say))


@pytest.fixture
def image_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `docker` that answers `docker ps`, before the others on the path."""
    program = tmp_path / "programs" / "docker"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return program
