"""Real servers: our endpoint started by its command line, and moto's server as the oracle."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ACCESS, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
_names = itertools.count(1)


class Server:
    """One `agentcore-rl s3 serve` process."""

    def __init__(self, directory: Path, *options: str, credential: str | None = None) -> None:
        self.directory = directory
        ready = directory.with_name(directory.name + ".ready")
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "agentcore_rl_toolkit.cli", "s3", "serve", "--dir", str(directory)]
        command += ["--ready-file", str(ready), "--parent-pid", str(os.getpid()), *options]
        env = {**os.environ, **({"AGENTCORE_RL_CREDENTIALS": credential} if credential is not None else {})}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
        deadline = time.monotonic() + 180
        while not ready.exists():
            assert self.process.poll() is None, "the server ended before it was ready"
            assert time.monotonic() < deadline, "the server did not become ready"
            time.sleep(0.02)
        self.url: str = json.loads(ready.read_text())["url"]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)


def client_for(url: str, access: str = ACCESS, secret: str = SECRET, **config: Any) -> Any:
    """A boto3 client as anybody would make it, but with its own credentials and few retries."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=access,
        aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=30, **config),
    )


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Verifies signatures, as the default configuration of a careful user would."""
    running = Server(tmp_path_factory.mktemp("s3") / "data", credential=f"{ACCESS}:{SECRET}")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def s3(server: Server) -> Iterator[Any]:
    client = client_for(server.url)
    yield client
    client.close()


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[Any]:
    from moto.server import ThreadedMotoServer

    oracle = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    oracle.start()
    host, port = oracle.get_host_and_port()
    client = client_for(f"http://{host}:{port}")
    yield client
    client.close()
    oracle.stop()


@pytest.fixture
def bucket(s3: Any) -> str:
    name = new_bucket_name()
    s3.create_bucket(Bucket=name)
    return name


def new_bucket_name() -> str:
    return f"bucket-{os.getpid()}-{next(_names)}"


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start further servers; they are gone at the end of the test."""
    running: list[Server] = []

    def start(*options: str, directory: Path | None = None, credential: str | None = None) -> Server:
        running.append(Server(directory or tmp_path / "data", *options, credential=credential))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            each.kill()
