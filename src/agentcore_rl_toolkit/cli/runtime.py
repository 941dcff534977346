"""`agentcore-rl runtime ...`: a local AgentCore Runtime and a view into it."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def group() -> None:
    """A local AgentCore Runtime: the AWS wire API, one isolated process per session, no AWS account.

    Point any AWS client at it with AWS_ENDPOINT_URL_BEDROCK_AGENTCORE.
    """


@group.command()
@click.option("--agent", "agents", multiple=True, metavar="NAME=PATH.py", help="An agent to serve; may be repeated.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 takes any free port.")
@click.option("--session-env", multiple=True, metavar="K=V", help="A variable every session sees; may be repeated.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep logs and deployed agents here [default: a temporary folder].",
)
@click.option(
    "--start",
    "start_mode",
    type=click.Choice(["auto", "fork", "exec"]),
    default="auto",
    show_default=True,
    help="fork: sessions are forked from a loaded agent; exec: each loads it anew; auto: fork where that is safe.",
)
@click.option(
    "--strict-snapshot", is_flag=True, help="Start every session from the same random state, as a snapshot does."
)
@click.option("--idle-timeout", default=900.0, show_default=True, help="Seconds until an idle session ends.")
@click.option("--max-lifetime", default=28_800.0, show_default=True, help="Seconds until any session ends.")
@click.option(
    "--init-timeout", default=30.0, show_default=True, help="Seconds a session has for its first healthy /ping."
)
@click.option(
    "--stop-grace", default=60.0, show_default=True, help="Seconds between SIGTERM and SIGKILL of a stopped session."
)
@click.option("--ready-file", type=click.Path(path_type=Path, dir_okay=False), help="Written as JSON once listening.")
@click.option("--parent-pid", type=int, help="Stop when this process is gone.")
def serve(
    agents: tuple[str, ...],
    host: str,
    port: int,
    session_env: tuple[str, ...],
    state_dir: Path | None,
    start_mode: str,
    strict_snapshot: bool,
    idle_timeout: float,
    max_lifetime: float,
    init_timeout: float,
    stop_grace: float,
    ready_file: Path | None,
    parent_pid: int | None,
) -> None:
    """Serve agents until stopped.

    Example: agentcore-rl runtime serve --agent math=examples/strands_math_agent/rl_app.py
    """
    from ..runtime.agents import parse_agent_option
    from ..runtime.config import RuntimeConfig
    from ..runtime.service import run
    from ..runtime.wire import parse_environment

    config = RuntimeConfig(
        state_dir=state_dir.resolve() if state_dir is not None else None,
        session_env=parse_environment(session_env),
        start_mode=start_mode,
        strict_snapshot=strict_snapshot,
        idle_timeout_s=idle_timeout,
        max_lifetime_s=max_lifetime,
        init_timeout_s=init_timeout,
        stop_grace_s=stop_grace,
    )
    run(
        config,
        [parse_agent_option(text) for text in agents],
        host=host,
        port=port,
        ready_file=ready_file,
        parent_pid=parent_pid,
    )
