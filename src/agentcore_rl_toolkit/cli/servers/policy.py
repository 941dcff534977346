"""`agentcore-rl policy`: run and measure the built-in policy."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import click

from ..._installation import missing_extra
from ...errors import AgentCoreRLError, ConfigError, MissingExtraError
from ..options import allowed_hosts as _allowed_hosts
from ..options import as_json as _as_json
from ..output.screen import Command
from ..output.terminal import visible
from .vllm import command as vllm_command

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "jinja2", "starlette", "uvicorn", "httptools")


@click.group(name="policy")
def group() -> None:
    """The built-in policy: a small language model that runs and trains on a CPU."""


def _need_policy_extra() -> None:
    # Waiting threads of OpenMP spin by default, which steals the cores of everything else on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_extra(f"the policy needs {', '.join(missing)}", "policy")


@group.command(
    short_help="Serve the policy over an OpenAI-compatible API.",
    cls=Command,
    sections={
        "The model": ("weights", "served_model", "weight_version", "seed"),
        "This server": ("host", "port", "threads", "max_batch", "max_queue", "request_timeout"),
    },
)
@click.option("--weights", type=click.Path(path_type=Path), help="Policy directory (default: the shipped one).")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@click.option(
    "--ready-file", type=click.Path(path_type=Path), help="Write URL and process id here, as JSON, once listening."
)
@click.option("--parent-pid", type=int, help="Exit when this process is gone.")
@click.option("--served-model", default="policy", show_default=True, help="Model name that requests use.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads of one computation.")
@click.option(
    "--max-batch", default=64, show_default=True, type=click.IntRange(1), help="Completions that run at once."
)
@click.option(
    "--max-queue", default=1024, show_default=True, type=click.IntRange(1), help="Completions that wait before 429."
)
@click.option(
    "--request-timeout",
    default=120.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds per request.",
)
@click.option(
    "--stream-interval", default=8, show_default=True, type=click.IntRange(1), help="Tokens per streamed chunk."
)
@click.option("--seed", type=int, help="Seed of requests that bring none of their own.")
@_allowed_hosts
@click.option("--no-admin-key", is_flag=True, help="Let everybody who reaches it change its weights and pause it.")
@click.option("--weight-version", default=0, show_default=True, type=int, help="Version number of the weights loaded.")
def serve(
    weights: Path | None,
    host: str,
    port: int,
    ready_file: Path | None,
    parent_pid: int | None,
    served_model: str,
    threads: int,
    max_batch: int,
    max_queue: int,
    request_timeout: float,
    stream_interval: int,
    seed: int | None,
    allowed_hosts: tuple[str, ...],
    no_admin_key: bool,
    weight_version: int,
) -> None:
    """Serve the policy over an OpenAI-compatible API that also returns exact tokens.

    Endpoints: /v1/chat/completions, /v1/completions, /inference/v1/generate, /tokenize, /detokenize, /update_weights, /pause,
    /resume, /health, /v1/models, /metrics. Stop it with Ctrl-C or SIGTERM.

    /update_weights, /pause and /resume need an admin key: AGENTCORE_RL_POLICY_ADMIN_KEY, else one is made and its file named.
    """
    try:
        _need_policy_extra()
        from ...policy.server.process import ServeConfig
        from ...policy.server.process import serve as run

        run(
            ServeConfig(
                weights=weights,
                host=host,
                port=port,
                ready_file=ready_file,
                parent_pid=parent_pid,
                served_model=served_model,
                threads=threads,
                max_batch=max_batch,
                max_queue=max_queue,
                request_timeout_s=request_timeout,
                stream_interval=stream_interval,
                seed=seed,
                version=weight_version,
                allowed_hosts=allowed_hosts,
                admin_key=os.environ.get("AGENTCORE_RL_POLICY_ADMIN_KEY") or None,
                make_key=not no_admin_key,
            )
        )
    except AgentCoreRLError as e:
        click.echo(visible(f"Error: {e}"), err=True)
        sys.exit(2 if isinstance(e, (ConfigError, MissingExtraError)) else 1)


@group.command(short_help="Train and sample it over Tinker's wire format.")
@click.option("--weights", type=click.Path(path_type=Path), help="Policy directory (default: the shipped one).")
@click.option("--base-model", default="builtin/policy", show_default=True, help="Name that clients know it by.")
@click.option("--checkpoints", type=click.Path(path_type=Path), help="Directory that keeps what is saved.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@click.option("--ready-file", type=click.Path(path_type=Path), help="Written with url and pid once listening.")
@click.option("--parent-pid", type=int, help="Exit when this process is gone.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads of one computation.")
def tinker(
    weights: Path | None,
    base_model: str,
    checkpoints: Path | None,
    port: int,
    ready_file: Path | None,
    parent_pid: int | None,
    threads: int,
) -> None:
    """Train and sample the policy over Tinker's wire format: a rehearsal of a Tinker run on one machine.

    With TINKER_API_KEY in its environment it takes that key only, else any.
    """
    _need_policy_extra()
    import asyncio

    import torch

    from ..._servers.open_files import raise_file_limit
    from ...policy.finetuning import PolicyModel
    from ...policy.tinker.service import TinkerServer
    from ...policy.tinker.serving import serve as run

    raise_file_limit()
    torch.set_num_threads(threads)
    sys.setswitchinterval(
        0.0005
    )  # the computing threads give the interpreter lock away often; waiting for it costs more
    model = PolicyModel(base_model=base_model, weights=weights, checkpoint_dir=checkpoints)
    try:
        service = TinkerServer(model)
        service.api_key = os.environ.get("TINKER_API_KEY") or None
        asyncio.run(run(service, port=port, ready_file=ready_file, parent_pid=parent_pid))
    finally:
        model.close()


@group.command(short_help="Print its reward on held-out word problems.")
@click.option("--weights", type=click.Path(path_type=Path), help="Policy directory (default: the shipped one).")
@click.option("-n", "count", default=400, show_default=True, type=click.IntRange(1), help="Held-out problems.")
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0), help="Of the sampling.")
@click.option("--seed", default=0, show_default=True, help="Of problems and sampling.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads of one computation.")
@_as_json
def measure(weights: Path | None, count: int, temperature: float, seed: int, threads: int, as_json: bool) -> None:
    """Let the policy solve held-out word problems in this process; print its reward and its speed."""
    _need_policy_extra()
    import time

    import torch

    from ...policy.batch import Batch
    from ...policy.decoder import Decoder
    from ...policy.model import check_directory
    from ...policy.tokens import ChatTokenizer
    from ...policy.word_problems.rollouts import measure_batch

    torch.set_num_threads(threads)
    folder = check_directory(weights)
    batch = Batch(Decoder.from_directory(folder), ChatTokenizer.from_directory(folder), seed=seed)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    result = measure_batch(batch, n=count, seed=seed, temperature=temperature)
    wall_s, cpu_s = time.monotonic() - started_s, time.process_time() - started_cpu_s
    sampled = result.sampled_tokens * count
    hits = batch.prefixes.hit_tokens / batch.prefixes.asked_tokens
    if as_json:
        facts = {"problems": count, "wall_s": wall_s, "cpu_s": cpu_s, "prefix_cache_hits": hits}
        click.echo(json.dumps({**dataclasses.asdict(result), **facts}, indent=2))
        return
    click.echo(f"reward {result.reward:.3f}  calculator used {result.tool_use:.2f}  model calls {result.turns:.2f}")
    click.echo(
        f"{sampled / wall_s:,.0f} tokens/s; per rollout {result.sampled_tokens:.0f} tokens, {1000 * cpu_s / count:.1f} ms CPU; "
        f"{hits:.0%} of prompt tokens from the prefix cache"
    )


group.add_command(vllm_command)
