"""`agentcore-rl gateway serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ...backends.settings import SettingsGroup
from ...gateway.config import ForcedTools, History
from ..models import Model
from ..options import from_environment, settings_of, settings_option, with_server


class _Rare(SettingsGroup):
    """Settings of `gateway serve --set`. Units: seconds, megabytes. The second group is `GatewayConfig`'s."""

    call_timeout: float = 1800.0
    outage_timeout: float = 120.0
    stream_timeout: float = 600.0
    orphan_timeout: float = 20.0
    body_mb: int = 16
    reply_mb: int = 64
    default_max_tokens: int = 4096

    train_constrained: bool = False
    forced_tools: ForcedTools = "constrain"
    history: History = "sampled"
    context_tokens: int | None = None
    allow_fields: tuple[str, ...] = ()
    fsync: bool = False


_CONFIG = ("train_constrained", "forced_tools", "history", "context_tokens", "allow_fields", "fsync")


@click.group()
def group() -> None:
    """Run a model gateway: a proxy between agents and engines that records the exact tokens of every session."""


@group.command(short_help="Serve model calls to agents, and record them.")
@click.option("--upstream", "upstreams", multiple=True, metavar="URL", help="Address of an engine; repeatable.")
@click.option(
    "--engine",
    type=click.Choice(["policy", "vllm", "sglang", "sglang-experts", "tinker", "sagemaker", "openai"]),
    default="vllm",
    show_default=True,
    metavar="NAME",
    help="The engine: policy (built in), vllm, sglang, sglang-experts, tinker, sagemaker, or openai (records no tokens).",
)
@from_environment("--upstream-key", "AGENTCORE_RL_GATEWAY_UPSTREAM_KEY")
@click.option(
    "--sampler", help="With --engine tinker or sagemaker: the path or ARN of saved weights, or a base model of Tinker."
)
@click.option("--store", "store_dir", type=click.Path(file_okay=False), help="Folder that keeps the recorded calls.")
@with_server
@from_environment("--admin-key", "AGENTCORE_RL_GATEWAY_ADMIN_KEY")
@click.option(
    "--no-admin-key",
    is_flag=True,
    help="Require no admin key: every user and program of this machine may administer the gateway.",
)
@click.option(
    "--no-session-keys",
    is_flag=True,
    help="Accept calls without a key. The first call of an unknown session opens this session.",
)
@click.option("--model-id", help="Name of the model that is sent to the engine, instead of the agent's name.")
@click.option(
    "--model",
    "model_dir",
    type=Model(weights=False),
    metavar="MODEL",
    help="Convert messages to token ids in the gateway, with the tokenizer and the chat template of this model.",
)
@click.option(
    "--template",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    help="With --model: a file that replaces the model's chat template.",
)
@click.option("--parser", help="Name of an output parser, which replaces the parser of the template.")
@settings_option
def serve(
    upstreams: tuple[str, ...],
    engine: Any,
    upstream_key: str | None,
    ready_file: Path | None,
    parent_pid: int | None,
    no_admin_key: bool,
    no_session_keys: bool,
    words: tuple[str, ...],
    **options: Any,
) -> None:
    """Serve model calls to agents at URL/sessions/{session_id}/v1 and record them.

    A call needs the key of its session, which a trainer opens. For a chat endpoint without sessions, use `agentcore-rl serve`.

    Keys come from the environment. AGENTCORE_RL_GATEWAY_ADMIN_KEY is the key of the administrator. If other machines can reach
    the gateway, it is required. Otherwise the gateway writes a new key into a file that only you can read.
    AGENTCORE_RL_GATEWAY_UPSTREAM_KEY is the key of the engines (with --engine tinker also TINKER_API_KEY).

    \b
    Settings of --set (those with * need --model):
      call_timeout        seconds for a model call; 0 is no limit
      outage_timeout      seconds that a call waits while all engines are down
      stream_timeout      seconds without data after which a stream of an engine fails
      orphan_timeout      seconds that a call continues after its agent has disconnected
      body_mb, reply_mb   largest request and largest reply
      default_max_tokens  * max_tokens of requests that do not set it
      context_tokens      * length of the model's context
      train_constrained   yes: train all tokens of replies that a schema or grammar restricted
      forced_tools        wish: the model decides if an agent forces a tool; refuse: an error
      history             * template: earlier replies as the chat template writes them
      allow_fields        request fields of the engine that agents may use, with commas
      fsync               yes: wait for the disk before the end of a reply is sent
    """
    import asyncio

    from ...gateway.config import GatewayConfig, Limits, UpstreamConfig
    from ...gateway.service import serve as run

    rare = settings_of(words, _Rare)
    key = upstream_key
    options["model_dir"] = str(options["model_dir"]) if options["model_dir"] else None
    if engine == "tinker":
        from ...gateway.sampling_services.tinker import KEY_ENV, service_url

        key = key or os.environ.get(KEY_ENV)
        paths = [u for u in upstreams if u.startswith("tinker://")]
        options["sampler"] = options["sampler"] or next(iter(paths), None)
        upstreams = tuple(u for u in upstreams if u not in paths) or (service_url(),)
    config = GatewayConfig(
        upstreams=tuple(UpstreamConfig(url=u, engine=engine, api_key=key) for u in upstreams),
        engine=engine,
        session_keys=not no_session_keys,
        **{name: getattr(rare, name) for name in _CONFIG},
        limits=Limits(
            call_s=rare.call_timeout or None,
            outage_s=rare.outage_timeout,
            stream_idle_s=rare.stream_timeout,
            orphan_s=rare.orphan_timeout,
            body_bytes=rare.body_mb * 2**20,
            reply_bytes=rare.reply_mb * 2**20,
            default_max_tokens=rare.default_max_tokens,
        ),
        **options,
    )
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:  # not available for this platform: slower, with the same results
        runner = asyncio.Runner()
    with runner:
        runner.run(run(config, ready_file=ready_file, parent_pid=parent_pid, make_key=not no_admin_key))
