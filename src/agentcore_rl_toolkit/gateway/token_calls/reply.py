"""The sampled choices of one token call: pieces of an engine's answer -> deltas for the agent, records for the store.

The ids and logprobs that are recorded are what the engine sampled, all of them. What the agent sees is read from them:
without stop tokens, with calls and reasoning taken apart, cut where a stop string begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import CaptureError
from ..capture.record import ChoiceRecord, pack_ids, pack_logprobs
from ..capture.reply import Captured
from ..capture.versions import Versions, put
from ..dialects import Request
from ..dialects.canonical import STOP, Choice, Delta, Usage
from ..engines import Piece
from ..render import ParsedReply, RenderedPrompt, Renderer, ReplyStream

_to_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Growing:
    """One choice while it is sampled. ``shown``: ids whose logprobs the agent has."""

    stream: ReplyStream
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = field(default_factory=list)
    finish: str | None = None
    stop_sequence: str | None = None
    routed_experts: bytes | None = None
    parsed: ParsedReply | None = None
    versions: Versions = field(default_factory=Versions)
    spans: list[tuple[int, int]] | None = None
    shown: int = 0


class TokenReply:
    """See the module.

    ``raw`` are the prompt's ids of a text completion, whose text is given out as it was sampled.
    """

    def __init__(
        self, renderer: Renderer, asked: Request, prompt: RenderedPrompt | None, *, raw: Sequence[int] | None = None
    ) -> None:
        self._raw = raw
        self._renderer = renderer
        self._asked = asked
        self._prompt = prompt
        self._growing: dict[int, _Growing] = {}

    @property
    def finished(self) -> bool:
        """Whether every choice that was asked for has ended."""
        return len(self._growing) == self._asked.n and all(g.finish is not None for g in self._growing.values())

    @property
    def empty(self) -> bool:
        """Whether a choice has no tokens: nothing can go on from it."""
        return not self._growing or any(not g.ids for g in self._growing.values())

    def ids(self, index: int) -> list[int]:
        return self._growing[index].ids

    def take(self, piece: Piece) -> list[Delta]:
        """Add sampled tokens to their choice; the deltas they make."""
        growing = self._growing.get(piece.choice)
        if growing is None:
            growing = self._growing[piece.choice] = _Growing(self._stream(piece.choice))
        if piece.weight_version is not None:
            growing.versions.said(piece.weight_version, tokens=bool(piece.ids))
            growing.versions.spans(piece.weight_version_first, piece.weight_version)
        growing.spans = piece.spans or growing.spans
        if piece.routed_experts is not None:
            growing.routed_experts = piece.routed_experts
        if piece.ids:
            if piece.logprobs is None:
                growing.logprobs = None
            elif growing.logprobs is not None:
                growing.logprobs += piece.logprobs
        growing.ids += piece.ids
        deltas = growing.stream.feed(piece.ids) if piece.ids else []
        if piece.finish_reason is not None:
            deltas += growing.stream.finish()
        deltas += self._entries(piece.choice, growing)
        if piece.finish_reason is not None:
            self._finish(growing, piece)
            end = Delta(choice=piece.choice, finish_reason=growing.finish, stop_sequence=growing.stop_sequence)
            deltas.append(end)
            if self.finished:
                deltas.append(Delta(choice=piece.choice, usage=self.usage()))
        return deltas

    def _stream(self, choice: int) -> ReplyStream:
        asked = self._asked
        if self._raw is not None:
            return self._renderer.raw_stream(self._raw, choice=choice, stops=asked.sampling.stop)
        return self._renderer.stream(
            tools=(asked.tools or None) if asked.tool_choice != "none" else None,
            prompt=self._prompt,
            choice=choice,
            stops=asked.sampling.stop,
        )

    def _entries(self, index: int, growing: _Growing) -> list[Delta]:
        """The logprobs that an agent asked for, of the tokens that are known to belong to the answer."""
        logprobs, upto = growing.logprobs, growing.stream.settled
        if not self._asked.logprobs or upto == growing.shown:
            return []
        # Lists of different lengths make the turn invalid (see `record`); the agent gets the text without them.
        if logprobs is None or len(logprobs) != len(growing.ids):
            return []
        entries = self._renderer.logprob_entries(growing.ids[growing.shown : upto], logprobs[growing.shown : upto])
        growing.shown = upto
        return [Delta(choice=index, logprob_entries=entries)]

    @staticmethod
    def _finish(growing: _Growing, piece: Piece) -> None:
        parsed = growing.parsed = growing.stream.parsed()
        stopped = growing.stream.stopped
        # An engine that went on behind the stop string may name another reason; the answer ended at the string.
        growing.finish = parsed.finish_reason(STOP if stopped is not None else piece.finish_reason)
        growing.stop_sequence = stopped or piece.stop_sequence

    def usage(self) -> Usage:
        counted = self._asked.counted or Usage()
        return Usage(
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=sum(len(g.ids) for g in self._growing.values()),
            cached_tokens=counted.cached_tokens,
        )

    def choices(self) -> list[Choice]:
        """The finished choices as the agent gets them."""
        choices = []
        for index, growing in sorted(self._growing.items()):
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
            if self._asked.logprobs and growing.logprobs is not None and len(growing.logprobs) == len(growing.ids):
                upto = growing.stream.settled
                choice.logprob_entries = self._renderer.logprob_entries(growing.ids[:upto], growing.logprobs[:upto])
            choices.append(choice)
        return choices

    def record(self, captured: Captured) -> dict[int, Choice]:
        """Put the choices into what is captured of the call. Returns them as the agent gets them, by index."""
        said = {choice.index: choice for choice in self.choices()}
        captured.complete = len(said) == self._asked.n
        for index, growing in sorted(self._growing.items()):
            choice = said.get(index)
            captured.choices.append(
                ChoiceRecord(
                    index=index,
                    ids=pack_ids(growing.ids),
                    logprobs=_packed(index, growing, captured),
                    finish_reason=choice.finish_reason if choice is not None else None,
                    parse_status=choice.parse_status if choice is not None else "none",
                    message=_to_json(choice.to_message() if choice is not None else {"role": "assistant"}),
                    routed_experts=growing.routed_experts,
                    agent_logprobs=_agent_logprobs(choice),
                    stop_sequence=growing.stop_sequence,
                    weight_spans=None
                    if growing.spans is None
                    else pack_ids([n for span in growing.spans for n in span]),
                )
            )
        put(captured, [growing.versions for _, growing in sorted(self._growing.items())])
        usage = self.usage()
        counted: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        if usage.cached_tokens is not None:
            counted["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        captured.usage = _to_json(counted)
        return said


def _agent_logprobs(choice: Choice | None) -> bytes | None:
    """What the agent got of the choice's logprobs, if it asked."""
    entries = choice.logprob_entries if choice is not None else None
    return None if entries is None else _to_json({"content": entries})


def _packed(index: int, growing: _Growing, captured: Captured) -> bytes | None:
    """A choice's logprobs; None, and the reason in ``captured.problem``, when they do not fit its ids."""
    logprobs = growing.logprobs
    if logprobs is None:
        captured.problem = f"choice {index} has token ids without logprobs"
    elif len(logprobs) != len(growing.ids):
        captured.problem = f"choice {index} has {len(growing.ids)} token ids and {len(logprobs)} logprobs"
    else:
        try:
            return pack_logprobs(logprobs)  # type: ignore[arg-type]  # a None in it is what the check is for
        except CaptureError as e:
            captured.problem = str(e)
    return None
