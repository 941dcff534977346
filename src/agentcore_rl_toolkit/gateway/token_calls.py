"""Calls in which the gateway does the tokenising: messages become token ids here, the engine samples ids, ids become
the reply.

Turn k+1's prompt is turn k's prompt and completion with the new suffix behind it, token for token (`render`). Rendering
runs in a thread; what it costs grows with what is new, not with the session.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CaptureError
from .calls import Fields
from .capture import Captured
from .dialects import RequestError, context_overflow, deltas_of
from .dialects.canonical import STOP, TOOL_CALLS, Choice, Delta, Reply, Usage, new_id
from .engines import TOKEN_ENGINES, GenerationStream, Piece, TokenEngine
from .records import ChoiceRecord, pack_ids, pack_logprobs
from .render import Conversation, ParsedReply, RenderedPrompt, Renderer, ReplyStream
from .translated import SpokenCall
from .wire import reply

if TYPE_CHECKING:
    from .listener import AgentConnection
    from .server import Gateway
    from .sessions import Session

_to_json = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(Fields)


class TokenMode:
    """What all token calls of a gateway share: the model's renderer, and the thread that uses it."""

    def __init__(self, renderer: Renderer, executor: Executor, *, context_tokens: int | None, max_tokens: int) -> None:
        self.renderer = renderer
        self.executor = executor
        self.context_tokens = context_tokens
        self.max_tokens = max_tokens
        self.render_s = 0.0
        self.renders = 0


class _Growing:
    """One choice while it is sampled."""

    __slots__ = ("finish", "ids", "logprobs", "parsed", "routed_experts", "stop_sequence", "stream")

    def __init__(self, stream: ReplyStream) -> None:
        self.stream = stream
        self.ids: list[int] = []
        self.logprobs: list[float | None] | None = []
        self.finish: str | None = None
        self.stop_sequence: str | None = None
        self.routed_experts: bytes | None = None
        self.parsed: ParsedReply | None = None


