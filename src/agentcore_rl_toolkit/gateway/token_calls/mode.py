"""The parts that all token calls of a gateway share, and the changes that a session's settings make to a request."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..._servers.tasks import Tasks
from ...errors import ConfigError, GatewayError
from ...messages.dialects import ModelRequest
from ...messages.dialects.chat import forced_tools
from ...messages.errors import unsupported
from ...messages.render import Renderer, call_format
from ..config import GatewayConfig
from ..engines import TOKEN_ENGINES, TokenEngine
from ..sessions.registry import Sessions
from ..store.writer import Store
from ..upstreams.router import Worker
from .histories import Histories

log = logging.getLogger(__name__)

CANCEL_S = 5.0
RENDERING_THREADS = (
    4  # so that a long prompt does not block a short one; regexes and JSON still hold the interpreter's lock
)
_SAME = ("n", "logprobs", "top_logprobs", "parallel_tool_calls", "reasoning_effort", "response_format")
_OF_REQUEST = {**dict(zip(_SAME, _SAME, strict=True)), "chat_template_kwargs": "template_kwargs"}  # parameter -> member
_TOKENIZER = "tokenizer"  # a setting of the store


@dataclass
class TokenMode:
    """The model's renderer, the threads that use it, and the histories of the sessions."""

    renderer: Renderer
    executor: Executor
    histories: Histories
    context_tokens: int | None
    max_tokens: int
    engine: TokenEngine
    allowed: Collection[str]  # fields that pass whatever the engine is known to do
    tasks: Tasks = field(default_factory=Tasks)

    def check(self, params: Mapping[str, Any]) -> None:
        """Check that calls can keep a session's sampling parameters. Raises: RequestError that names the first that cannot."""
        asked = ModelRequest(dialect="chat", model="", tools=forced_tools(params))
        impose(asked, params)
        self.require(asked, path="sampling_params.")
        if asked.top_logprobs:
            why = "token engines give the logprob of the sampled token alone; leave it out"
            raise unsupported("sampling_params.top_logprobs", why)

    def require(self, asked: ModelRequest, *, path: str = "") -> None:
        """Check that the engine can do what is asked for, and have a required tool call enforced in the model's own format.

        Raises: RequestError.
        """
        asked.require(self.engine.features, engine=self.engine.name, allowed=self.allowed, path=path)
        grammar, one = self.renderer.grammar, asked.parallel_tool_calls is False
        forced = asked.tool_choice not in ("auto", "none")
        if not asked.tools or not (forced or (one and asked.tool_choice == "auto")):
            return
        tag = call_format(grammar, asked.tools, choice=asked.tool_choice, parallel=not one)
        if tag is None:
            feature = "tool_choice" if forced else "parallel_tool_calls"
            why = f"calls of this model's format ({grammar.name}) cannot be enforced"
            raise unsupported(path + asked.features()[feature], why)
        asked.response_format = {"type": "structural_tag", "format": tag}

    def cancel(self, worker: Worker, path: bytes, body: bytes) -> None:
        """Tell an engine to end a call, without waiting for its answer."""
        self.tasks.start(_tell(worker, path, body))


def load(directory: str, config: GatewayConfig, sessions: Sessions) -> TokenMode:
    """Token mode with the model in `directory`. Raises: ConfigError, MissingExtraError."""
    if config.kind == "openai":
        raise ConfigError("engine openai takes no token ids; leave --model out, or name another engine")
    renderer = Renderer.from_path(directory, template=config.template, parser=config.parser)
    _check_store(sessions.store, renderer)
    threads = ThreadPoolExecutor(RENDERING_THREADS, "gateway-render")
    return TokenMode(
        renderer,
        threads,
        Histories(sessions, renderer, threads, budget_bytes=config.limits.history_bytes),
        context_tokens=config.context_tokens,
        max_tokens=config.limits.default_max_tokens,
        engine=TOKEN_ENGINES[config.kind],
        allowed=config.allow_fields,
    )


def _check_store(store: Store, renderer: Renderer) -> None:
    """Raises: ConfigError when the store's prompts are of another vocabulary or template, whose ids are other words."""
    template = hashlib.blake2b(renderer.template.all_text.encode(), digest_size=16).hexdigest()
    own = f"{renderer.tokenizer.vocabulary_digest()} {template}"
    if store.next_call == 1:
        store.set(_TOKENIZER, own)
        store.commit()
    elif store.reader.value(_TOKENIZER) != own:
        raise ConfigError(
            f"the calls in {store.path} are of another model, chat template or mode: no session could go on. Give another --store"
        )


async def _tell(worker: Worker, path: bytes, body: bytes) -> None:
    try:
        status, answer = await worker.ask(path, body, timeout_s=CANCEL_S)
    except GatewayError as e:
        log.warning("%s did not take the end of a call: %s", worker.config.url, e)
        return
    if status != 200:
        log.warning("%s answered %d to the end of a call: %s", worker.config.url, status, answer[:200])


def impose(asked: ModelRequest, params: Mapping[str, Any]) -> None:
    """Put a session's sampling parameters in place of the agent's. The names are those of chat completions, and null is absent.

    A tool choice holds for calls that offer the tool.
    """
    sampling = asked.sampling
    given = {name: value for name, value in params.items() if value is not None}
    if "tools" in given:
        asked.tools = forced_tools(given)
    for name, value in given.items():
        if name in _OF_REQUEST:
            setattr(asked, _OF_REQUEST[name], value)
        elif name in ("max_tokens", "max_completion_tokens"):
            sampling.max_tokens = value
        elif name == "stop":
            sampling.stop = [value] if isinstance(value, str) else list(value)
        elif name == "tool_choice":
            named = value["function"]["name"] if isinstance(value, dict) else None
            if named is None and asked.tools:
                asked.tool_choice = value
            elif any(tool["function"]["name"] == named for tool in asked.tools):
                asked.tool_choice = f"tool:{named}"
        elif name != "other" and name in sampling.__struct_fields__:
            setattr(sampling, name, value)
        elif name != "tools":
            sampling.other = {**sampling.other, name: value}
