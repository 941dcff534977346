"""Reads a request body into typed members, so that an error names its field.

A dialect declares its members as a subclass of `Members`. Members that no class declares are unknown to the gateway. They are
left out, because they cannot change which tokens are trained; ``--set allow_fields=NAME`` passes one on. A dialect refuses
fields that would make the record, or the agent's reading of the answer, wrong; the reason names the way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec

from ..errors import NOT_JSON, RequestError, unsupported
from .canonical import ModelRequest, Sampling

T = TypeVar("T")
M = TypeVar("M", bound="Members")

HALF_SURROGATE = "half surrogate"  # the name under which they are counted
# Half surrogates are escapes like ``\ud83d`` without their partner. JavaScript writes them when it cuts a string inside an emoji.
# No UTF-8 text can hold them, so JSON decoders and tokenizers refuse them.
# The lookbehind comes after the literal prefix, which `re` searches for fast.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)

# Sampling parameters of engines that OpenAI does not have; they pass through by name. Source: vLLM's and SGLang's
# request models.
_ENGINE_PARAMETERS = """
    allowed_token_ids bad_words ebnf ignore_eos
    include_stop_str_in_output json_schema length_penalty min_tokens no_stop_trim priority regex skip_special_tokens
    spaces_between_special_tokens stop_token_ids structured_outputs thinking_token_budget truncate_prompt_tokens
"""
ENGINE_PARAMETERS = frozenset(_ENGINE_PARAMETERS.split())

# Variables of a chat template that come from the request.
_NOT_FOR_TEMPLATES = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "return_dict", "strftime_now"}
)


class Refusal(NamedTuple):
    """The reason why a field is refused. A field with one of the values in ``unless``, or an empty one, is not refused."""

    why: str
    unless: tuple[Any, ...] = ()


class Route(NamedTuple):
    """The parts of a path that names a model. ``pattern`` is the path with ``{model}`` in the place of the name."""

    pattern: bytes
    model: str
    stream: bool


def read_route(path: bytes, pattern: re.Pattern[bytes], operations: Mapping[bytes, bytes]) -> Route | None:
    """Return the route of a path below a session, None for another API's path.

    ``pattern`` finds the model and the operation in a path, ``operations`` has the patterns of routes by operation.
    """
    found = pattern.fullmatch(path)
    if found is None or found[2] not in operations:
        return None
    return Route(operations[found[2]], unquote(found[1].decode("latin-1")), b"stream" in found[2])


def with_path(body: bytes, route: Route) -> bytes:
    """Return a request's body with the members that are in its path, so that a request is complete in its body.

    They come last, because the last of two members with one name counts.
    """
    given = body.strip()
    if not (given.startswith(b"{") and given.endswith(b"}")):
        return body
    given = given[:-1].rstrip()
    members = msgspec.json.encode({"model": route.model, "stream": route.stream})[1:]
    return given + (b"" if given == b"{" else b",") + members


class _TokenIds(msgspec.Struct):
    """Engine parameters that the gateway reads, too."""

    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] = []


class Members(msgspec.Struct, kw_only=True):
    """The members that requests of all dialects have, besides `Sampling`."""

    model: str = ""
    stream: bool = False
    tools: list[dict[str, Any]] = []
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}


def replace_half_surrogates(body: bytes) -> tuple[bytes, int]:
    """Return a JSON text with U+FFFD in place of each half surrogate, and their number."""
    count = 0

    def replaced(half: re.Match[bytes]) -> bytes:
        nonlocal count
        before = body[max(0, half.start() - 64) : half.start()]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:
            return half[0]  # the backslash is escaped: the text shows an escape and is none
        count += 1
        return rb"\ufffd"

    return _HALF.sub(replaced, body), count


def read_body(body: bytes, read: Callable[[bytes], T]) -> tuple[T, int]:
    """Read a request's body. If that fails, read it with U+FFFD in place of its half surrogates, and return their number.

    Raises: RequestError.
    """
    try:
        return read(body), 0
    except NOT_JSON as e:
        body, halves = replace_half_surrogates(body)
        if not halves:
            raise RequestError(f"the request body must be a JSON object: {e}") from e
    return read_body(body, read)[0], halves


def read_object(body: bytes | dict[str, Any]) -> dict[str, Any]:
    """Return the members of a request. A null counts as absent, as it does for the providers. Raises: RequestError."""
    data = read_body(body, msgspec.json.decode)[0] if isinstance(body, bytes) else body
    if not isinstance(data, dict):
        raise RequestError("the request body must be a JSON object")
    return {name: value for name, value in data.items() if value is not None}


def read_members(
    body: bytes | dict[str, Any],
    kind: type[M],
    dialect: str,
    *,
    names: Mapping[str, str] | None = None,
    refused: Mapping[str, Refusal] | None = None,
) -> tuple[M, ModelRequest]:
    """Return the members of a request, and the request with those that all dialects have.

    ``names`` are the dialect's names of sampling parameters.

    Raises: RequestError that names the field.
    """
    given = {name: _whole(value) for name, value in read_object(body).items()}
    for name, refusal in (refused or {}).items():
        if name in given:
            refuse(name, given.pop(name), refusal)
    members = convert(given, kind)
    check_template_kwargs(members.chat_template_kwargs)
    known = {*kind.__struct_encode_fields__, *(names or {}), *Sampling.__struct_fields__} - {*(names or {}).values()}
    return members, ModelRequest(
        dialect=dialect,
        model=members.model,
        stream=members.stream,
        sampling=_sampling(given, names or {}),
        parallel_tool_calls=members.parallel_tool_calls,
        template_kwargs=members.chat_template_kwargs,
        unknown={name: v for name, v in given.items() if name not in known and name not in ENGINE_PARAMETERS},
    )


def _whole(value: Any) -> Any:
    """Accept integers that some clients write as 5.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def convert(data: Any, kind: type[T], names: Mapping[str, str] | None = None) -> T:
    """Check the types and bounds of an object's members. ``names`` are the agent's names of members.

    Raises: RequestError that names the member.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as e:
        why, _, path = str(e).partition(" - at `$.")
        param = path.rstrip("`")
        missing = re.search(r"missing required field `(\w+)`", why)
        if missing is not None:
            param = f"{param}.{missing[1]}" if param else missing[1]
        member, rest = re.match(r"(\w*)(.*)", param, re.DOTALL).groups()  # type: ignore[union-attr]  # it matches anything
        param = (names or {}).get(member, member) + rest
        raise RequestError(f"{param}: {why}", param=param) from e


def _sampling(given: Mapping[str, Any], names: Mapping[str, str]) -> Sampling:
    mapped = {names.get(name, name): value for name, value in given.items() if name not in names.values()}
    if isinstance(mapped.get("stop"), str):
        mapped["stop"] = [mapped["stop"]]
    mapped["other"] = {name: mapped[name] for name in sorted(ENGINE_PARAMETERS & mapped.keys())}
    convert(mapped, _TokenIds)
    sampling = convert(mapped, Sampling, {canonical: own for own, canonical in names.items()})
    sampling.logit_bias = sampling.logit_bias or None
    return sampling


def refuse(name: str, value: Any, refusal: Refusal) -> None:
    if value is not None and value not in refusal.unless and value not in ([], {}, ""):
        raise unsupported(name, refusal.why)


def check_template_kwargs(given: Iterable[str]) -> None:
    for name in sorted(_NOT_FOR_TEMPLATES.intersection(given)):
        raise unsupported(f"chat_template_kwargs.{name}", "its value comes from the request")
