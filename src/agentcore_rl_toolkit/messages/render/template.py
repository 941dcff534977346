"""A model's own chat template: messages -> text, with the semantics that Hugging Face gives it.

Source: huggingface.co/docs/transformers/chat_templating; the environment (sandbox, whitespace rules, ``tojson``
without HTML escapes, ``raise_exception``, ``strftime_now``, the ``generation`` block, loop controls) is part of that
contract."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


_SYSTEM = ("system", "developer")
PROBE_USER = {"role": "user", "content": "q"}
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]},
    },
}
# From the least to the most; agents name any of them, templates know some.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, kw_only=True)
class Habits:
    """A template's habits with messages that many templates refuse, found by trying. Messages that it refuses are written in
    another way, each by itself, so that a prompt continues from turn to turn.

    ``merges_leading``: system messages in front become one. ``leading_as_user``: they become the user's, because the template
    has no system role. ``late_as_user``: a later system message is written in place as the user's, because the template refuses
    it, leaves it out, or would put it in front. ``merges_users``: user messages in a
    row become one. ``needs_user``: a history that does not begin with the user's gets an empty message of the user's.
    ``objects_only``: arguments of a call that are no object are written as the object ``{"arguments": text}``.
    ``efforts`` are the reasoning efforts that the template takes.
    """

    merges_leading: bool = False
    leading_as_user: bool = False
    late_as_user: bool = False
    merges_users: bool = False
    needs_user: bool = False
    objects_only: bool = False
    efforts: tuple[str, ...] = EFFORTS

    def __str__(self) -> str:
        said = [phrase for name, phrase in _PHRASES.items() if getattr(self, name)]
        if self.efforts != EFFORTS:
            said.append(f"reasoning efforts: {', '.join(self.efforts) or 'none'}")
        return "; ".join(said) or "messages are written as they are"


_PHRASES = {
    "merges_leading": "leading system messages are merged",
    "leading_as_user": "leading system messages are the user's",
    "late_as_user": "later system messages are written in place, as the user's",
    "merges_users": "user messages in a row are merged",
    "needs_user": "an empty message of the user is put in front",
    "objects_only": "unreadable arguments are an object",
}


class ChatTemplate:
    """A compiled template. ``source`` is its text; ``tool_source`` that of a separate one for calls with tools, if
    there is one.
    """

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
        self._offers: list[list[dict[str, Any]] | None] = [None]  # what habits are tried with
        if self._writes([PROBE_USER], offers=[PROBE_TOOL]):
            self._offers.append([PROBE_TOOL])
        self._text_arguments = self._takes_text_arguments()
        self.habits = self._find_habits()

    def _find_habits(self) -> Habits:
        first, second, asked = "probe-first", "probe-second", "probe-asked"
        system = [{"role": "system", "content": first}, {"role": "system", "content": second}]
        user = {**PROBE_USER, "content": asked}
        broken = {"id": "call_00000", "type": "function", "function": {"name": "probe_tool", "arguments": "{broken"}}
        calling = {"role": "assistant", "content": "", "tool_calls": [broken]}
        readable = {**broken, "function": {"name": "probe_tool", "arguments": "{}"}}
        no_system = not self._writes_anyway([system[0], user], first, asked) and self._writes_anyway([user], asked)
        known = self._writes_anyway([user, {**calling, "tool_calls": [readable]}])
        return Habits(
            merges_leading=self._writes_anyway([system[0], user])
            and not self._writes_anyway([*system, user], first, second, asked),
            leading_as_user=no_system,
            late_as_user=no_system or not self._writes_anyway([user, system[0], user], asked, first, asked),
            merges_users=not self._writes_anyway([user, {**user, "content": second}], asked, second),
            needs_user=not self._writes_anyway([system[0]]) and self._writes_anyway([system[0], user]),
            objects_only=not self._text_arguments and known and not self._writes_anyway([user, calling]),
            efforts=tuple(level for level in EFFORTS if self._writes_anyway([user], reasoning_effort=level)),
        )

    def _writes_anyway(self, messages: list[dict[str, Any]], *words: str, **options: Any) -> bool:
        """`_writes`, without tools and beside one."""
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
        """Variables as the template takes them: an effort that it does not know becomes the nearest, or is left out.

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
        """Does the template write arguments that are JSON text as they are?

        Then the model's own text goes back in, character by character. Otherwise (it writes them as JSON itself, or goes
        through them by key) they are given as objects, which is the convention.
        """
        probe = '{"q": [1,  2]}'  # spaced as no encoder would
        call = {"id": "call_00000", "type": "function", "function": {"name": "probe_tool", "arguments": probe}}
        messages: list[dict[str, Any]] = [
            PROBE_USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        self._text_arguments = True
        try:
            return probe in self.render(messages, tools=[PROBE_TOOL], add_generation_prompt=False, now=0.0)
        except RequestError:
            return False

    @classmethod
    def from_path(cls, path: str | Path, *, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """The template of a model directory: ``chat_template.jinja`` (and ``additional_chat_templates/tool_use.jinja``, as
        transformers saves a model that has one of its own for tools), or inside ``tokenizer_config.json``.

        Raises: ConfigError when there is none, or it does not compile.
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
        encoder = next((folder / "encoding").glob("encoding_*.py"), None)
        if encoder is not None:  # DeepSeek V3.2 and V4 come with this in place of a template
            where += (
                f"; {encoder.name} is a program of the model's, which is not run: add a template that writes the same"
            )
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
        """The text of the messages.

        ``messages`` are canonical (see `wire.canonical`). ``options`` reach the template as variables. ``now``
        (unix seconds) is what a template that prints the date sees: one session, one date.

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
        """Canonical messages in the shape templates expect: arguments as objects, no null content, names on tool
        results.
        """
        names: dict[str, str] = {}
        return self._in_its_way([self._prepare(message, i, names) for i, message in enumerate(messages)])

    def _in_its_way(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as `Habits` say."""
        habits = self.habits
        leading = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM), len(messages))
        front, rest = messages[:leading], messages[leading:]
        if habits.merges_leading and leading > 1:
            front = [{**front[0], "content": "\n\n".join(m["content"] for m in front)}]
        if habits.leading_as_user:
            front, rest = [], [*({**m, "role": "user"} for m in front), *rest]
        if habits.needs_user and (not rest or rest[0]["role"] != "user"):
            rest.insert(0, {"role": "user", "content": ""})
        if habits.late_as_user:
            rest = [{**m, "role": "user"} if m["role"] in _SYSTEM else m for m in rest]
        if not habits.merges_users:
            return front + rest
        out = front
        for message in rest:
            if message["role"] == "user" and out and out[-1]["role"] == "user":
                out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
            else:
                out.append(message)
        return out

    def _prepare(self, message: dict[str, Any], position: int, names: dict[str, str]) -> dict[str, Any]:
        ready = dict(message)
        content = ready.get("content")
        if isinstance(content, list):
            for i, part in enumerate(content):
                if part.get("type") != "text":
                    where = f"messages[{position}].content[{i}]"
                    raise unsupported(where, "this model is served by token ids, which only text has")
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
    """Raises: one of NOT_JSON."""
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
