"""The prompt of one call as tokens, and the session's history that it continues."""

from __future__ import annotations

import msgspec

from ...messages.dialects import ModelRequest, RequestError
from ...messages.dialects.canonical import Choice, Usage
from ...messages.render import Conversation, RenderedPrompt
from ..capture.captured import Captured
from ..sessions.session import Session
from .histories import History
from .mode import TokenMode
from .reply import TokenReply

_to_json = msgspec.json.Encoder().encode


class Prompt:
    """``rendered`` is a conversation's prompt, until it is committed or abandoned; ``raw`` are the ids of a text prompt.
    ``json`` are the ids as JSON. The session's history is pinned from `pin` to `release`.
    """

    __slots__ = ("_conversation", "_history", "_mode", "json", "plain_markers", "raw", "rendered")

    def __init__(self, mode: TokenMode) -> None:
        self._mode = mode
        self._history: History | None = None
        self._conversation: Conversation | None = None
        self.rendered: RenderedPrompt | None = None
        self.raw: list[int] | None = None
        self.plain_markers = 0  # that its new messages hold as text
        self.json = b"[]"

    def pin(self, session: Session) -> None:
        self._history = self._mode.histories.pin(session)

    def render(self, asked: ModelRequest) -> None:
        """Runs in a thread. Raises: RequestError."""
        renderer = self._mode.renderer
        if self._history is None:
            ids = asked.prompt or []
            if isinstance(ids, str):
                ids = renderer.encode(ids, add_special_tokens=asked.add_special_tokens)
            if not ids:
                raise RequestError("prompt must not be empty", param="prompt")
            self.raw, self.json = ids, _to_json(ids)
            asked.counted = Usage(prompt_tokens=len(ids))
            return
        conversation = self._conversation = self._mode.histories.open(self._history)
        prompt = self.rendered = renderer.render(
            conversation, asked.messages, asked.tools or None, asked.template_options() or None
        )
        self.plain_markers = prompt.plain_markers
        asked.counted = Usage(prompt_tokens=prompt.length, cached_tokens=prompt.reused_tokens)
        self.json = prompt.json

    def commit(self, call_id: str, captured: Captured, sampled: TokenReply, choices: dict[int, Choice]) -> None:
        """Let the next turn go on from this one, if its reply is whole."""
        prompt, conversation = self.rendered, self._conversation
        if prompt is None or conversation is None:
            return
        if not captured.complete or captured.error is not None or sampled.empty:
            self.abandon()
            return
        captured.parent_turn, captured.branch_reason = prompt.parent_turn, prompt.branch_reason
        last = len(choices) - 1
        for place, (index, choice) in enumerate(sorted(choices.items())):
            self._mode.renderer.commit(
                conversation,
                prompt,
                sampled.ids(index),
                choice.to_message(),
                turn_id=call_id if len(choices) == 1 else f"{call_id}.{index}",
                more=place < last,
            )
        self.rendered = None

    def abandon(self) -> None:
        prompt, self.rendered = self.rendered, None
        if prompt is not None and self._conversation is not None:
            self._mode.renderer.abandon(self._conversation, prompt)

    def release(self) -> None:
        """The call is over for the session's history."""
        self.abandon()
        history, self._history = self._history, None
        if history is not None:
            self._mode.histories.unpin(history)
