"""Rebuilds a session's history from its records.

Nothing is rendered and no text becomes tokens: prompts and completions are the recorded ids. The result is the
conversation that the renderer had after those calls, so the next prompt extends the last one exactly, also in another
process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CaptureError
from .conversation import Conversation, KnownPrompt
from .renderer import Renderer
from .tokens import TokenRow


@dataclass(frozen=True, kw_only=True)
class PastCall:
    """An answered call.

    ``extended`` is False for a prompt that was rendered in full. ``answers`` are the turn ids, completion ids and messages of its
    choices.
    """

    messages: list[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    options: Mapping[str, Any] | None
    prompt: array[int]
    extended: bool
    answers: Sequence[tuple[str, array[int], Mapping[str, Any]]]


def replay(renderer: Renderer, past: Iterable[PastCall], *, now: float | None = None) -> Conversation:
    """Return the conversation after these calls. CPU work that grows with the session: call it in a thread.

    Raises: CaptureError on a call without an answer.
    """
    conversation = renderer.conversation(now=now)
    for call in past:
        if not call.answers:
            raise CaptureError("a call without an answer is no part of a history")
        options = renderer.template.options(call.options)
        match = renderer.match(conversation, call.messages, call.tools, options)
        asked = conversation.asked.get(match.digest)
        if asked is None:
            base = match.base.row if match.base is not None and call.extended else TokenRow()
            extended = base.length > 0 and call.prompt[: base.length] == base.ids()
            row = base.extended(call.prompt[base.length :]) if extended else TokenRow().extended(call.prompt)
            opens = renderer.opens_reasoning(row)
            asked = KnownPrompt(match.digest, match.base, row, opens, extended)
        conversation.add_prompt(match, asked)
        for turn_id, ids, message in call.answers:
            conversation.add_commit(asked, turn_id, ids, message)
    return conversation
