"""`agentcore-rl runtime ...`: a local AgentCore Runtime and a view into it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import Field

from ...backends.settings import SettingsGroup
from ...errors import ConfigError
from ...runtime.config import IsolationConfig, RuntimeConfig, TimeLimits
from ..options import as_json, settings_of, settings_option, with_server, with_sessions
from ..output.terminal import WaitReport, visible

_FOLDER = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def group() -> None:
    """Run a local AgentCore Runtime. It has the API of AWS, and an isolated process for each session.

    It needs no AWS account. AWS clients call it if AWS_ENDPOINT_URL_BEDROCK_AGENTCORE contains its address
    (AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL for the control plane).
    """


_TIMES = ("init_timeout", "idle_timeout", "invoke_timeout", "max_lifetime", "stop_grace", "stream_timeout")


class _Rare(SettingsGroup):
    """Settings of `runtime serve --set`. Units: seconds. ``tps`` and later fields replace the quota profile's."""

    region: str = RuntimeConfig.region
    account_id: str = RuntimeConfig.account_id
    start_mode: Literal["auto", "exec"] = RuntimeConfig.start_mode
    init_timeout: float = Field(TimeLimits.init_timeout_s, gt=0)
    idle_timeout: float = Field(TimeLimits.idle_timeout_s, gt=0)
    invoke_timeout: float = Field(TimeLimits.invoke_timeout_s, gt=0)
    max_lifetime: float = Field(TimeLimits.max_lifetime_s, gt=0)
    stop_grace: float = Field(TimeLimits.stop_grace_s, ge=0)
    stream_timeout: float = Field(TimeLimits.stream_timeout_s, gt=0)
    tps: float | None = Field(None, gt=0)
    new_sessions_per_minute: float | None = Field(None, gt=0)
    max_sessions: int | None = Field(None, gt=0)


def _credentials() -> dict[str, str]:
    """Take access keys and secrets out of AGENTCORE_RL_CREDENTIALS, which sessions must not inherit."""
    pairs = [word.partition(":") for word in os.environ.pop("AGENTCORE_RL_CREDENTIALS", "").split()]
    if not all(key and secret for key, _, secret in pairs):
        raise ConfigError(
            "AGENTCORE_RL_CREDENTIALS must contain KEY:SECRET, or several of them with spaces between them"
        )
    return {key: secret for key, _, secret in pairs}


@group.command()
@click.option("--agent", "agents", multiple=True, metavar="NAME=PATH.py", help="An agent to serve; repeatable.")
@with_server
@with_sessions
@click.option("--state-dir", type=_FOLDER, help="Keep the sessions' logs here [default: a temporary folder].")
@click.option(
    "--isolation",
    type=click.Choice(["auto", "process", "none", "container"]),
    default="auto",
    show_default=True,
    help="process: a Bubblewrap sandbox per agent; container: a container per session; none; auto: process if it is available.",
)
@click.option(
    "--runtime", "container_runtime", metavar="NAME", help="Docker's runtime for containers, such as runsc (gVisor)."
)
@click.option("--store", metavar="file:///DIR", help="The store to which sessions write their records.")
@click.option(
    "--hidden", multiple=True, type=click.Path(), metavar="PATH", help="A path that sessions cannot read; repeatable."
)
@click.option(
    "--copy",
    "copied",
    multiple=True,
    type=click.Path(),
    metavar="PATH",
    help="If the project is read-only for sessions, copy this path of it for each session; repeatable.",
)
@click.option(
    "--memory-mb", type=click.IntRange(1), help="Memory limit of each process of a session, or of its container."
)
@click.option(
    "--quotas", default="unlimited", show_default=True, help="Quotas to apply: unlimited, aws-2026 or aws-2025."
)
@click.option("--faults", "faults_file", type=_FILE, help="File with faults to inject, as TOML or JSON.")
@click.option(
    "--callers",
    type=click.Choice(["user", "any"]),
    default="user",
    show_default=True,
    help="Requests to accept: those with the key of the runtime (user), or all (any).",
)
@click.option(
    "--ray",
    "ray_address",
    metavar="ADDRESS",
    help="Address of a Ray cluster that runs the sessions; auto: the running cluster.",
)
@settings_option
def serve(**options: Any) -> None:
    """Serve agents until stopped.

    Requests must be signed with a key. The runtime creates a key, or uses AGENTCORE_RL_CREDENTIALS=KEY:SECRET.

    \b
    Settings of --set:
      region, account_id              of the agents' ARNs
      init_timeout, invoke_timeout,   limits in seconds
      stream_timeout, idle_timeout,
      max_lifetime
      stop_grace                      seconds from SIGTERM to SIGKILL
      tps, new_sessions_per_minute,   quotas, which override those of --quotas
      max_sessions
      start_mode                      auto: fork sessions if this is safe; exec: load the agent in each

    \b
    Example:
        agentcore-rl runtime serve --agent math=examples/strands_math_agent/rl_app.py
    """
    from ...runtime.agents.agent import parse_agent_option
    from ...runtime.api.faults import FaultPlan
    from ...runtime.api.quotas import profile
    from ...runtime.runtime import store_folder
    from ...runtime.service import run
    from ...runtime.wire import handed_environment, parse_environment

    rare = settings_of(options["words"], _Rare)
    credentials = _credentials()
    folder, memory = (options[name] for name in ("state_dir", "memory_mb"))
    config = RuntimeConfig(
        region=rare.region,
        account_id=rare.account_id,
        state_dir=folder.resolve() if folder is not None else None,
        session_env=handed_environment() | parse_environment(options["session_env"]),
        start_mode=rare.start_mode,
        times=TimeLimits(**{f"{name}_s": value for name, value in vars(rare).items() if name in _TIMES}),
        quotas=profile(
            options["quotas"],
            region=rare.region,
            tps=rare.tps,
            new_sessions_per_minute=rare.new_sessions_per_minute,
            max_sessions=rare.max_sessions,
        ),
        faults=FaultPlan.load(options["faults_file"]) if options["faults_file"] is not None else FaultPlan(),
        isolation=IsolationConfig(
            tier=options["isolation"],
            readable=tuple(map(Path, options["readable"])),
            writable=tuple(map(Path, options["writable"])),
            copied=tuple(Path(os.path.abspath(path)) for path in options["copied"]),
            hidden=set(map(Path, options["hidden"])),
            store=store_folder(options["store"]) if options["store"] is not None else None,
            memory_bytes=memory * 2**20 if memory is not None else None,
            container_runtime=options["container_runtime"],
        ),
        credentials=credentials,
        callers=options["callers"],
    )
    launcher = None
    if options["ray_address"] is not None:
        from ...runtime.cluster.cluster import Cluster

        launcher = Cluster(config, options["ray_address"])
    agents = [parse_agent_option(text) for text in options["agents"]]
    names = [name for name, _ in agents]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--agent {twice[0]}=... is given more than once; each agent needs a different name")
    run(
        config,
        agents,
        launcher=launcher,
        host=options["host"],
        port=options["port"],
        ready_file=options["ready_file"],
        parent_pid=options["parent_pid"],
        allowed_hosts=options["allowed_hosts"],
    )


