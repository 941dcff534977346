"""The reply of a token engine: its bytes -> deltas for the agent, and the content for the record.

All ids and logprobs that the engine sampled are recorded. The agent's reply is read from them: without stop tokens, with calls
and reasoning taken apart, cut where a stop string begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import CaptureError
from ...messages.errors import NOT_JSON
from ...messages.render import AnswerForm, RenderedPrompt, Renderer, ReplyStream
from ...messages.wire import ModelRequest
from ...messages.wire.canonical import STOP, Choice, Delta, Usage
from ..capture.choice import ChoiceTokens
from ..capture.events import EventReader
from ..capture.record import CONSTRAINED, Captured
from ..engines import Piece

_to_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _SampledChoice:
    """A choice while it is sampled. ``parsed`` is the answer, once it has ended."""

    tokens: ChoiceTokens
    stream: ReplyStream
    parsed: Choice | None = None


@dataclass(eq=False, repr=False)
class TokenReply:
    """A request to an engine, and its reply.

    ``read_event`` reads the engine's format. ``reported`` is the last weight version that the engine named. ``form`` is that of
    the answer, if it may have a free part. ``untrainable`` is why no choice must be trained on. A captured reply has its
    ``choices``, and if its history can continue, their ``answers``: index, token ids, and message.
    """

    renderer: Renderer
    asked: ModelRequest
    prompt: RenderedPrompt | None
    reply_id: str = ""
    form: AnswerForm | None = None
    untrainable: str | None = None
    path: bytes = b""
    body: bytes = b""
    read_event: Callable[[Any], list[Piece]] = lambda event: []
    reported: int | str | None = None
    usage: Usage = field(default_factory=Usage)
    choices: list[Choice] = field(default_factory=list)
    answers: Sequence[tuple[int, Sequence[int], dict[str, Any]]] = ()
    _events: EventReader | None = None  # splits a stream
    _sampled: dict[int, _SampledChoice] = field(default_factory=dict)
    _finished: bool = False  # every choice that was asked for has ended
    _error: dict[str, Any] | None = None  # as the engine reports it inside a reply

    def read(self, body: bytes) -> None:
        self.add([body])

    def feed(self, data: bytes) -> list[Delta]:
        self._events = self._events or EventReader()
        return self.add(self._events.feed(data))

    def add(self, events: Sequence[Any]) -> list[Delta]:
        """Add the sampled tokens of events to their choices. Returns the deltas that they make. Raises: CaptureError."""
        asked, deltas = self.asked, list[Delta]()
        try:
            pieces = [piece for event in events for piece in self.read_event(event)]
        except NOT_JSON as e:
            raise CaptureError(f"the engine's reply cannot be read: {e}") from e
        for piece in pieces if len(pieces) < 2 else joined(pieces):
            if piece.error is not None:
                self._error = piece.error
                continue
            sampled = self._sampled.get(piece.choice)
            if sampled is None:
                renderer, opened = self.renderer, self.prompt is not None and self.prompt.opens_reasoning
                tools = (asked.tools or None) if asked.tool_choice != "none" else None
                parser = renderer.grammar.new_parser(tools=tools, reasoning_open=opened)
                stream = ReplyStream(
                    renderer.tokenizer,
                    renderer.stop_token_ids,
                    parser,
                    choice=piece.choice,
                    stops=asked.sampling.stop,
                )
                sampled = self._sampled[piece.choice] = _SampledChoice(ChoiceTokens(), stream)
            tokens = sampled.tokens
            deltas += sampled.stream.feed(piece.ids, final=piece.finish_reason is not None)
            tokens.add(piece.ids, piece.logprobs)
            if piece.weight_version is not None:
                self.reported = piece.weight_version
                tokens.add_version(piece.weight_version, first=piece.weight_version_first, tokens=bool(piece.ids))
            tokens.spans = piece.spans or tokens.spans
            if piece.routed_experts is not None:
                tokens.experts = piece.routed_experts
            if asked.logprobs and (entries := self._entries(tokens, len(piece.ids))):
                deltas.append(Delta(choice=piece.choice, logprob_entries=entries))
            if piece.finish_reason is None:
                continue
            # An engine that sampled past the stop string may report another reason. The answer ended at the string.
            stopped = sampled.stream.stopped is not None
            parsed = sampled.parsed = sampled.stream.parsed(STOP if stopped else piece.finish_reason)
            parsed.stop_sequence = parsed.stop_sequence or piece.stop_sequence
            self._finished = sum(each.parsed is not None for each in self._sampled.values()) == asked.n
            end = Delta(choice=piece.choice, finish_reason=parsed.finish_reason, final=self._finished)
            end.stop_sequence = parsed.stop_sequence
            deltas.append(end)
            if self._finished:
                counted = asked.counted or Usage()
                self.usage = Usage(prompt_tokens=counted.prompt_tokens, cached_tokens=counted.cached_tokens)
                self.usage.completion_tokens = sum(len(each.tokens.ids or ()) for each in self._sampled.values())
                deltas.append(Delta(usage=self.usage))
        return deltas

    def _entries(self, tokens: ChoiceTokens, count: int) -> list[dict[str, Any]]:
        """Return the logprobs that an agent asked for, of the last tokens: of all sampled ones, as vLLM does.

        Lists of different lengths make the turn invalid (`ChoiceTokens.record`). The agent gets the text without them.
        """
        ids: Sequence[int] = tokens.ids or ()
        logprobs = tokens.logprobs
        if not count or logprobs is None or len(logprobs) != len(ids):
            return []
        return self.renderer.logprob_entries(ids[-count:], logprobs[-count:], top=self.asked.top_logprobs > 0)

    def captured(self) -> Captured:
        prompt = self.prompt
        captured = Captured(
            choices=[],
            prompt=b"[]" if prompt is None else prompt.json,
            prompt_ids=b"" if prompt is None else prompt.packed,
            has_tokens=True,
            reply_id=self.reply_id,
            model=self.asked.model,
            usage=_to_json(self.usage.to_dict()),
            complete=self._finished,
            error=None if self._error is None else _to_json(self._error),
            untrainable=self.untrainable,
        )
        answers = []
        for index, sampled in sorted(self._sampled.items()):
            choice, ids = sampled.parsed or Choice(index=index), sampled.tokens.ids or []
            message = choice.to_message()
            record = sampled.tokens.record(
                captured,
                index,
                finish_reason=choice.finish_reason,
                message=_to_json(message),
                parse_status=choice.parse_status,
            )
            record.stop_sequence = choice.stop_sequence
            if self.asked.logprobs:
                choice.logprob_entries = self._entries(sampled.tokens, len(ids)) or None
            if self.form is not None:
                free = self.renderer.free_tokens(ids, self.form)
                record.free_tokens = None if free == len(ids) else free
                record.untrainable = None if free else CONSTRAINED
            self.choices.append(choice)
            answers.append((index, ids, message))
            captured.choices.append(record)
        if captured.complete and captured.error is None and all(ids for _, ids, _ in answers):
            self.answers = answers
            if prompt is not None:
                captured.parent_turn, captured.branch_reason = prompt.parent_turn, prompt.branch_reason
        return captured


def joined(pieces: list[Piece]) -> list[Piece]:
    """Join pieces of a choice that came together: their text is parsed and sent at once."""
    found: list[Piece] = []
    for piece in pieces:
        before = found[-1] if found else piece
        if before is piece or before.finish_reason is not None or _kind(before) != _kind(piece):
            found.append(piece)
            continue
        before.ids += piece.ids
        if before.logprobs is not None:
            before.logprobs += piece.logprobs or ()
        before.finish_reason, before.stop_sequence = piece.finish_reason, piece.stop_sequence
        before.routed_experts = piece.routed_experts or before.routed_experts
    return found


def _kind(piece: Piece) -> tuple[Any, ...]:
    first, last = piece.weight_version_first, piece.weight_version
    return piece.choice, first, last, piece.spans, piece.error, piece.logprobs is None
