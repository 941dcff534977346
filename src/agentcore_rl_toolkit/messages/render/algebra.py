"""The text that a chat template writes after an answer, without rendering the history before it.

Theory of operation. Turn k+1's prompt is turn k's prompt, the sampled tokens, and a *suffix*: the mark that closes
the answer, the new messages, the opening of the next answer. To get the suffix at a cost that does not grow with the
conversation, the new messages are rendered after a stub: one short user message and an answer in which a random
word replaces the sampled text. The text between the word and the closing mark is the answer's own syntax
and was sampled; the suffix begins at the closing mark. Each rendering has its own word, which none of its messages
contains: a message with the word in it would be cut off there.

This is only right if the template writes new messages without reading earlier ones. `probe` checks this
once, by comparison with full renderings of longer conversations. Other patterns are rendered in full.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..wire.history import Message
from .habits import PROBE_USER
from .template import PROBE_TOOL, ChatTemplate
from .tokens import Tokenizer


def fresh_word() -> str:
    return f"zqx{secrets.token_hex(16)}qxz"


def stub_of(answer: Mapping[str, Any], word: str) -> Message:
    """Return an assistant message with the word, and with the calls of ``answer`` (tools and ids)."""
    calls = answer.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": word}
    stubs = [_call(call.get("id") or "", call["function"]["name"], s=word) for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": stubs}


def _call(call_id: str, name: str = "probe_tool", **arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, kw_only=True)
class TemplateFacts:
    """The results of `probe`.

    ``closers`` are texts that may end an answer. ``opener_style``: answers have no closing mark, the
    next message's opening mark ends them (GLM). ``after_text`` and ``after_calls``: new messages may be rendered
    after a stub for an answer without or with calls. ``tools_shown``: the list of tools is in the prompt.
    ``problems``: reasons as text.
    """

    closers: tuple[str, ...]
    opener_style: bool
    after_text: bool
    after_calls: bool
    tools_supported: bool
    tools_shown: bool
    problems: tuple[str, ...]


class SuffixRenderer:
    """Renders suffixes after a stub."""

    def __init__(self, template: ChatTemplate, closers: Sequence[str]) -> None:
        self._template = template
        self._closers = closers

    def suffix(
        self,
        answer: Mapping[str, Any],
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        now: float | None = None,
        before: Sequence[Message] = (PROBE_USER,),
    ) -> str | None:
        """Return the text from the closing mark of ``answer`` to the opening of the next one; None if there is no closing mark.

        Raises: RequestError when the template refuses the messages.
        """
        word = fresh_word()
        history = [*before, stub_of(answer, word), *messages]
        text = self._template.render(history, tools=tools, options=options, now=now)
        # The last one: a template may write all calls of an answer, or only the first.
        at = text.rfind(word)
        if at < 0:
            return None
        found = [end for closer in self._closers if (end := text.find(closer, at + len(word))) >= 0]
        return text[min(found) :] if found else None

    def agrees(self, answer: Mapping[str, Any], following: Sequence[Sequence[Message]]) -> bool:
        """Return True if suffixes after this kind of answer do not depend on the history before it.

        Messages that the template refuses do not count.
        """
        compared = 0
        for messages in following:
            for history in _HISTORIES:
                for tools in (None, [PROBE_TOOL]):
                    try:
                        full = self.suffix(answer, messages, tools=tools, now=0.0, before=history)
                    except RequestError:
                        continue
                    try:
                        short = self.suffix(answer, messages, tools=tools, now=0.0)
                    except RequestError:
                        return False
                    if full is None or short != full:
                        return False
                    compared += 1
        return compared > 0


def _result(call_id: str, content: str = "r") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": "probe_tool", "content": content}


_ONE_CALL: Message = {"role": "assistant", "content": "", "tool_calls": [_call("call_0000a")]}
_TWO_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_call("call_0000a"), _call("call_0000b")]}
_BRIEF = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"})
_HISTORIES: tuple[tuple[Message, ...], ...] = (
    _BRIEF,
    (
        PROBE_USER,
        {"role": "assistant", "content": "one", "reasoning_content": "because"},
        {"role": "user", "content": "two"},
    ),
    (*_BRIEF, {**_ONE_CALL, "reasoning_content": "because"}, _result("call_0000a")),
)
_NEXT = {"role": "user", "content": "next"}
_KIND = {"role": "system", "content": "be kind"}
_AFTER_TEXT = ([_NEXT], [_NEXT, {"role": "assistant", "content": "a"}, _NEXT], [_NEXT, _KIND])
_AFTER_CALL = tuple([_result("call_0000a"), *more] for more in ([], [_NEXT], [_KIND]))
_AFTER_TWO = ([_result("call_0000a"), _result("call_0000b", "s")],)


def probe(template: ChatTemplate, tokenizer: Tokenizer) -> TemplateFacts:
    """Find out what may be rendered after a stub. This takes some hundred small renderings, once per model."""
    word = fresh_word()
    problems: list[str] = []

    def rendered(*messages: Message, tools: bool = False, opening: bool = True) -> str | None:
        offered = [PROBE_TOOL] if tools else None
        try:
            return template.render(messages, tools=offered, add_generation_prompt=opening, now=0.0)
        except RequestError:
            return None

    stub = stub_of({}, word)
    followed, alone = rendered(PROBE_USER, stub, PROBE_USER), rendered(PROBE_USER, stub, opening=False)
    mark = None
    if followed is None or word not in followed:
        problems.append("the template does not write an assistant message with text")
    else:
        mark = _first_special(followed.partition(word)[2], tokenizer)
        if mark is None:
            problems.append("no special token follows an answer")
    ends = [tokenizer.text_of(token_id) for token_id in sorted(tokenizer.eos_ids)]
    closers = tuple(dict.fromkeys([*([] if mark is None else [mark]), *ends]))
    suffixes = SuffixRenderer(template, closers)
    called = rendered(PROBE_USER, stub_of(_ONE_CALL, word), *_AFTER_CALL[0], tools=True)
    tools_supported = called is not None and word in called
    after_text = mark is not None and suffixes.agrees({}, _AFTER_TEXT)
    after_calls = (mark is not None and tools_supported) and all(
        suffixes.agrees(answer, following)
        for answer, following in ((_ONE_CALL, _AFTER_CALL), (_TWO_CALLS, _AFTER_TWO))
        if rendered(PROBE_USER, answer, *following[0], tools=True) is not None
    )
    if mark is not None and not after_text:
        problems.append("the template's text after an answer depends on earlier messages")
    if mark is not None and tools_supported and not after_calls:
        problems.append("the template's text after a tool call depends on earlier messages")
    offered = rendered(PROBE_USER, tools=True)
    return TemplateFacts(
        closers=closers,
        opener_style=mark is not None
        and alone is not None
        and _first_special(alone.partition(word)[2], tokenizer) is None,
        after_text=after_text,
        after_calls=after_calls,
        tools_supported=tools_supported,
        tools_shown=offered is not None and offered != rendered(PROBE_USER),
        problems=tuple(problems),
    )


def _first_special(text: str, tokenizer: Tokenizer) -> str | None:
    for token_id in tokenizer.encode(text):
        if token_id in tokenizer.special_ids or token_id in tokenizer.eos_ids:
            return tokenizer.text_of(token_id)
    return None
