"""The service on a port: in this process for tests and rehearsals, or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...._servers import keys
from ...._servers.open_files import raise_file_limit
from ...._servers.process import listen, stop_event, url_of, write_private, write_ready
from ...model import check_directory
from ...server.process import Server
from ..model import PolicyModel
from . import wire
from .app import SageMakerApp
from .control import Packages
from .job_app import JobRoutes
from .jobs import Jobs, Surroundings
from .sessions import Service

ACCESS_KEY = "local"
ENDPOINTS = (
    "AWS_ENDPOINT_URL_SAGEMAKER",
    "AWS_ENDPOINT_URL_SAGEMAKERTRAININGSESSIONRUNTIME",
    "AWS_ENDPOINT_URL_SAGEMAKERJOBRUNTIME",
    "SAGEMAKER_TRAINING_SESSION_ENDPOINT",  # these two are of the SDK `sagemaker-train`
    "SAGEMAKER_TRAINING_SESSION_RUNTIME_ENDPOINT",
)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A service that listens. ``app.faults`` may be changed at any time."""

    url: str
    secret: str = field(repr=False)
    app: SageMakerApp

    @property
    def endpoints(self) -> dict[str, str]:
        """The variables of the environment by which clients find the service."""
        return {**dict.fromkeys(ENDPOINTS, self.url), "AWS_DEFAULT_REGION": wire.REGION}

    @property
    def environment(self) -> dict[str, str]:
        """All variables that unmodified clients need."""
        return {**self.endpoints, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": self.secret}


@contextlib.contextmanager
def running(
    model: PolicyModel,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    checkpoint_dir: Path | None = None,
    tokenizer: Path | None = None,
    allowed_hosts: tuple[str, ...] = (),
    around: Surroundings | None = None,
) -> Iterator[Running]:
    """Serve a model on a thread of this process until the block ends. ``port`` 0 takes a free one. Our own clients of this user
    find its key by the address.

    ``checkpoint_dir``: the folder of a `PolicyModel` that keeps its weights, for the names of the model packages.
    ``tokenizer``: the folder that the hub names for the base model's tokenizer; None: the built-in policy's.
    ``around``: what multi-turn RL jobs need; None: there are no jobs.
    Raises: ConfigError (port in use).
    """
    secret = keys.make()
    with contextlib.closing(Service(model, Packages(checkpoint_dir))) as service, listen(host, port) as listener:
        url, jobs = url_of(listener), None
        if around is not None:
            jobs = JobRoutes(Jobs(model, service.packages, around, endpoint=url))
        credential, folder = (ACCESS_KEY, secret), str(check_directory(tokenizer))
        app = SageMakerApp(service, credential=credential, tokenizer=folder, jobs=jobs)
        server = Server(app, host, listener, allowed_hosts)

        async def serving() -> None:
            await server.serve(sockets=[listener])
            if around is not None:
                await around.close()

        key_file = keys.leave(keys.RUNTIME, url, f"{ACCESS_KEY}:{secret}") if keys.is_here(host) else None
        thread = threading.Thread(target=lambda: asyncio.run(serving()), name="sagemaker", daemon=True)
        thread.start()
        try:
            yield Running(url=url, secret=secret, app=app)
        finally:
            server.should_exit = True
            thread.join()
            keys.forget(key_file)


def serve(
    weights: Path | None,
    *,
    checkpoint_dir: Path | None,
    around: Callable[[PolicyModel], Surroundings],
    ready_file: Path | None,
    parent_pid: int | None,
    threads: int,
    seed: int | None,
    **server: Any,
) -> None:
    """Serve the policy until SIGTERM, SIGINT or the parent's end. ``server``: host, port and further names of `running`.

    Raises: ConfigError.
    """
    torch.set_num_threads(threads)
    raise_file_limit()
    model = PolicyModel(weights=weights, checkpoint_dir=checkpoint_dir, seed=seed or 0)
    with (
        contextlib.closing(model),
        running(model, checkpoint_dir=checkpoint_dir, tokenizer=weights, around=around(model), **server) as service,
        tempfile.TemporaryDirectory(prefix="agentcore-rl-sagemaker-") as folder,
    ):
        file = Path(folder) / "secret"
        write_private(file, service.secret)
        if ready_file is not None:
            write_ready(ready_file, {"url": service.url, "pid": os.getpid(), "secret_file": str(file)})
        print(f"SageMaker Training Sessions and multi-turn RL jobs at {service.url}", file=sys.stderr)
        secret = {"AWS_SECRET_ACCESS_KEY": f"$(cat {file})"}  # which stays out of logs
        for name, value in {**service.environment, **secret}.items():
            print(f"  export {name}={value}", file=sys.stderr, flush=True)
        asyncio.run(_until_stopped(parent_pid))


async def _until_stopped(parent_pid: int | None) -> None:
    await stop_event(parent_pid).wait()
