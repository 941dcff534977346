"""A model's own chat template: messages -> text, with the semantics that Hugging Face gives it.

Source: huggingface.co/docs/transformers/chat_templating; the environment (sandbox, whitespace rules, ``tojson``
without HTML escapes, ``raise_exception``, ``strftime_now``, the ``generation`` block, loop controls) is part of that
contract.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from ...errors import ConfigError
from ..errors import NOT_JSON, RequestError, unsupported
from ..wire.arguments import value_of
from ..wire.history import text_of
from .habits import EFFORTS, PROBE_USER, Habits, find_habits, probe_answer
from .parsers import grammar_of
from .tokens import read_json


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the model says; for rendering it is its content."""

    tags = {"generation"}  # noqa: RUF012  # the base class's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment


_ENVIRONMENT = _environment()


PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]},
    },
}


class ChatTemplate:
    """A compiled template. ``source`` is its text, ``tool_source`` the text of a separate template for calls with tools."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        self.source = source
        self._special = dict(special_tokens or {})
        self._default = _compile(source)
        self._with_tools = self._default if tool_source is None else _compile(tool_source)
        self.all_text = source + (tool_source or "")
        self._reads = {
            name
            for text in (source, tool_source or "")
            for name in jinja2.meta.find_undeclared_variables(_parsed(text))
        }
        self._keeps_developer = "developer" in self.all_text
        self._text_arguments = False
        self._says_thinking = bool(re.search(r"""\.thinking\b|\[['"]thinking['"]\]""", self.all_text))

        self.habits = Habits()
        self._offers: list[list[dict[str, Any]] | None] = [None]  # the probes of habits
        if self._writes([PROBE_USER], offers=[PROBE_TOOL]):
            self._offers.append([PROBE_TOOL])
        self._text_arguments = self._takes_text_arguments()
        long_id, short_id = ([PROBE_USER, probe_answer("{}", each)] for each in ("call_00000", "call00000"))
        self.habits = find_habits(
            self._writes_anyway,
            text_arguments=self._text_arguments,
            call_id=grammar_of(self.all_text).call_id,
            short_ids=self._writes_anyway(short_id) and not self._writes_anyway(long_id),
        )

    def _writes_anyway(self, messages: list[dict[str, Any]], *words: str, **options: Any) -> bool:
        """Return True if `_writes` holds without tools and with a tool."""
        return all(self._writes(messages, *words, offers=offers, **options) for offers in self._offers)

    def _writes(
        self, messages: list[dict[str, Any]], *words: str, offers: list[dict[str, Any]] | None = None, **options: Any
    ) -> bool:
        """Return True if the template accepts the messages and writes the words in this order."""
        try:
            text = self.render(messages, tools=offers, options=options, now=0.0)
        except RequestError:
            return False
        at = 0
        for word in words:
            at = text.find(word, at) + 1
            if not at:
                return False
        return True

    def options(self, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the variables as the template takes them. An unknown effort becomes the nearest, or is left out.

        So is a variable that the template does not read.
        """
        options = {name: value for name, value in (given or {}).items() if name in self._reads}
        efforts = self.habits.efforts
        effort = options.get("reasoning_effort")
        if effort in EFFORTS and effort not in efforts:
            del options["reasoning_effort"]
            if efforts and effort != "none":
                place = EFFORTS.index(effort)
                nearest = min(efforts, key=lambda level: abs(EFFORTS.index(level) - place))
                options["reasoning_effort"] = nearest
        return options or None

    def _takes_text_arguments(self) -> bool:
        """Return True if the template writes arguments that are JSON text as they are.

        Then the prompt gets the model's own text, character by character. Otherwise (it writes them as JSON itself, or
        iterates over their keys) they are objects, which is the convention.
        """
        probe = '{"q": [1,  2]}'  # spaced as no encoder would
        self._text_arguments = True
        messages = [PROBE_USER, probe_answer(probe)]
        if not self._writes(messages, probe, offers=[PROBE_TOOL]):
            return False
        # Some templates write a text unchanged, although their calls are not JSON.
        self._text_arguments = False
        return self._writes(messages, '"q"', offers=[PROBE_TOOL]) or not self._writes(messages, offers=[PROBE_TOOL])

    @classmethod
    def from_path(cls, path: str | Path, *, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """Return the template of a model directory. Raises: ConfigError if it has none, or it does not compile.

        It is in ``chat_template.jinja`` or in ``tokenizer_config.json``. Transformers saves a second template for tools in
        ``additional_chat_templates/tool_use.jinja``.
        """
        folder = Path(path)
        file = folder / "chat_template.jinja"
        if file.is_file():
            with_tools = folder / "additional_chat_templates" / "tool_use.jinja"
            tool_source = with_tools.read_text("utf-8") if with_tools.is_file() else None
            return cls(file.read_text("utf-8"), special_tokens=special_tokens, tool_source=tool_source)
        found = read_json(folder / "tokenizer_config.json").get("chat_template")
        if found is None:
            found = read_json(folder / "chat_template.json").get("chat_template")
        if isinstance(found, str):
            return cls(found, special_tokens=special_tokens)
        if isinstance(found, list):
            named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
            default = named.get("default") or next(iter(named.values()), None)
            if default:
                return cls(default, special_tokens=special_tokens, tool_source=named.get("tool_use"))
        where = "chat_template.jinja, or chat_template in tokenizer_config.json"
        raise ConfigError(f"{folder} has no chat template ({where})")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        now: float | None = None,
    ) -> str:
        """Return the text of the messages.

        ``messages`` are canonical (see `wire.canonical`). ``options`` reach the template as variables. ``now``
        (unix seconds) is the date for templates that print it: one session has one date.

        Raises: RequestError when the template refuses the messages, or they hold something other than text.
        """
        moment = datetime.datetime.now() if now is None else datetime.datetime.fromtimestamp(now)
        template = self._with_tools if tools else self._default
        prepared = self.prepare(messages)  # an error in it is ours, not the template's
        try:
            return template.render(
                messages=prepared,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=moment.strftime,
                **{**self._special, **(options or {})},
            )
        except jinja2.TemplateError as e:
            raise RequestError(f"the model's chat template refuses the messages: {e}", param="messages") from e
        except (TypeError, ValueError, KeyError, AttributeError) as e:
            raise RequestError(f"the model's chat template fails on the messages: {e}", param="messages") from e

    def prepare(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Convert canonical messages to the shape that templates expect.

        Arguments become objects, null content becomes "", and tool results get names.
        """
        names: dict[str, str] = {}
        return self.habits.apply([self._prepare(message, i, names) for i, message in enumerate(messages)])

    def _prepare(self, message: dict[str, Any], position: int, names: dict[str, str]) -> dict[str, Any]:
        ready = dict(message)
        content = ready.get("content")
        if isinstance(content, list):
            for i, part in enumerate(content):
                if part.get("type") != "text":
                    where = f"messages[{position}].content[{i}]"
                    raise unsupported(where, "this model is served by token ids, so messages can only have text")
            content = text_of(content)
        ready["content"] = "" if content is None else content
        role = ready["role"]
        if role == "developer" and not self._keeps_developer:
            ready["role"] = "system"
        elif role == "assistant":
            if ready.get("tool_calls"):
                ready["tool_calls"] = [self._prepare_call(call, names) for call in ready["tool_calls"]]
            else:
                ready.pop("tool_calls", None)
            thought = ready.get("reasoning_content")
            if not thought:
                ready.pop("reasoning_content", None)
            elif self._says_thinking:
                ready.setdefault("thinking", thought)
        elif role == "tool" and "name" not in ready:
            name = names.get(str(ready.get("tool_call_id")))
            if name is not None:
                ready["name"] = name
        return ready

    def _prepare_call(self, call: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        function = call["function"]
        names[str(call.get("id"))] = function["name"]
        arguments = function.get("arguments")
        if self._text_arguments:
            if not isinstance(arguments, str):
                arguments = _tojson({} if arguments is None else arguments)
        elif isinstance(arguments, str):
            # What is not JSON reaches the template as the model's own text.
            text = arguments
            with contextlib.suppress(*NOT_JSON):
                arguments = _as_object(arguments)
            if self.habits.objects_only and not isinstance(arguments, dict):
                arguments = {"arguments": text}
        return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments) if arguments else {}
    except NOT_JSON:
        value_of(arguments)  # it is JSON but for numbers such as NaN, which a template writes as the model did
        return json.loads(arguments)


def _parsed(source: str) -> jinja2.nodes.Template:
    return _ENVIRONMENT.parse(source)


def _compile(source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except jinja2.TemplateSyntaxError as e:
        raise ConfigError(f"the chat template does not compile, line {e.lineno}: {e.message}") from e
