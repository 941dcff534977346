"""`agentcore-rl gateway serve`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import click

from ..models import Model
from ..options import from_environment, settings_of, settings_option, with_server


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rare:
    """Settings of `gateway serve --set`. Units: seconds, megabytes. The second group is `GatewayConfig`'s."""

    call_timeout: float = 1800.0
    outage_timeout: float = 120.0
    stream_timeout: float = 600.0
    orphan_timeout: float = 20.0
    body_mb: int = 16
    reply_mb: int = 64
    default_max_tokens: int = 4096

    train_constrained: bool = False
    forced_tools: Literal["wish", "constrain", "refuse"] = "constrain"
    history: Literal["sampled", "template"] = "sampled"
    context_tokens: int | None = None
    allow_fields: tuple[str, ...] = ()
    fsync: bool = False


@click.group()
def group() -> None:
    """Run a model gateway: a proxy between agents and engines that records the exact tokens of every session."""


@group.command(short_help="Serve model calls to agents and record them.")
@click.option("--upstream", "upstreams", multiple=True, metavar="URL", help="Engine; repeat it for several.")
@click.option(
    "--engine",
    type=click.Choice(["policy", "vllm", "sglang", "sglang-experts", "tinker", "sagemaker", "openai"]),
    default="vllm",
    show_default=True,
    metavar="NAME",
    help="policy (built in), vllm, sglang, sglang-experts, tinker, sagemaker, or openai, which reports no tokens.",
)
@from_environment("--upstream-key", "AGENTCORE_RL_GATEWAY_UPSTREAM_KEY")
@click.option(
    "--sampler", help="With --engine tinker or sagemaker: path or ARN of saved weights, or a base model of Tinker."
)
@click.option("--store", "store_dir", type=click.Path(file_okay=False), help="Directory that keeps the calls.")
@with_server
@from_environment("--admin-key", "AGENTCORE_RL_GATEWAY_ADMIN_KEY")
@click.option("--no-admin-key", is_flag=True, help="Let every user and program of this machine administer the gateway.")
@click.option(
    "--no-session-keys",
    is_flag=True,
    help="Take calls without a key. The first call of an unknown session opens it.",
)
@click.option("--model-id", help="Model name of every call; it replaces the agent's.")
@click.option(
    "--model",
    "model_dir",
    type=Model(weights=False),
    metavar="MODEL",
    help="Render prompts here with this model's tokenizer and chat template; the engine gets token ids.",
)
@click.option(
    "--template",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    help="File that replaces the model's chat template, with --model.",
)
@click.option("--parser", help="Name of an output parser; it replaces the parser of the template.")
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

    Keys come from the environment. AGENTCORE_RL_GATEWAY_ADMIN_KEY is the administrator's key, required beyond loopback.
    Without it, the gateway makes one, in a file that only you can read. AGENTCORE_RL_GATEWAY_UPSTREAM_KEY is the engines' key
    (with --engine tinker also TINKER_API_KEY).

    --set takes call_timeout (the seconds for a model call; 0: no limit), outage_timeout (the seconds for which a call waits while
    all engines are down), stream_timeout (the seconds for which an engine's stream may be silent), orphan_timeout (the seconds
    for which a call continues after its agent has disconnected: the agent may ask again), body_mb and reply_mb (the largest
    request and reply), default_max_tokens (for requests without max_tokens, with --model), context_tokens (the model's window,
    with --model), train_constrained=yes (train replies that a schema, grammar or tool call constrained), forced_tools=wish (do
    not force the model if an agent asks for a tool call or a schema; refuse: such a request gets an error), history=template
    (prompts as the chat template writes them, without earlier thinking, with --model), allow_fields (request fields of your
    engine that agents may use, with commas) and fsync=yes (wait for the disk before an agent gets the end of a reply).
    """
    import asyncio

    from ...gateway.config import GatewayConfig, Limits, UpstreamConfig, key_from_env
    from ...gateway.service import serve as run

    rare = settings_of(words, _Rare)
    key = upstream_key
    options["model_dir"] = str(options["model_dir"]) if options["model_dir"] else None
    if engine == "tinker":
        from ...gateway.sampling_services.tinker import KEY_ENV, service_url

        key = key or key_from_env(KEY_ENV)
        paths = [u for u in upstreams if u.startswith("tinker://")]
        options["sampler"] = options["sampler"] or next(iter(paths), None)
        upstreams = tuple(u for u in upstreams if u not in paths) or (service_url(),)
    config = GatewayConfig(
        upstreams=tuple(UpstreamConfig(url=u, engine=engine, api_key=key) for u in upstreams),
        engine=engine,
        session_keys=not no_session_keys,
        train_constrained=rare.train_constrained,
        forced_tools=rare.forced_tools,
        history=rare.history,
        context_tokens=rare.context_tokens,
        allow_fields=rare.allow_fields,
        fsync=rare.fsync,
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
