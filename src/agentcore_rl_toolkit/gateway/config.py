"""Settings of a gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from .._servers.host_check import is_loopback
from ..errors import ConfigError

Engine = Literal["policy", "vllm", "sglang", "sglang-experts", "tinker", "sagemaker", "openai"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
ForcedTools = Literal["wish", "constrain", "refuse"]
History = Literal["sampled", "template"]
REFUSED_FORM = "this gateway refuses calls that force a tool or a schema (forced_tools=refuse); leave it to the model"
_TOKENS_ONLY = ("sglang", "sglang-experts")  # SGLang's chat gives no token ids
SAMPLING_SERVICES = frozenset({"tinker", "sagemaker"})  # one service for a gateway, sampled by its client library
ADMIN_KEY_ENV = "AGENTCORE_RL_GATEWAY_ADMIN_KEY"
BUILT_IN = Path(__file__).parents[1] / "policy" / "weights"  # the built-in policy's tokenizer and chat template
BUILT_IN_CONTEXT = 1024
_KEY = re.compile(r"[!-~]+")  # what fits into a header as it is


@dataclass(frozen=True, kw_only=True)
class UpstreamConfig:
    """An engine of the gateway.

    ``api_path`` is the path of the server's OpenAI routes below the URL. ``worker_id`` and ``model_name`` are shown in lists of
    servers.
    Raises: ConfigError on a URL that is not http(s) with a host.
    """

    url: str
    engine: Engine = "vllm"
    api_key: str | None = field(default=None, repr=False)
    api_path: str = "/v1"
    worker_id: str | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port beyond 65535, half an IPv6 address
            fits = False
        if not fits:
            raise ConfigError(f"upstream {self.url!r} must look like http://host:port or https://host[:port]")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(
                f"upstream {parts.hostname!r}: give the key in AGENTCORE_RL_GATEWAY_UPSTREAM_KEY, and no query or fragment"
            )
        if self.engine not in ENGINES:
            raise ConfigError(f"engine {self.engine!r} is not one of {', '.join(ENGINES)}")
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise ConfigError(f"the api key of upstream {self.url!r} must be visible ASCII characters, without spaces")
        if self.api_path == "/v1":  # it may be given with its API's path
            object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))

    def url_of(self, route: str) -> str:
        """Return the URL of a route: a route that begins with ``/v1`` lies below ``api_path``."""
        if route.startswith("/v1/"):
            route = f"/{self.api_path.strip('/')}".rstrip("/") + route[3:]
        return self.url.rstrip("/") + route


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that protect agents from each other. Units: bytes, seconds."""

    body_bytes: int = 16 * 2**20  # a chat of 128k tokens reaches 6 MB; images may need more
    reply_bytes: int = 64 * 2**20  # a call with a longer reply fails
    header_bytes: int = 64 * 2**10  # one header
    call_s: float | None = 1800.0
    connect_s: float = 5.0
    idle_connection_s: float = 300.0  # the silence of a client between or in requests
    stream_idle_s: float = 600.0  # the silence of an engine's stream
    orphan_s: float = 20.0  # a call without a connection continues for this time: its agent may send the request again
    hold_s: float = 600.0  # the wait of a call during a pause
    outage_s: float = 0.0  # the wait of a call while all engines are down; 0: it fails at once
    keep_alive_s: float = 15.0  # silence until a stream gets a comment or a ping

    default_max_tokens: int = 4096  # the default of requests if prompts are rendered here


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The settings of a gateway process.

    ``engine`` is the kind of engines that are added later; with ``upstreams`` it is theirs.
    ``admin_key`` guards every route that is not an agent's; without one the gateway listens on loopback only.
    ``store_dir`` None keeps the calls in a temporary directory, which `stop` removes. ``fsync``
    makes an agent's reply wait for the disk, not only for the operating system. ``session_keys`` False lets agents
    call without the per-session key; a call to an unknown session opens it (rLLM's agents have no key).
    ``model_id`` replaces the model name that the agent sends; a session's own wins. ``allowed_hosts`` are more names of this
    server (`HostCheck`). ``allow_fields`` are further request fields that your engines take (not in `wire.passthrough`).
    ``train_constrained`` trains answers with a required form (a schema, a grammar, a tool call): the engine's logprobs are
    relative to the tokens that the form allows, so a trainer's differ.
    ``forced_tools`` decides about a request for a tool call or a schema. "constrain": the engine's grammar enforces it.
    "wish": the model is free, and the report's ``left_out`` counts the call. "refuse": the agent gets a 400. In token mode it
    is a wish if the engine, or the model's format, cannot enforce it.
    ``history`` "sampled": a prompt repeats the sampled tokens of the session. "template": the template renders the messages, as
    the engine does that serves the model. A turn whose prompt lost thinking starts a sequence.
    ``model_dir`` is a folder with tokenizer and chat template: the gateway renders prompts and sends token ids. Engine policy
    takes only token ids; its default is the built-in policy's folder.
    ``template`` is a file that replaces ``model_dir``'s chat template. ``parser`` is the name of an output parser (one of
    `render.parsers.GRAMMARS`) that replaces the parser of the template's text.
    Raises: ConfigError.
    """

    upstreams: tuple[UpstreamConfig, ...] = ()
    engine: Engine = "vllm"
    host: str = "127.0.0.1"
    port: int = 0
    admin_key: str | None = field(default=None, repr=False)
    store_dir: str | None = None
    fsync: bool = False
    session_keys: bool = True
    allowed_hosts: tuple[str, ...] = ()
    allow_fields: tuple[str, ...] = ()
    train_constrained: bool = False
    forced_tools: ForcedTools = "constrain"
    history: History = "sampled"
    model_id: str | None = None
    model_dir: str | None = None
    template: str | None = None
    parser: str | None = None
    context_tokens: int | None = None
    sampler: str | None = None  # the path of saved weights at a sampling service, or (Tinker) a base model
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.admin_key is not None and not _KEY.fullmatch(self.admin_key):
            raise ConfigError("the admin key must be visible ASCII characters, without spaces, and not empty")
        if self.admin_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without an admin key: anyone who reaches it could read every session. "
                f"Set {ADMIN_KEY_ENV}, or listen on 127.0.0.1"
            )
        engines = {u.engine for u in self.upstreams}
        if len(engines) > 1:
            raise ConfigError(
                f"one gateway has engines of one kind, not {', '.join(sorted(engines))}: start one for each"
            )
        if "policy" in engines and self.model_dir is None:  # it takes only token ids
            object.__setattr__(self, "model_dir", str(BUILT_IN))
            object.__setattr__(self, "context_tokens", self.context_tokens or BUILT_IN_CONTEXT)
        if engines & SAMPLING_SERVICES and (len(self.upstreams) > 1 or self.model_dir is None):
            raise ConfigError(
                f"engine {self.kind} takes token ids from one service: give --model DIR (tokenizer and chat template), and "
                "no other upstream"
            )
        if self.kind in _TOKENS_ONLY and self.model_dir is None:
            raise ConfigError("SGLang's chat gives no token ids: give --model DIR (tokenizer and chat template)")
        if self.model_dir is None and (self.template or self.parser or self.history == "template"):
            raise ConfigError("a template, a parser and history=template need --model DIR (with the tokenizer)")
        if self.sampler is not None and not engines & SAMPLING_SERVICES:
            raise ConfigError("a sampler is for the engines tinker and sagemaker only")

    @property
    def kind(self) -> Engine:
        """Return the kind of the engines."""
        return self.upstreams[0].engine if self.upstreams else self.engine
