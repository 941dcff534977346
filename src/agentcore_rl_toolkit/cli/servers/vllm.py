"""vLLM as a service of a run: found in its own environment, started with the options that training needs, stopped with the run.

vLLM's environment does not have to contain this package: a folder on its PYTHONPATH has only this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from ..._servers.process import bind, stop_event, write_ready
from ...errors import ConfigError
from ..models import model_option
from ..options import with_process

ENGINE_PYTHON_ENV = "AGENTCORE_RL_ENGINE_PYTHON"
EXTENSION = "agentcore_rl_toolkit.weights.vllm_worker.WorkerExtension"
HERE = Path(".venvs/vllm/bin/python")
MODEL_ID = "policy"  # the name that requests use
STOP_S = 20.0
_PROBE = "import importlib.metadata as m; print(*(n for d in m.distributions() if 'vllm' in (n := d.metadata['Name'])))"
# One core for each other part of a run, and no search for free cores.
_ON_CPUS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def find_python() -> Path:
    """Return the Python of vLLM's environment. Raises: ConfigError with how to get one."""
    root = Path(__file__).resolve().parents[4]
    named = Path(os.environ[ENGINE_PYTHON_ENV]) if os.environ.get(ENGINE_PYTHON_ENV) else None
    places = [named] if named is not None else [Path.cwd() / HERE, root / HERE]
    for place in places:
        if place.is_file():
            return place.absolute()
    where = f"there is no {named}" if named is not None else f"there is none in {HERE}"
    raise ConfigError(
        f"engine vllm needs an environment with vLLM, and {where}: name its Python in {ENGINE_PYTHON_ENV}, "
        "or build one for CPUs with `make vllm-env` in a clone (2.8 GB)"
    )


def command_line(python: Path, model: Path, *, port: int, cpu: bool, more: list[str]) -> list[str]:
    """Return the command of a vLLM server for training."""
    line = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    line += ["--served-model-name", MODEL_ID, "--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
    line += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--worker-extension-cls", EXTENSION]
    # Logprobs at the sampling temperature, and no defaults of the model's generation_config.json.
    line += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if cpu:
        line += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32"]
    return line + more


def environment(folder: Path, *, cpu: bool) -> dict[str, str]:
    """Return the environment variables of vLLM. Only this package is linked into ``folder``, its PYTHONPATH."""
    package = Path(__file__).resolve().parents[2]
    (folder / package.name).symlink_to(package)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ours = {"PYTHONPATH": str(folder), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {**kept, **(_ON_CPUS if cpu else {}), **ours}


def context_of(model: Path) -> int | None:
    """Return the window of a model, in tokens, if its configuration has it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = json.loads((model / "config.json").read_text()).get("max_position_embeddings")
        return found if isinstance(found, int) else None
    return None


@click.command("vllm", short_help="Run vLLM on this machine for training.")
@model_option()
@with_process
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
def command(
    model: Path | None,
    port: int,
    ready_file: Path | None,
    parent_pid: int | None,
    more: tuple[str, ...],
) -> None:
    """Run vLLM for training: it listens on 127.0.0.1 only, and its weights can be replaced.

    Arguments after `--` go to vLLM.
    """
    from ...policy.model import WEIGHTS_DIR

    python = find_python()
    folder = (model or WEIGHTS_DIR).resolve()
    with tempfile.TemporaryDirectory(prefix="agentcore-rl-vllm-") as scratch:
        sys.exit(asyncio.run(_run(python, folder, Path(scratch), port, ready_file, parent_pid, list(more))))


async def _run(
    python: Path,
    model: Path,
    scratch: Path,
    port: int,
    ready_file: Path | None,
    parent_pid: int | None,
    more: list[str],
) -> int:
    probe = await asyncio.to_thread(subprocess.run, [str(python), "-c", _PROBE], capture_output=True, text=True)
    if "vllm" not in probe.stdout:
        raise ConfigError(
            f"{python} has no vLLM: {probe.stderr.strip()[-300:] or 'neither vllm nor vllm-cpu is installed'}"
        )
    cpu = "vllm-cpu" in probe.stdout
    held = bind("127.0.0.1", port)  # kept until the end: no other process gets the port, and vLLM may bind it too
    port = held.getsockname()[1]
    line = command_line(python, model, port=port, cpu=cpu, more=more)
    process = await asyncio.create_subprocess_exec(*line, env=environment(scratch, cpu=cpu), cwd=scratch)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(process.wait())]
    tasks.append(asyncio.create_task(stop_event(parent_pid).wait()))
    ready = asyncio.create_task(_announce(f"http://127.0.0.1:{port}", process.pid, ready_file))
    try:
        await asyncio.wait([*tasks, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()  # raises if the ready file cannot be written
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return process.returncode if process.returncode is not None else 0
    finally:
        for task in (*tasks[1:], ready):
            task.cancel()
        await _stop(process)
        held.close()


async def _announce(url: str, pid: int, ready_file: Path | None) -> None:
    await _until_ready(url)
    if ready_file is not None:
        write_ready(ready_file, {"url": url, "pid": pid})
    click.echo(f"vLLM listening on {url}", err=True)


async def _until_ready(url: str) -> None:
    """Return when vLLM has answered a request. Its first one takes a minute or more, so agents do not wait for it."""
    from ...gateway.http.client import request

    while True:
        with contextlib.suppress(Exception):  # nothing listens yet
            if (await request("GET", url + "/health"))[0] == 200:
                break
        await asyncio.sleep(0.5)
    body: dict[str, Any] = {"model": MODEL_ID, "prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 0}
    with contextlib.suppress(Exception):
        await request("POST", url + "/v1/completions", body=body, timeout_s=600)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