class TokenCall(SpokenCall):
    """A call over a token engine, in any dialect."""

    __slots__ = (
        "conversation",
        "growing",
        "live",
        "mode",
        "prompt",
        "prompt_json",
        "reader",
        "token_engine",
        "used",
        "versions",
    )

    def __init__(
        self, gateway: Gateway, conn: AgentConnection, session: Session, dialect: str, mode: TokenMode
    ) -> None:
        super().__init__(gateway, conn, session, dialect)
        self.mode = mode
        self.prompt: RenderedPrompt | None = None  # until it is committed or abandoned
        self.used: RenderedPrompt | None = None
        self.prompt_json: bytes | None = None  # of a prompt that is no conversation
        self.growing: dict[int, _Growing] = {}
        self.live = False
        self.versions: list[int] = []
        self.reader: GenerationStream | None = None
        self.token_engine: TokenEngine = TOKEN_ENGINES["vllm"]
        if session.conversation is None:
            session.conversation = mode.renderer.conversation()
        self.conversation: Conversation = session.conversation

    # -- asking

    def _read(self, body: bytes, fields: Fields) -> Fields:
        settings = self.session.settings
        self.asked = self.speaks.parse_request(body)
        for name, value in settings.sampling_params.items():
            if name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty") or hasattr(
                self.asked.sampling, name
            ):
                setattr(self.asked.sampling, name, value)
            else:
                self.asked.sampling.other[name] = value
        self.n = self.asked.n
        self.reply_id = new_id("chatcmpl-")
        worker = self.gateway.router.pick(self.session.worker)
        if worker is not None:
            self.token_engine = TOKEN_ENGINES[worker.config.engine]
        self.asked.require(self.token_engine.features, engine=self.token_engine.name)
        # Text that a stop string ends is known only when it is there: such a reply is written in one piece.
        self.live = self.stream and not self.asked.sampling.stop
        said = self.asked.to_chat_body()
        if self.asked.prompt is not None:
            said.pop("messages", None)
            said["prompt"] = self.asked.prompt
        return _fields.decode(_to_json(said))

    def _compose(self, fields: Fields, path: bytes) -> None:
        """The engine's request needs the prompt, which a thread is about to make."""

    def _start(self) -> None:
        future = asyncio.get_running_loop().run_in_executor(self.mode.executor, self._render)
        future.add_done_callback(self._rendered)

    def _render(self) -> bytes:
        """Runs in a thread. The prompt's ids as JSON."""
        asked, renderer = self.asked, self.mode.renderer
        started = time.thread_time()
        if asked.prompt is not None:
            ids = asked.prompt
            if isinstance(ids, str):
                ids = renderer.encode(ids, add_special_tokens=asked.add_special_tokens)
            self.prompt_json = _to_json(ids)
            return self.prompt_json
        self.prompt = renderer.render(
            self.conversation, asked.messages, asked.tools or None, asked.template_options() or None
        )
        text = self.prompt.json
        self.mode.render_s += time.thread_time() - started
        self.mode.renders += 1
        return text

    def _rendered(self, future: asyncio.Future[bytes]) -> None:
        error = future.exception()
        if self.ended:
            self._abandon()
            return
        if error is not None:
            self._fail(
                error if isinstance(error, RequestError) else RequestError(f"the prompt cannot be rendered: {error}")
            )
            return
        try:
            self.path, self.body = self.token_engine.request(
                future.result(),
                self.asked,
                max_tokens=self._max_tokens(),
                stop_token_ids=sorted(self.mode.renderer.stop_token_ids),
                stream=self.live,
            )
        except RequestError as e:
            self._fail(e)
            return
        super()._start()

    def _max_tokens(self) -> int:
        asked, settings = self.asked.sampling.max_tokens, self.session.settings
        bound = min(asked or self.mode.max_tokens, settings.max_tokens or asked or self.mode.max_tokens)
        window = self.mode.context_tokens
        if window is None or self.prompt is None:
            return bound
        room = window - self.prompt.length
        if room < 1 or (asked is not None and asked > room):
            raise context_overflow(self.prompt.length, window, max_tokens=asked)
        return min(bound, room)

    # -- reading

    def _relay(self, data: bytes) -> None:
        if not self.live:
            return
        if self.reader is None:
            self.reader = self.token_engine.stream()
        try:
            deltas = [delta for piece in self.reader.feed(data) for delta in self._take(piece)]
        except CaptureError as e:
            self._stop_upstream()
            self._again_never(str(e))
            return
        if deltas:
            self._say(deltas)

    def _again(self, worker: Any, why: str) -> None:
        self.growing, self.reader, self.versions = {}, None, []
        super()._again(worker, why)

    def _take(self, piece: Piece) -> list[Delta]:
        """Add sampled tokens to their choice; the deltas they make."""
        growing = self.growing.get(piece.choice)
        if growing is None:
            stream = self.mode.renderer.stream(tools=self.asked.tools or None, prompt=self.prompt, choice=piece.choice)
            growing = self.growing[piece.choice] = _Growing(stream)
        if piece.weight_version is not None:
            self.versions.append(piece.weight_version)
        if piece.routed_experts is not None:
            growing.routed_experts = piece.routed_experts
        if piece.ids:
            if piece.logprobs is None:
                growing.logprobs = None
            elif growing.logprobs is not None:
                growing.logprobs += piece.logprobs
        growing.ids += piece.ids
        deltas = growing.stream.feed(piece.ids) if piece.ids else []
        # Lists of different lengths make the turn invalid (see `_capture`); the agent gets the text without them.
        if self.live and self.asked.logprobs and piece.ids and len(piece.logprobs or ()) == len(piece.ids):
            entries = self.mode.renderer.logprob_entries(piece.ids, piece.logprobs or ())
            deltas.append(Delta(choice=piece.choice, logprob_entries=entries))
        if piece.finish_reason is not None:
            deltas += growing.stream.finish()
            growing.parsed = growing.stream.parsed()
            growing.finish = growing.parsed.finish_reason(piece.finish_reason)
            growing.stop_sequence = piece.stop_sequence
            deltas.append(Delta(choice=piece.choice, finish_reason=growing.finish, stop_sequence=piece.stop_sequence))
            if all(g.finish is not None for g in self.growing.values()) and len(self.growing) == self.n:
                deltas.append(Delta(choice=piece.choice, usage=self._usage()))
        return deltas

    def _usage(self) -> Usage:
        prompt = self.prompt if self.prompt is not None else self.used
        return Usage(
            prompt_tokens=prompt.length if prompt is not None else None,
            completion_tokens=sum(len(g.ids) for g in self.growing.values()),
            cached_tokens=prompt.reused_tokens if prompt is not None else None,
        )

    def _said(self) -> list[Choice]:
        """The finished choices as the agent gets them: text after a stop string is not part of the answer."""
        choices = []
        for index, growing in sorted(self.growing.items()):
            parsed = growing.parsed
            if parsed is None:
                continue
            choice = Choice(
                index=index,
                content=parsed.content,
                reasoning=parsed.reasoning,
                tool_calls=parsed.tool_calls,
                finish_reason=growing.finish,
                stop_sequence=growing.stop_sequence,
                parse_status=parsed.status,
            )
            if self.asked.logprobs and growing.logprobs is not None and len(growing.logprobs) == len(growing.ids):
                choice.logprob_entries = self.mode.renderer.logprob_entries(growing.ids, growing.logprobs)
            for stop in self.asked.sampling.stop:
                at = choice.content.find(stop)
                if at >= 0:
                    choice.content = choice.content[:at]
                    choice.stop_sequence = stop
                    choice.finish_reason = TOOL_CALLS if choice.tool_calls else STOP
            choices.append(choice)
        return choices

    def _capture(self) -> Captured:
        if not self.live:
            for piece in self.token_engine.reply(self._body()):
                self._take(piece)
        captured = Captured(choices=[], has_tokens=True, reply_id=self.reply_id, model=self.asked.model)
        if self.prompt is not None:
            captured.prompt = self.prompt.json[1:-1]
        elif self.prompt_json is not None:
            captured.prompt = self.prompt_json[1:-1]
        if self.reader is not None and self.reader.error is not None:
            captured.error = _to_json(self.reader.error)
        if self.versions:
            captured.weight_version_first, captured.weight_version_last = self.versions[0], self.versions[-1]
        said = {choice.index: choice for choice in self._said()}
        captured.complete = len(said) == self.n
        for index, growing in sorted(self.growing.items()):
            logprobs = growing.logprobs
            packed: bytes | None = None
            if logprobs is None:
                captured.problem = f"choice {index} has token ids without logprobs"
            elif len(logprobs) != len(growing.ids):
                captured.problem = f"choice {index} has {len(growing.ids)} token ids and {len(logprobs)} logprobs"
            else:
                try:
                    packed = pack_logprobs(logprobs)  # type: ignore[arg-type]  # a None in it is what the check is for
                except CaptureError as e:
                    captured.problem = str(e)
            choice = said.get(index)
            captured.choices.append(
                ChoiceRecord(
                    index=index,
                    ids=pack_ids(growing.ids),
                    logprobs=packed,
                    finish_reason=choice.finish_reason if choice is not None else None,
                    parse_status=choice.parse_status if choice is not None else "none",
                    message=_to_json(choice.to_message() if choice is not None else {"role": "assistant"}),
                    routed_experts=growing.routed_experts,
                )
            )
        captured.usage = _to_json(
            {"prompt_tokens": self._usage().prompt_tokens, "completion_tokens": self._usage().completion_tokens}
        )
        self._commit(captured, said)
        return captured

    def _commit(self, captured: Captured, said: dict[int, Choice]) -> None:
        """Let the next turn go on from this one."""
        prompt = self.prompt
        if prompt is None:
            return
        if not captured.complete or captured.error is not None or any(not g.ids for g in self.growing.values()):
            self._abandon()
            return
        captured.parent_turn, captured.branch_reason = prompt.parent_turn, prompt.branch_reason
        last = len(said) - 1
        for place, (index, choice) in enumerate(sorted(said.items())):
            name = self.call_id if len(said) == 1 else f"{self.call_id}.{index}"
            self.mode.renderer.commit(
                self.conversation,
                prompt,
                self.growing[index].ids,
                choice.to_message(),
                turn_id=name,
                more=place < last,
            )
        self.prompt = None
        self.used = prompt

    def _abandon(self) -> None:
        prompt, self.prompt = self.prompt, None
        if prompt is not None:
            self.mode.renderer.abandon(self.conversation, prompt)

    # -- answering

    def _stream_end(self) -> bytes:
        if not self.live:
            self._say_all(deltas_of(self._reply()))
        return super()._stream_end()

    def _say_all(self, deltas: list[Delta]) -> None:
        if self.encoder is None:
            self.encoder = self.speaks.encoder(self.asked, reply_id=self.reply_id, model=self.asked.model)
            self.held = [self.encoder.start()]
        self.held = [*(self.held or []), *map(self.encoder.feed, deltas)]

    def _reply(self) -> Reply:
        return Reply(
            id=self.reply_id,
            model=self.asked.model,
            created=int(self.started_s),
            choices=self._said(),
            usage=self._usage(),
        )

    def _whole(self) -> bytes:
        return reply(200, self.speaks.encode_reply(self._reply(), self.asked), keep_alive=self.keep_alive)

    def _end(self, error: RequestError | None = None) -> None:
        self._abandon()
        super()._end(error)
