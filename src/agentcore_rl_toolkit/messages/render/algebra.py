"""The text that a chat template writes after an answer, without rendering the history before it.

Theory of operation. Turn k+1's prompt is turn k's prompt, the sampled tokens, and a *suffix*: the mark that closes
the answer, the new messages, the opening of the next answer. To get the suffix at a cost that does not grow with the
conversation, the new messages are rendered behind a stub: one short user message and an answer in which a random
word stands where the sampled text would be. The text between the word and the closing mark is the answer's own syntax
and was sampled; the suffix begins at the closing mark. Each rendering has a word of its own, which none of its messages
contains: a message with the word in it would be cut off there.

That is only right if the template writes new messages without looking at the messages further back. `probe` finds out,
once, by comparing with full renderings of longer conversations. Other patterns are rendered in full."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from .template import ChatTemplate
from .tokens import Tokenizer

_USER = {"role": "user", "content": "q"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]},
    },
}


def fresh_word() -> str:
    """A random word for a stub, which nothing else contains."""
    return f"zqx{secrets.token_hex(16)}qxz"


def stub_of(answer: Mapping[str, Any], word: str) -> dict[str, Any]:
    """An assistant message with the outward form of ``answer`` (which tools it calls, under which ids) and the word in
    it.
    """
    calls = answer.get("tool_calls") or []
    if not calls:
        return {"role": "assistant", "content": word}
    stubs = [
        {
            "id": call.get("id") or "",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": {"s": word},
            },
        }
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": stubs}


@dataclass(frozen=True, kw_only=True)
class TemplateFacts:
    """The results of `probe`.

    ``closers`` are texts that may end an answer. ``opener_style``: answers have no closing mark of their own, the
    next message's opening mark ends them (GLM). ``after_text`` and ``after_calls``: new messages may be rendered
    behind a stub for an answer without or with calls. ``needs_tools``: only with the tool list at hand.
    ``tools_shown``: the list of tools is in the prompt. ``problems``: reasons in words."""

    closers: tuple[str, ...]
    opener_style: bool
    after_text: bool
    after_calls: bool
    needs_tools: bool
    tools_supported: bool
    tools_shown: bool
    problems: tuple[str, ...] = field(default=())


class SuffixRenderer:
    """Renders suffixes behind a stub, as the module says."""

    def __init__(self, template: ChatTemplate, closers: Sequence[str]) -> None:
        self._template = template
        self._closers = tuple(closers)

    def suffix(
        self,
        answer: Mapping[str, Any],
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        now: float | None = None,
        before: Sequence[dict[str, Any]] = (_USER,),
    ) -> str | None:
        """The text from the closing mark of ``answer`` to the opening of the next one; None when there is no closing
        mark.

        Raises: RequestError when the template refuses the messages.
        """
        word = fresh_word()
        text = self._template.render(
            [*before, stub_of(answer, word), *messages],
            tools=tools,
            options=options,
            now=now,
            add_generation_prompt=True,
        )
        return self.after(word, text)

    def after(self, word: str, text: str) -> str | None:
        """The text from the first closing mark behind the word."""
        # The last one: a template may write all calls of an answer, or only the first.
        at = text.rfind(word)
        if at < 0:
            return None
        at += len(word)
        found = [position for closer in self._closers if (position := text.find(closer, at)) >= 0]
        return text[min(found) :] if found else None


def _first_special(text: str, tokenizer: Tokenizer) -> str | None:
    for token_id in tokenizer.encode(text):
        if token_id in tokenizer.special_ids or token_id in tokenizer.eos_ids:
            return tokenizer.text_of(token_id)
    return None


def _call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def _result(call_id: str, content: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "probe_tool", "content": content}


_TEXT_ANSWER: dict[str, Any] = {"role": "assistant", "content": "a"}
_CALL_ANSWER: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_call("probe_tool", "call_0000a")]}
_TWO_CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [_call("probe_tool", "call_0000a"), _call("probe_tool", "call_0000b")],
}
_HISTORIES: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}),
    (
        _USER,
        {"role": "assistant", "content": "one", "reasoning_content": "because"},
        {"role": "user", "content": "two"},
    ),
    (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {**_CALL_ANSWER, "reasoning_content": "because"},
        _result("call_0000a"),
    ),
)


class _Prober:
    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self.word = fresh_word()
        self.problems: list[str] = []

    def render(self, messages: Sequence[dict[str, Any]], *, tools: bool, opening: bool = True) -> str | None:
        try:
            return self._template.render(
                messages, tools=[_TOOL] if tools else None, add_generation_prompt=opening, now=0.0
            )
        except RequestError:
            return None

    def closer(self) -> tuple[str | None, bool]:
        """The mark that ends an answer, and whether it is in truth the opening of what comes next."""
        stub = stub_of({}, self.word)
        followed = self.render([_USER, stub, _USER], tools=False)
        alone = self.render([_USER, stub], tools=False, opening=False)
        if followed is None or self.word not in followed:
            self.problems.append("the template does not write an assistant message with text")
            return None, False
        mark = _first_special(followed.partition(self.word)[2], self._tokenizer)
        if mark is None:
            self.problems.append("no special token follows an answer")
            return None, False
        return mark, alone is not None and _first_special(alone.partition(self.word)[2], self._tokenizer) is None

    def agrees(
        self,
        suffixes: SuffixRenderer,
        answer: dict[str, Any],
        following: Sequence[Sequence[dict[str, Any]]],
        *,
        with_tools: bool,
    ) -> bool:
        """Do stub renderings equal full ones for this kind of answer? Followings that the template refuses do not
        count.
        """
        stub = stub_of(answer, self.word)
        compared = 0
        for messages in following:
            for history in _HISTORIES:
                for tools in (False, True):
                    full = self.render([*history, stub, *messages], tools=tools)
                    if full is None:
                        continue
                    short = self.render([_USER, stub, *messages], tools=tools and with_tools)
                    wanted = suffixes.after(self.word, full)
                    if wanted is None or short is None or suffixes.after(self.word, short) != wanted:
                        return False
                    compared += 1
        return compared > 0


def probe(template: ChatTemplate, tokenizer: Tokenizer) -> TemplateFacts:
    """Learn what may be rendered behind a stub. Costs some hundred small renderings, once per model."""
    prober = _Prober(template, tokenizer)
    mark, opener_style = prober.closer()
    ends = [tokenizer.text_of(token_id) for token_id in sorted(tokenizer.eos_ids)]
    closers = tuple(dict.fromkeys([*([mark] if mark else []), *ends]))
    suffixes = SuffixRenderer(template, closers)
    user = {"role": "user", "content": "next"}
    system = {"role": "system", "content": "be kind"}
    after_answer: list[list[dict[str, Any]]] = [[user], [user, _TEXT_ANSWER, user], [user, system]]
    after_call: list[list[dict[str, Any]]] = [
        [_result("call_0000a")],
        [_result("call_0000a"), user],
        [_result("call_0000a"), system],
    ]
    after_two: list[list[dict[str, Any]]] = [[_result("call_0000a"), _result("call_0000b", "s")]]
    called = prober.render([_USER, stub_of(_CALL_ANSWER, prober.word), *after_call[0]], tools=True)
    tools_supported = called is not None and prober.word in called
    offered = prober.render([_USER], tools=True)
    needs_tools = False
    after_text = after_calls = False
    if mark is not None:
        after_text = prober.agrees(suffixes, {}, after_answer, with_tools=True)
        after_calls = tools_supported and all(
            prober.agrees(suffixes, answer, following, with_tools=True)
            for answer, following in ((_CALL_ANSWER, after_call), (_TWO_CALLS, after_two))
            if prober.render([_USER, answer, *following[0]], tools=True) is not None
        )
        needs_tools = not (
            (not after_text or prober.agrees(suffixes, {}, after_answer, with_tools=False))
            and (not after_calls or prober.agrees(suffixes, _CALL_ANSWER, after_call, with_tools=False))
        )
        if not after_text:
            prober.problems.append("what the template writes after an answer depends on earlier messages")
        if tools_supported and not after_calls:
            prober.problems.append("what the template writes after a tool call depends on earlier messages")
    return TemplateFacts(
        closers=closers,
        opener_style=opener_style,
        after_text=after_text,
        after_calls=after_calls,
        needs_tools=needs_tools,
        tools_supported=tools_supported,
        tools_shown=offered is not None and offered != prober.render([_USER], tools=False),
        problems=tuple(prober.problems),
    )
