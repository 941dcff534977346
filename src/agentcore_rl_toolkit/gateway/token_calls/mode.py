"""The parts that all token calls of a gateway share, and the changes that a session's settings make to a request."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..._servers.tasks import Tasks
from ...errors import ConfigError, GatewayError
from ...messages.dialects import ModelRequest
from ...messages.render import Renderer
from ..config import GatewayConfig
from ..sessions.registry import Sessions
from ..store.writer import Store
from ..upstreams.router import Worker
from .histories import Histories

log = logging.getLogger(__name__)

CANCEL_S = 5.0
RENDERING_THREADS = 4  # a long prompt holds the interpreter's lock for a part of its time only, and delays no short one
_ASKED_ANYWAY = frozenset({"logprobs", "return_token_ids"})
_TOKENIZER = "tokenizer"  # a setting of the store


@dataclass
class TokenMode:
    """The model's renderer, the threads that use it, and the histories of the sessions."""

    renderer: Renderer
    executor: Executor
    histories: Histories
    context_tokens: int | None
    max_tokens: int
    tasks: Tasks = field(default_factory=Tasks)

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
    """Put a session's sampling parameters in place of the agent's. The names are those of chat completions."""
    sampling = asked.sampling
    for name, value in params.items():
        if name in _ASKED_ANYWAY:
            continue
        if name in ("max_tokens", "max_completion_tokens"):
            sampling.max_tokens = value
        elif name == "stop":
            sampling.stop = [value] if isinstance(value, str) else list(value or ())
        elif name == "n":
            asked.n = value
        elif name == "chat_template_kwargs":
            asked.template_kwargs = {**asked.template_kwargs, **value}
        elif name in ("reasoning_effort", "response_format"):
            setattr(asked, name, value)
        elif name != "other" and name in sampling.__struct_fields__:
            setattr(sampling, name, value)
        else:
            sampling.other = {**sampling.other, name: value}