_url_option = click.option("--url", help="The runtime's address [default: your newest running runtime].")


@group.command(short_help="Deploy an agent to a running runtime.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.option("--image", help="A container image instead of a file: one container per session.")
@click.option("--name", required=True, help="Name: a letter, then up to 47 letters, digits or underscores.")
@click.option(
    "--env",
    "env",
    multiple=True,
    metavar="K=V",
    help="A variable for this agent. K without a value copies it from this shell; repeatable.",
)
@_url_option
@as_json
def deploy(
    file: Path | None,
    image: str | None,
    name: str,
    env: tuple[str, ...],
    url: str | None,
    as_json: bool,
) -> None:
    """Deploy an agent to a running runtime: a file, or a container image.

    uv builds an environment for a file from the pyproject.toml (and uv.lock) or the requirements.txt next to it. If you
    deploy a name again, the agent gets a new version.
    """
    from ...runtime.remote import RuntimeView
    from ...runtime.wire import parse_environment

    if (file is None) == (image is None):
        raise ConfigError("give one of: an agent's FILE, --image NAME")
    view = RuntimeView.find(url)
    waiting = WaitReport(f"deploying {file or image}: its environment is built, then it is loaded")
    what = file.resolve() if file is not None else str(image)
    arn = view.deploy(what, name, parse_environment(env), on_wait=waiting)
    click.echo(json.dumps({"name": name, "arn": arn}) if as_json else arn)


@group.command()
@click.option("--all", "everything", is_flag=True, help="Also list sessions that have ended.")
@_url_option
@as_json
def ps(everything: bool, url: str | None, as_json: bool) -> None:
    """List sessions."""
    from ...runtime.remote import RuntimeView

    sessions = RuntimeView.find(url).sessions(ended=everything)
    if as_json:
        click.echo(json.dumps(sessions, indent=2))
        return
    form = "{:<40} {:<20} {:<16} {:>8} {:>9} {:>9} {:>6}  {}"
    click.echo(form.format("SESSION", "AGENT", "STATE", "PID", "AGE", "IDLE", "CALLS", "CAUSE").rstrip())
    for s in sessions:
        agent, cause = f"{s['agent']}:{s['version']}", (s.get("error") or "").partition("\n")[0][:120]
        times = (f"{s['age_s']:.0f} s", f"{s['idle_s']:.0f} s")
        line = form.format(s["session_id"], agent, s["state"], s["pid"] or "-", *times, s["invocations"], cause)
        click.echo(visible(line.rstrip()))


@group.command()
@click.argument("session")
@click.option("--follow", "-f", is_flag=True, help="Follow the output as it grows.")
@_url_option
def logs(session: str, follow: bool, url: str | None) -> None:
    """Print the output of SESSION, an id or the beginning of an id."""
    from ...runtime.remote import RuntimeView

    for text in RuntimeView.find(url).log(session, follow=follow):
        click.echo(visible(text), nl=False)


@group.command()
@click.argument("sessions", nargs=-1, required=True)
@_url_option
def stop(sessions: tuple[str, ...], url: str | None) -> None:
    """Stop SESSIONS, which are ids or the beginnings of ids."""
    from ...runtime.remote import RuntimeView

    view = RuntimeView.find(url)
    for session in sessions:
        click.echo(visible(f"stopped {view.stop(session)}"))
