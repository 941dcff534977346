"""Messages -> token ids and sampled ids -> messages, by a model's own template and tokenizer.

>>> renderer = Renderer.from_path("/models/my-model")
>>> conversation = renderer.conversation()
>>> prompt = renderer.render(conversation, messages, tools)         # CPU work: call it in a thread
>>> ids = prompt.token_ids                                          # -> engine -> completion ids
>>> parsed = renderer.parse(completion_ids, tools=tools, opens_reasoning=prompt.opens_reasoning)
>>> conversation.commit(prompt, completion_ids, parsed.to_message(), turn_id="t1")
"""

from __future__ import annotations

import bisect
import contextlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ...errors import CaptureError, ConfigError
from ..errors import RequestError
from ..wire.canonical import Choice
from ..wire.history import in_call_order
from .algebra import SuffixRenderer, TemplateFacts, probe
from .conversation import Conversation, KnownPrompt, Match, RenderedPrompt
from .forcing import AnswerForm
from .parsers import Grammar, grammar_named, grammar_of
from .reply import ReplyStream
from .template import ChatTemplate
from .tokens import PlainText, Tokenizer, TokenRow


class Renderer:
    """A model's template, tokenizer and output parser. All sessions and threads share one.

    One thread at a time may use a conversation. With the ``history`` "sampled", a prompt repeats the tokens of the session's
    turns. With "template", it is the template's text of the messages, as an engine that serves the model renders them:
    templates leave earlier thinking out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        grammar: Grammar | None = None,
        name: str = "model",
        history: Literal["sampled", "template"] = "sampled",
    ) -> None:
        self.name = name
        self.history = history
        self.tokenizer = tokenizer
        self.template = template
        self.grammar = grammar or grammar_of(template.all_text)
        self.facts: TemplateFacts = probe(template, tokenizer)
        stops = set(tokenizer.eos_ids)
        # The template's mark after an answer ends it for the model, too, also if no file lists it.
        closer = self.facts.closers[0] if self.facts.closers and self.grammar.name != "harmony" else None
        closer_id = None if closer is None else tokenizer.id_of(closer)
        if closer_id is not None:
            stops.add(closer_id)
        self.stop_token_ids: frozenset[int] = frozenset(stops)
        marks = self.grammar
        shown = marks.reasoning is not None and marks.reasoning[0] in template.all_text
        # the marks of the model's thinking, if its template has them
        self.thinking = marks.reasoning if shown else None
        self._opening = marks.reasoning[0] if marks.reasoning is not None else "\0"
        self._keeps_order = "tool_call_id" in template.all_text
        groups = (marks.reasoning or (), *marks.blocks, marks.skip)
        self._plain = PlainText(tokenizer, own_marks=[mark for group in groups for mark in group])
        self._suffixes = SuffixRenderer(template, self.facts.closers)
        self._closer_ids = {i for text in self.facts.closers if (i := tokenizer.id_of(text)) is not None}

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        template: str | Path | None = None,
        parser: str | None = None,
        history: Literal["sampled", "template"] = "sampled",
    ) -> Renderer:
        """Load from a model directory.

        ``template`` is a file with another chat template; ``parser`` the name of an output parser instead of the one
        that the template's text suggests (one of `GRAMMARS`).
        Raises: ConfigError when something is missing or broken, MissingExtraError without the gateway extra.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a directory with a tokenizer and a chat template")
        tokenizer = Tokenizer.from_path(folder)
        if template is None:
            chat = ChatTemplate.from_path(folder, special_tokens=tokenizer.special_tokens)
        else:
            chat = ChatTemplate(Path(template).read_text("utf-8"), special_tokens=tokenizer.special_tokens)
        grammar = None if parser is None else grammar_named(parser)
        return cls(tokenizer, chat, grammar=grammar, name=folder.name, history=history)

    def conversation(self, *, now: float | None = None) -> Conversation:
        return Conversation(now=now, thinking=self.grammar.reasoning)

    def render(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Return the prompt for the next answer of the session.

        ``messages`` and ``tools`` are canonical (`wire.canonical`), ``options`` are variables for the template
        (``enable_thinking``). Each call must be followed by `Conversation.commit` or `Conversation.abandon`.
        Cost: O(new tokens) when the messages extend an earlier turn.
        Raises: RequestError when the template refuses the messages.
        """
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        options = self.template.options(options) if options else None
        if not self._keeps_order:
            messages = in_call_order(messages)
        match = conversation.match(messages, tools, options)
        messages = match.messages
        reason = conversation.branch_reason(match)
        asked = conversation.asked.get(match.digest)
        if asked is None:
            as_sampled = self.history == "sampled"
            suffix = self._suffix(match, tools, options, conversation.now) if as_sampled else None
            extended = suffix is not None
            if suffix is None:
                text = self._text(messages, tools, options, conversation.now)
                ids, before = self._plain.encode(text), match.base.row if match.base is not None else TokenRow()
                extended = not as_sampled and before.length > 0 and before.ids() == array("I", ids[: before.length])
                row = before.extended(ids[before.length :]) if extended else TokenRow().extended(ids)
            else:
                text, row = suffix
            opens = text.rstrip().endswith(self._opening)
            asked = KnownPrompt(match.digest, match.base, row, opens, extended)
        json, packed = asked.row.json(), asked.row.ids().tobytes()
        conversation.add_prompt(match, asked)
        asked.running += 1
        if self.history == "template" and asked.base is not None and not asked.extended:
            reason = reason or "template"
        base = asked.base if asked.extended else None
        return RenderedPrompt(
            asked,
            reason,
            extended=asked.extended,
            parent_turn=None if base is None else base.turn_id,
            reused_tokens=0 if base is None else base.row.length,
            length=asked.row.length,
            opens_reasoning=asked.opens_reasoning,
            json=json,
            packed=packed,
        )

    def parse(
        self, ids: Sequence[int], *, tools: Sequence[dict[str, Any]] | None = None, opens_reasoning: bool = False
    ) -> Choice:
        """Read a whole completion. A stop token at the end is not text; the rest is as in `stream`."""
        stream = self.stream(tools=tools, opens_reasoning=opens_reasoning)
        stream.feed(ids, final=True)
        return stream.parsed()

    def stream(
        self,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        opens_reasoning: bool = False,
        choice: int = 0,
        stops: Sequence[str] = (),
    ) -> ReplyStream:
        """Return a parser for ids as they are sampled. Without ``tools`` it finds no calls.

        ``opens_reasoning``: the prompt ends with the opening mark of the reasoning. ``stops`` are strings that end the answer.
        """
        parser = self.grammar.new_parser(tools=tools, reasoning_open=opens_reasoning)
        return ReplyStream(self.tokenizer, self.stop_token_ids, parser, choice=choice, stops=stops)

    def free_tokens(self, ids: Sequence[int], form: AnswerForm) -> int:
        """Return the number of tokens at the beginning of a completion that its form left free. Shapes: ``ids`` (C,)."""
        text = self.decode(ids)
        size = form.free_characters(text)
        if size in (0, len(text)):
            return len(ids) if size else 0
        return bisect.bisect_right(range(1, len(ids) + 1), size, key=lambda count: len(self.decode(ids[:count])))

    def count(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> int:
        """Count the tokens of the prompt for these messages, rendered in full."""
        return len(self._plain.encode(self._text(messages, tools, self.template.options(options))))

    def _text(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        options: Mapping[str, Any] | None,
        now: float | None = None,
    ) -> str:
        tools = self._plain.mask(list(tools)) if tools else tools
        return self.template.render(self._plain.messages(messages), tools=tools, options=options, now=now)

    def logprob_entries(
        self, ids: Sequence[int], logprobs: Sequence[float | None], *, top: bool = False
    ) -> list[dict[str, Any]]:
        """Return logprobs in the shape of chat completions (``choices[].logprobs.content``).

        With ``top``, each entry lists its sampled token as the one alternative that is known.
        Shapes: ``ids`` and ``logprobs`` (C,). Raises: CaptureError when the lengths differ.
        """
        if len(ids) != len(logprobs):
            raise CaptureError(f"{len(logprobs)} logprobs for {len(ids)} tokens")
        entries = []
        for token_id, logprob in zip(ids, logprobs, strict=True):
            text = self.tokenizer.text_of(token_id)
            shown = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            entries.append({**shown, "top_logprobs": [shown] if top else []})
        return entries

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def _suffix(
        self,
        match: Match,
        tools: Sequence[dict[str, Any]] | None,
        options: Mapping[str, Any] | None,
        now: float | None,
    ) -> tuple[str, TokenRow] | None:
        """Return the text after the commit's tokens, and the commit's tokens with the ids of the text.

        The text is rendered after a stub, or after the full history if the template reads it. None: everything has to
        be rendered.
        """
        base, covered, messages = match.base, match.covered, match.messages
        if base is None or covered == len(messages):
            return None
        if self.template.habits.merges_answers and messages[covered]["role"] == "assistant":
            return None  # it is written into the sampled answer
        answer, following = messages[covered - 1], self._plain.messages(messages[covered:])
        tools = self._plain.mask(list(tools)) if tools else tools
        calls = bool(answer.get("tool_calls"))
        usual = calls or following[0]["role"] != "tool"
        text: str | None = None
        rendered = False
        if usual and (self.facts.after_calls if calls else self.facts.after_text):
            with contextlib.suppress(
                RequestError
            ):  # perhaps only the stub is refused; otherwise the full rendering raises
                text = self._suffixes.suffix(answer, following, tools=tools, options=options, now=now)
                rendered = True
        if not rendered:
            before = self._plain.messages(messages[: covered - 1])
            text = self._suffixes.suffix(answer, following, tools=tools, options=options, now=now, before=before)
        ids = self._plain.encode(text) if text is not None else []
        if text is None or not ids or ids[0] not in self._closer_ids:
            return None
        last = base.row.tail(1)
        closed = ids[0] in last or (not self.facts.opener_style and not self.stop_token_ids.isdisjoint(last))
        return text, base.row.extended(ids[1:] if closed else ids)
