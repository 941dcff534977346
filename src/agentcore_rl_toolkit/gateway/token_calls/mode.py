"""The parts that all token calls of a gateway share."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ..._servers.tasks import Tasks
from ...errors import ConfigError, GatewayError
from ...messages.errors import unsupported
from ...messages.render import AnswerForm, Conversation, Renderer, answer_form, relaxed, unread_calls
from ...messages.wire import ModelRequest
from ..config import REFUSED_FORM, GatewayConfig
from ..engines import TOKEN_ENGINES
from ..engines.base import SGLANG_FORMS, VLLM_FORMS
from ..engines.sampling_service import FEATURES
from ..router import Worker
from ..sessions import Session
from ..store.writer import Store

log = logging.getLogger(__name__)

CANCEL_S = 5.0
# The members of a request that hold its answer to a form, and their values without one.
_FORMS = {"tool_choice": "auto", "parallel_tool_calls": None, "response_format": None}
_ENGINE_FORMS = VLLM_FORMS | SGLANG_FORMS  # the engines' own names of forms
# A long prompt does not block a short one. Regexes and JSON still hold the interpreter's lock.
RENDERING_THREADS = 4
_TOKENIZER = "tokenizer"  # a setting of the store


class History:
    """A session's tokens: the next prompt extends the last one. They take some 15 bytes per token until the session is closed.

    One call at a time uses the conversation, in a rendering thread or the event loop. It holds ``order``, which calls get in the
    order in which they ask for it.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.order = asyncio.Lock()


