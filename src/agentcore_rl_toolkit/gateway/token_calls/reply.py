"""The sampled choices of one token call: pieces of an engine's answer -> deltas for the agent, records for the store.

All ids and logprobs that the engine sampled are recorded. The agent's reply is read from them: without stop tokens, with calls
and reasoning taken apart, cut where a stop string begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...messages.render import AnswerForm, RenderedPrompt, Renderer, ReplyStream
from ...messages.wire import ModelRequest
from ...messages.wire.canonical import STOP, Choice, Delta, Usage
from ...messages.wire.chat import usage_dict
from ..capture.record import CONSTRAINED, Captured, pack_ids, pack_logprobs
from ..capture.reply import choice_record, read_numbers
from ..capture.versions import Versions, put
from ..engines import Piece

_to_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _SampledChoice:
    """One choice while it is sampled."""

    stream: ReplyStream
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] | None = field(default_factory=list)
    routed_experts: bytes | None = None
    parsed: Choice | None = None  # once it has ended
    versions: Versions = field(default_factory=Versions)
    spans: list[tuple[int, int]] | None = None


class TokenReply:
    """The choices of one token call, while they arrive."""

    def __init__(self, renderer: Renderer, asked: ModelRequest, prompt: RenderedPrompt | None) -> None:
        self._renderer = renderer
        self._asked = asked
        self._prompt = prompt
        self._choices: dict[int, _SampledChoice] = {}
        self.form: AnswerForm | None = None  # of which a part is free

    @property
    def finished(self) -> bool:
        """Whether every choice that was asked for has ended."""
        return len(self._choices) == self._asked.n and all(g.parsed is not None for g in self._choices.values())

    def answers(self, call_id: str) -> list[tuple[str, list[int], dict[str, Any]]]:
        """Turn id, token ids and message of each choice. Nothing can go on from choices of which one has no tokens."""
        parsed = [(index, each.ids, each.parsed) for index, each in sorted(self._choices.items()) if each.parsed]
        if not all(ids for _, ids, _ in parsed):
            return []
        return [
            (call_id if len(parsed) == 1 else f"{call_id}.{index}", ids, choice.to_message())
            for index, ids, choice in parsed
        ]

    def take(self, piece: Piece) -> list[Delta]:
        """Add sampled tokens to their choice; the deltas they make."""
        sampled = self._choices.get(piece.choice)
        if sampled is None:
            sampled = self._choices[piece.choice] = _SampledChoice(self._stream(piece.choice))
        if piece.weight_version is not None:
            sampled.versions.named(piece.weight_version, tokens=bool(piece.ids))
            sampled.versions.spans(piece.weight_version_first, piece.weight_version)
        sampled.spans = piece.spans or sampled.spans
        if piece.routed_experts is not None:
            sampled.routed_experts = piece.routed_experts
        if piece.ids:
            if piece.logprobs is None:
                sampled.logprobs = None
            elif sampled.logprobs is not None:
                sampled.logprobs += piece.logprobs
        sampled.ids += piece.ids
        deltas = sampled.stream.feed(piece.ids) if piece.ids else []
        if piece.finish_reason is not None:
            deltas += sampled.stream.finish()
        if entries := self._entries(sampled, len(sampled.ids) - len(piece.ids)):
            deltas.append(Delta(choice=piece.choice, logprob_entries=entries))
        if piece.finish_reason is not None:
            parsed = sampled.parsed = self._parsed(sampled, piece)
            end = Delta(
                choice=piece.choice,
                finish_reason=parsed.finish_reason,
                stop_sequence=parsed.stop_sequence,
                final=self.finished,
            )
            deltas.append(end)
            if self.finished:
                deltas.append(Delta(choice=piece.choice, usage=self.usage()))
        return deltas

    def _stream(self, choice: int) -> ReplyStream:
        asked = self._asked
        return self._renderer.stream(
            tools=(asked.tools or None) if asked.tool_choice != "none" else None,
            opens_reasoning=self._prompt is not None and self._prompt.opens_reasoning,
            choice=choice,
            stops=asked.sampling.stop,
        )

    def _entries(self, sampled: _SampledChoice, since: int = 0) -> list[dict[str, Any]]:
        """The logprobs that an agent asked for, from a token on: of all sampled tokens, as vLLM does.

        Lists of different lengths make the turn invalid (see `record`). The agent gets the text without them.
        """
        ids, logprobs = sampled.ids, sampled.logprobs
        if not self._asked.logprobs or logprobs is None or len(logprobs) != len(ids):
            return []
        return self._renderer.logprob_entries(ids[since:], logprobs[since:], top=self._asked.top_logprobs > 0)

    @staticmethod
    def _parsed(sampled: _SampledChoice, piece: Piece) -> Choice:
        # An engine that went on behind the stop string may name another reason; the answer ended at the string.
        parsed = sampled.stream.parsed(STOP if sampled.stream.stopped is not None else piece.finish_reason)
        parsed.stop_sequence = parsed.stop_sequence or piece.stop_sequence
        return parsed

    def usage(self) -> Usage:
        counted = self._asked.counted or Usage()
        return Usage(
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=sum(len(g.ids) for g in self._choices.values()),
            cached_tokens=counted.cached_tokens,
        )

    def record(self, captured: Captured) -> None:
        """Put the choices into what is captured of the call."""
        captured.complete = self.finished
        for index, sampled in sorted(self._choices.items()):
            choice, logprobs = sampled.parsed, sampled.logprobs
            record = choice_record(
                captured,
                index,
                pack_ids(sampled.ids),
                None if logprobs is None else read_numbers(captured, pack_logprobs, logprobs),
                choice.finish_reason if choice is not None else None,
                _to_json(choice.to_message() if choice is not None else {"role": "assistant"}),
                choice.parse_status if choice is not None else "none",
            )
            record.routed_experts = sampled.routed_experts
            if choice is not None:
                record.stop_sequence = choice.stop_sequence
                if entries := self._entries(sampled):
                    record.agent_logprobs = _to_json({"content": entries})
            if sampled.spans is not None:
                record.weight_spans = pack_ids([n for span in sampled.spans for n in span])
            if self.form is not None:
                free = self._renderer.free_tokens(sampled.ids, self.form)
                record.free_tokens = None if free == len(sampled.ids) else free
                record.untrainable = None if free else CONSTRAINED
            captured.choices.append(record)
        put(captured, [sampled.versions for _, sampled in sorted(self._choices.items())])
        captured.usage = _to_json(usage_dict(self.usage()))
