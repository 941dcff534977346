"""The sampled choices of one token call: pieces of an engine's answer -> deltas for the agent, records for the store.

All ids and logprobs that the engine sampled are recorded. The agent's reply is read from them: without stop tokens, with calls
and reasoning taken apart, cut where a stop string begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...messages.render import AnswerForm, RenderedPrompt, Renderer, ReplyStream
from ...messages.wire import ModelRequest
from ...messages.wire.canonical import STOP, Choice, Delta, Usage
from ...messages.wire.chat import usage_dict
from ..capture.choice import ChoiceTokens
from ..capture.record import CONSTRAINED, Captured
from ..engines import Piece

_to_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _SampledChoice:
    """A choice while it is sampled. ``parsed`` and ``message`` are the answer, once it has ended."""

    tokens: ChoiceTokens
    stream: ReplyStream
    parsed: Choice | None = None
    message: dict[str, Any] | None = None


class TokenReply:
    """The choices of one token call, while they arrive. ``finished``: every choice that was asked for has ended."""

    def __init__(self, renderer: Renderer, asked: ModelRequest, prompt: RenderedPrompt | None) -> None:
        self.finished = False
        self._renderer = renderer
        self._asked = asked
        self._prompt = prompt
        self._choices: dict[int, _SampledChoice] = {}
        self.form: AnswerForm | None = None  # a form with a free part

    def answers(self, call_id: str) -> list[tuple[str, list[int], dict[str, Any]]]:
        """Turn id, token ids and message of each choice. Without the tokens of each choice, nothing can continue."""
        choices = sorted(self._choices.items())
        if not all(each.tokens.ids for _, each in choices):
            return []
        return [
            (call_id if len(choices) == 1 else f"{call_id}.{index}", list(each.tokens.ids or ()), each.message or {})
            for index, each in choices
        ]

    def add(self, piece: Piece) -> list[Delta]:
        """Add sampled tokens to their choice. Returns the deltas that they make."""
        asked, sampled = self._asked, self._choices.get(piece.choice)
        if sampled is None:
            stream = self._renderer.stream(
                tools=(asked.tools or None) if asked.tool_choice != "none" else None,
                opens_reasoning=self._prompt is not None and self._prompt.opens_reasoning,
                choice=piece.choice,
                stops=asked.sampling.stop,
            )
            sampled = self._choices[piece.choice] = _SampledChoice(ChoiceTokens(), stream)
        tokens = sampled.tokens
        if piece.weight_version is not None:
            tokens.add_version(piece.weight_version, first=piece.weight_version_first, tokens=bool(piece.ids))
        tokens.spans = piece.spans or tokens.spans
        if piece.routed_experts is not None:
            tokens.experts = piece.routed_experts
        tokens.add(piece.ids, piece.logprobs)
        deltas = sampled.stream.feed(piece.ids, final=piece.finish_reason is not None)
        if asked.logprobs and (entries := self._entries(tokens, len(piece.ids))):
            deltas.append(Delta(choice=piece.choice, logprob_entries=entries))
        if piece.finish_reason is not None:
            # An engine that sampled past the stop string may report another reason. The answer ended at the string.
            stopped = sampled.stream.stopped is not None
            parsed = sampled.parsed = sampled.stream.parsed(STOP if stopped else piece.finish_reason)
            parsed.stop_sequence = parsed.stop_sequence or piece.stop_sequence
            sampled.message = parsed.to_message()
            self.finished = sum(each.parsed is not None for each in self._choices.values()) == asked.n
            deltas.append(
                Delta(
                    choice=piece.choice,
                    finish_reason=parsed.finish_reason,
                    stop_sequence=parsed.stop_sequence,
                    final=self.finished,
                )
            )
            if self.finished:
                deltas.append(Delta(usage=self._usage()))
        return deltas

    def _entries(self, tokens: ChoiceTokens, count: int) -> list[dict[str, Any]]:
        """Return the logprobs that an agent asked for, of the last tokens: of all sampled ones, as vLLM does.

        Lists of different lengths make the turn invalid (`ChoiceTokens.record`). The agent gets the text without them.
        """
        ids: Sequence[int] = tokens.ids or ()
        logprobs = tokens.logprobs
        if not count or logprobs is None or len(logprobs) != len(ids):
            return []
        return self._renderer.logprob_entries(ids[-count:], logprobs[-count:], top=self._asked.top_logprobs > 0)

    def _usage(self) -> Usage:
        counted = self._asked.counted or Usage()
        return Usage(
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=sum(len(each.tokens.ids or ()) for each in self._choices.values()),
            cached_tokens=counted.cached_tokens,
        )

    def record(self, captured: Captured) -> None:
        """Add the records of the choices to ``captured``."""
        captured.complete = self.finished
        for index, sampled in sorted(self._choices.items()):
            choice, tokens = sampled.parsed, sampled.tokens
            record = tokens.record(
                captured,
                index,
                finish_reason=choice.finish_reason if choice is not None else None,
                message=_to_json(sampled.message or {"role": "assistant"}),
                parse_status=choice.parse_status if choice is not None else "none",
            )
            if choice is not None:
                record.stop_sequence = choice.stop_sequence
                if self._asked.logprobs and (entries := self._entries(tokens, len(tokens.ids or ()))):
                    record.agent_logprobs = _to_json({"content": entries})
            if self.form is not None:
                ids: Sequence[int] = tokens.ids or ()
                free = self._renderer.free_tokens(ids, self.form)
                record.free_tokens = None if free == len(ids) else free
                record.untrainable = None if free else CONSTRAINED
            captured.choices.append(record)
        captured.usage = _to_json(usage_dict(self._usage()))
