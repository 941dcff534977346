"""Fixtures: a scripted data plane over real HTTP, and clients on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from agentcore_rl_toolkit.client import RolloutClient
from scripted_runtime import TEST_CREDENTIALS, ScriptedRuntime

MakeClient = Callable[..., RolloutClient]


def script(**what: Any) -> dict[str, Any]:
    """A payload that tells the scripted runtime what the agent does."""
    return {"script": what}


@pytest.fixture
def runtime() -> Iterator[ScriptedRuntime]:
    with ScriptedRuntime() as runtime:
        yield runtime


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture(scope="session")
def boto3_session() -> boto3.Session:
    """One session for all tests: reading the service models takes longer than most of them."""
    return boto3.Session("test", "test", region_name="us-west-2")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, boto3_session: boto3.Session) -> None:
    for name, value in TEST_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", boto3_session)


@pytest.fixture
def make_client(runtime: ScriptedRuntime, store_url: str) -> Iterator[MakeClient]:
    """Make a client of the scripted runtime; closed after the test."""
    made: list[RolloutClient] = []

    def make(**options: Any) -> RolloutClient:
        options = {"endpoint_url": runtime.url, "tps_limit": 2000, **options}
        client = RolloutClient(runtime.arn, store_url, options.pop("exp_id", "exp"), **options)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(make_client: MakeClient) -> RolloutClient:
    return make_client()