class TokenMode:
    """The model's renderer, and the threads that use it.

    ``features`` are the `ModelRequest.features` that the engine supports.
    Raises: ConfigError, MissingExtraError.
    """

    def __init__(self, directory: str, config: GatewayConfig, store: Store) -> None:
        self.kind = config.kind
        if self.kind == "openai":
            raise ConfigError("engine openai takes no token ids; leave --model out, or name another engine")
        self.config = config
        self.renderer = Renderer.from_path(
            directory, template=config.template, parser=config.parser, history=config.history
        )
        if (problem := unread_calls(self.renderer)) is not None:
            log.warning("%s", problem)
        _check_store(store, self.renderer)
        self.executor = ThreadPoolExecutor(RENDERING_THREADS, "gateway-render")
        engine = TOKEN_ENGINES.get(self.kind)
        self.features = FEATURES if engine is None else engine.features
        self.tasks = Tasks()

    def history(self, session: Session) -> History:
        """Return the history of a session, which is empty after a restart of the gateway."""
        if session.history is None:
            session.history = History(self.renderer.conversation(now=session.created_s))
        history: History = session.history
        return history

    def check(self, asked: ModelRequest) -> None:
        """Check that calls can keep a session's sampling parameters. Raises: RequestError that names the first that cannot."""
        asked.sampling.other |= asked.unknown
        for feature in asked.features():
            if feature in _FORMS and not self._enforces(asked, feature):
                why = f"the engine ({self.kind}) cannot enforce it, or not in this model's format"
                raise unsupported(f"sampling_params.{feature}", f"{why} ({self.renderer.grammar.name}); leave it out")
            self._require(feature, f"sampling_params.{feature}")
        if asked.top_logprobs:
            why = "token engines report the logprob of the sampled token only; leave it out"
            raise unsupported("sampling_params.top_logprobs", why)
        read = self.renderer.template.all_text
        unread = [f"chat_template_kwargs.{name}" for name in asked.template_kwargs if name not in read]
        if asked.reasoning_effort is not None and not any(name in read for name in asked.template_options()):
            unread.append("reasoning_effort")
        if unread:
            raise unsupported(f"sampling_params.{unread[0]}", "the chat template has no such variable; leave it out")

    def require(self, asked: ModelRequest, features: Iterable[str]) -> Counter[str]:
        """Check that the engine supports the ``features`` of a request. A form that it cannot enforce becomes a wish.

        Returns the number of the wishes by kind. Raises: RequestError.
        """
        wishes: Counter[str] = Counter()
        wished = self.config.forced_tools == "wish"
        for feature in features:
            if feature in _FORMS or feature in _ENGINE_FORMS:
                if self.config.forced_tools == "refuse" and feature != "parallel_tool_calls":
                    raise unsupported(feature, REFUSED_FORM)
                if wished or (feature in _FORMS and not self._enforces(asked, feature)):
                    wishes[feature] += 1
                    if feature in _FORMS:
                        setattr(asked, feature, _FORMS[feature])
                    else:
                        del asked.sampling.other[feature]
                    continue
            self._require(feature, feature)
        return wishes

    def _supports(self, feature: str) -> bool:
        return feature in self.features or feature in self.config.allow_fields

    def _require(self, feature: str, field: str) -> None:
        if not self._supports(feature):
            raise unsupported(field, f"the engine ({self.kind}) does not support it; leave it out")

    def _enforces(self, asked: ModelRequest, feature: str) -> bool:
        """Return True if the engine, and the format of the model's calls, can hold an answer to this form."""
        known, forced = self._supports(feature), asked.tool_choice not in ("auto", "none")
        calls = self.renderer.grammar.tag is not None
        if feature == "response_format":  # calls must remain possible with tools
            return known and (calls or not asked.tools or asked.tool_choice != "auto")
        return known and calls and forced  # no grammar allows text or one call

    def form(self, asked: ModelRequest, *, opens_reasoning: bool) -> AnswerForm | None:
        """Return the form of an answer to a prompt, and put it into the request. None: the agent's form is enough."""
        wanted, schema = asked.response_format or {}, None
        if wanted.get("type") == "json_object":
            schema = {"type": "object"}
        elif wanted.get("type") == "json_schema":
            schema = wanted["json_schema"]["schema"]
            shape = {**wanted["json_schema"], "schema": relaxed(schema)}
            asked.response_format = {"type": "json_schema", "json_schema": shape}
        elif asked.tool_choice in ("auto", "none"):
            return None
        form = answer_form(
            self.renderer.grammar,
            asked.tools,
            choice=asked.tool_choice,
            parallel=asked.parallel_tool_calls is not False,
            schema=schema,
            thinking=self.renderer.thinking,
            opened=opens_reasoning,
        )
        if form is not None:
            asked.response_format = {"type": "structural_tag", "format": form.format}
        return form

    def cancel(self, worker: Worker, path: bytes, body: bytes) -> None:
        """Ask an engine to end a call, without waiting for its answer."""
        self.tasks.start(_tell(worker, path, body))


def constrained(asked: ModelRequest) -> bool:
    """Return True if the answer has a required form: its logprobs are then relative to the tokens that the form allows."""
    kind = (asked.response_format or {}).get("type", "text")
    return kind != "text" or not _ENGINE_FORMS.isdisjoint(asked.sampling.other)


def _check_store(store: Store, renderer: Renderer) -> None:
    """Raise ConfigError if the store's prompts have another vocabulary or template: their ids would be other words."""
    template = hashlib.blake2b(renderer.template.all_text.encode(), digest_size=16).hexdigest()
    own = f"{renderer.tokenizer.vocabulary_digest()} {template}"
    if store.next_call == 1:
        store.set(_TOKENIZER, own)
        store.commit()
    elif store.reader.value(_TOKENIZER) != own:
        raise ConfigError(
            f"the calls in {store.path} are of another model, chat template or mode, so sessions could not continue. "
            "Give another --store"
        )


async def _tell(worker: Worker, path: bytes, body: bytes) -> None:
    try:
        status, answer = await worker.ask(path, body, timeout_s=CANCEL_S)
    except GatewayError as e:
        log.warning("%s could not be asked to end a call: %s", worker.config.url, e)
        return
    if status != 200:
        log.warning("%s answered %d to the request to end a call: %s", worker.config.url, status, answer[:200])
