"""The parts that all token calls of a gateway share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from ..._servers.tasks import Tasks
from ...errors import ConfigError, GatewayError
from ...messages.errors import unsupported
from ...messages.render import Renderer, call_format
from ...messages.wire import ModelRequest
from ..config import GatewayConfig
from ..engines import TOKEN_ENGINES, TokenEngine, constrained
from ..router import Worker
from ..sessions import Sessions
from ..store.writer import Store
from .histories import Histories

log = logging.getLogger(__name__)

CANCEL_S = 5.0
# A long prompt does not block a short one. Regexes and JSON still hold the interpreter's lock.
RENDERING_THREADS = 4
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

    def check(self, asked: ModelRequest) -> None:
        """Check that calls can keep a session's sampling parameters. Raises: RequestError that names the first that cannot."""
        asked.sampling.other |= asked.unknown
        self.require(asked, path="sampling_params.")
        if asked.top_logprobs:
            why = "token engines give the logprob of the sampled token alone; leave it out"
            raise unsupported("sampling_params.top_logprobs", why)
        read = self.renderer.template.all_text
        unread = [f"chat_template_kwargs.{name}" for name in asked.template_kwargs if name not in read]
        if asked.reasoning_effort is not None and not any(name in read for name in asked.template_options()):
            unread.append("reasoning_effort")
        if unread:
            raise unsupported(f"sampling_params.{unread[0]}", "the chat template has no such variable; leave it out")

    def require(self, asked: ModelRequest, *, path: str = "") -> None:
        """Check that the engine can do what is asked for, and have a required tool call enforced in the model's own format.

        Raises: RequestError.
        """
        asked.require(self.engine.features, engine=self.engine.name, allowed=self.allowed, path=path)
        grammar, one = self.renderer.grammar, asked.parallel_tool_calls is False
        forced = asked.tool_choice not in ("auto", "none")
        single = one and asked.tool_choice == "auto" and not constrained(asked)  # an answer in a form makes no calls
        if not asked.tools or not (forced or single):
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
