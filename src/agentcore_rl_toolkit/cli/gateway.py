"""`agentcore-rl gateway`: serve, and look at what was recorded."""

from __future__ import annotations

import click


@click.group()
def group() -> None:
    """Model gateway: stands between agents and inference servers and records the exact tokens of every session."""


@group.command()
@click.option("--upstream", "upstreams", multiple=True, metavar="URL", help="Inference server; repeat for several.")
@click.option(
    "--engine",
    type=click.Choice(["policy", "vllm", "sglang", "openai"]),
    default="policy",
    show_default=True,
    help="What the upstreams are. `openai` gives no tokens: calls are recorded as text and cannot be trained on.",
)
@click.option(
    "--upstream-key", default=None, help="API key for the upstreams [env: AGENTCORE_RL_GATEWAY_UPSTREAM_KEY]."
)
@click.option(
    "--store", "store_dir", type=click.Path(file_okay=False), default=None, help="Directory that keeps the calls."
)
@click.option("--fsync/--no-fsync", default=False, help="Wait for the disk before an agent gets the end of a reply.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 takes a free one.")
@click.option(
    "--ready-file", type=click.Path(dir_okay=False), default=None, help="Written with url and pid once listening."
)
@click.option("--parent-pid", type=int, default=None, help="Stop when this process is gone.")
@click.option(
    "--admin-key", default=None, help="Needed to listen beyond loopback [env: AGENTCORE_RL_GATEWAY_ADMIN_KEY]."
)
@click.option("--session-keys/--no-session-keys", default=True, help="Whether agents must send their session's key.")
@click.option("--implicit-sessions", is_flag=True, help="Let a call open its session (needs --no-session-keys).")
@click.option("--allow-upstream-host", multiple=True, metavar="PATTERN", help="Hosts that may be added while running.")
@click.option(
    "--retention-gb", type=float, default=None, help="Drop the oldest sessions beyond this size of the store."
)
@click.option("--retention-hours", type=float, default=None, help="Drop sessions older than this.")
@click.option("--call-timeout", type=float, default=1800.0, show_default=True, help="Seconds a model call may take.")
@click.option("--max-body-mb", type=float, default=64.0, show_default=True, help="Largest request body.")
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False),
    default=None,
    help="Directory with tokenizer and chat template: the gateway renders prompts and speaks token ids to the engine.",
)
@click.option("--context-tokens", type=int, default=None, help="The model's window, with --model.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes behind the port.")
@click.option("--weight-version", type=int, default=None, help="Version of the weights the upstreams start with.")
def serve(
    upstreams: tuple[str, ...],
    engine: str,
    upstream_key: str | None,
    store_dir: str | None,
    fsync: bool,
    host: str,
    port: int,
    ready_file: str | None,
    parent_pid: int | None,
    admin_key: str | None,
    session_keys: bool,
    implicit_sessions: bool,
    allow_upstream_host: tuple[str, ...],
    retention_gb: float | None,
    retention_hours: float | None,
    call_timeout: float,
    max_body_mb: float,
    model_dir: str | None,
    context_tokens: int | None,
    workers: int,
    weight_version: int | None,
) -> None:
    """Serve model calls to agents at URL/sessions/{session_id}/v1 and record them."""
    import asyncio

    from ..gateway.config import (
        ADMIN_KEY_ENV,
        UPSTREAM_KEY_ENV,
        GatewayConfig,
        Limits,
        UpstreamConfig,
        key_from_env,
    )
    from ..gateway.server import serve as run

    key = upstream_key or key_from_env(UPSTREAM_KEY_ENV)
    config = GatewayConfig(
        upstreams=tuple(UpstreamConfig(url=u, engine=engine, api_key=key) for u in upstreams),  # type: ignore[arg-type]  # click.Choice
        host=host,
        port=port,
        admin_key=admin_key or key_from_env(ADMIN_KEY_ENV),
        store_dir=store_dir,
        fsync=fsync,
        session_keys=session_keys,
        implicit_sessions=implicit_sessions,
        upstream_hosts=allow_upstream_host,
        retention_bytes=None if retention_gb is None else int(retention_gb * 2**30),
        retention_s=None if retention_hours is None else retention_hours * 3600,
        weight_version=weight_version,
        model_dir=model_dir,
        context_tokens=context_tokens,
        limits=Limits(call_s=call_timeout or None, body_bytes=int(max_body_mb * 2**20)),
    )
    if workers > 1:
        from ..gateway.processes import serve_sharded

        serve_sharded(config, workers, ready_file=ready_file, parent_pid=parent_pid)
        return
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:  # no wheel for this platform: slower, not different
        runner = asyncio.Runner()
    with runner:
        runner.run(run(config, ready_file=ready_file, parent_pid=parent_pid))


@group.command()
@click.argument("store", type=click.Path(exists=True, file_okay=False))
@click.argument("target", type=click.Path(dir_okay=False))
@click.option("--session", "sessions", multiple=True, help="Only these sessions; repeat for several.")
def export(store: str, target: str, sessions: tuple[str, ...]) -> None:
    """Write the turns of a STORE to TARGET, a .jsonl or .parquet file, one row per turn. The gateway must not be running."""
    from ..gateway.exporting import export as run

    turns, count = run(store, target, sessions=sessions or None)
    click.echo(f"{turns} turns of {count} sessions written to {target}")
