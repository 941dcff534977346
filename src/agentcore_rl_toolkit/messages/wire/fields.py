"""Reads a request body field by field, so that an error names its field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from ..errors import NOT_JSON, RequestError, unsupported
from .canonical import Sampling
from .rules import NOT_FOR_TEMPLATES, REFUSED
from .surrogates import replace_half_surrogates

T = TypeVar("T")

NUMBER = (int, float)

MAX_TOOLS = 10_000  # of Anthropic's tool search; each takes some microseconds to check and to render
MAX_STOP_CHARACTERS = 16_384  # of all stop strings; each token of an answer is compared with all of them

# Sampling parameters that engines take beside OpenAI's; they pass through by name. Source: vLLM's and SGLang's
# request models.
_IDS = ("stop_token_ids", "allowed_token_ids")
_ENGINE_PARAMETERS = """
    allowed_token_ids bad_words ebnf guided_choice guided_grammar guided_json guided_regex ignore_eos
    include_stop_str_in_output json_schema length_penalty min_tokens no_stop_trim priority regex skip_special_tokens
    spaces_between_special_tokens stop_token_ids structured_outputs thinking_token_budget truncate_prompt_tokens
"""
ENGINE_PARAMETERS = frozenset(_ENGINE_PARAMETERS.split())


def read_body(body: bytes, read: Callable[[bytes], T]) -> tuple[T, int]:
    """Read a request's body. If that fails, read it with U+FFFD in place of its half surrogates.

    Returns: what ``read`` returns, and the number of half surrogates.
    Raises: RequestError.
    """
    try:
        return read(body), 0
    except NOT_JSON as e:
        body, halves = replace_half_surrogates(body)
        if not halves:
            raise RequestError(f"the request body must be a JSON object: {e}") from e
    return read_body(body, read)[0], halves


def decode_body(body: bytes) -> dict[str, Any]:
    """Raises: RequestError when the body is not a JSON object."""
    decoded, _ = read_body(body, msgspec.json.decode)
    if not isinstance(decoded, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(decoded)}")
    return decoded


def check_template_kwargs(given: Iterable[str]) -> None:
    """Raises: RequestError for a variable that would replace a part of the request."""
    for name in sorted(NOT_FOR_TEMPLATES.intersection(given)):
        raise unsupported(f"chat_template_kwargs.{name}", "it is made from the request")


def text_member(item: dict[str, Any], name: str, path: str) -> str:
    """A member that must be a string. Raises: RequestError."""
    text = item.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{path}.{name} must be a string", param=f"{path}.{name}")
    return text


class Fields:
    """A JSON object whose members are taken one by one; `settle` says what becomes of the others.

    An explicit null counts as absent, as it does for the providers.
    """

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            raise RequestError(f"{path or 'the body'} must be an object, not {_kind(data)}", param=path or None)
        self.path = path
        self._left = {name: value for name, value in data.items() if value is not None}

    def __bool__(self) -> bool:
        return bool(self._left)

    def name(self, field: str) -> str:
        return f"{self.path}.{field}" if self.path else field

    def either(self, field: str, *kinds: type) -> Any:
        """The member, or None. Raises: RequestError when it has none of these types (a bool is not a number here)."""
        value = self._left.pop(field, None)
        if value is None:
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(dict.fromkeys(_NAMES.get(k, k.__name__) for k in kinds))
            raise RequestError(f"{self.name(field)} must be {wanted}, not {_kind(value)}", param=self.name(field))
        return value

    def take(self, field: str, kind: type[T]) -> T | None:
        """The member, or None. Raises: RequestError when it has another type."""
        found: T | None = self.either(field, kind)
        return found

    def need(self, field: str, *kinds: type) -> Any:
        """The member. Raises: RequestError when it is absent or has none of these types."""
        value = self.either(field, *kinds)
        if value is None:
            raise RequestError(f"{self.name(field)} is required", param=self.name(field))
        return value

    def number(self, field: str, low: float | None = None, high: float | None = None) -> float | None:
        value: float | None = self.either(field, int, float)
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            span = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}" if low is not None else ""
            raise RequestError(f"{self.name(field)} must be {span}, got {str(value)[:80]}", param=self.name(field))
        return value

    def integer(self, field: str, low: int | None = None, high: int | None = None) -> int | None:
        value = self.number(field, low, high)
        if value is not None and abs(value) >= 2**63:  # an engine would not take it
            raise RequestError(f"{self.name(field)} is too large", param=self.name(field))
        if value is None or isinstance(value, int):
            return value
        if not value.is_integer():
            raise RequestError(f"{self.name(field)} must be a whole number, got {value:g}", param=self.name(field))
        return int(value)

    def strings(self, field: str) -> list[str]:
        """A string or a list of strings, as a list."""
        value: Any = self.either(field, str, list)
        if value is None:
            return []
        values: list[Any] = [value] if isinstance(value, str) else value
        for i, item in enumerate(values):
            if not isinstance(item, str):
                where = f"{self.name(field)}[{i}]"
                raise RequestError(f"{where} must be a string, not {_kind(item)}", param=where)
        return values

    def tools(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The tools with their paths. Raises: RequestError for one that is no object, or when there are too many."""
        tools = self.take("tools", list) or []
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"tools has {len(tools)} items, {MAX_TOOLS} at most", param="tools")
        for i, tool in enumerate(tools):
            if not isinstance(tool, dict):
                raise RequestError(f"tools[{i}] must be an object", param=f"tools[{i}]")
            yield f"tools[{i}]", tool

    def refuse(self, field: str, why: str, *, unless: tuple[Any, ...] = ()) -> None:
        """Raises: RequestError when the member is there with a value other than those in ``unless`` (or an empty
        one).
        """
        value = self._left.pop(field, None)
        if value is not None and value not in unless and value not in ([], {}, ""):
            raise unsupported(self.name(field), why)

    def inside(self, field: str) -> Fields:
        """The members of an object that is a member; empty when it is absent."""
        return Fields(self.take(field, dict) or {}, self.name(field))

    def settle(self, dialect: str) -> dict[str, Any]:
        """The members that are left. Raises: RequestError for one that the dialect refuses."""
        for name, refusal in REFUSED[dialect].items():
            self.refuse(name, refusal.why, unless=refusal.unless)
        return self._left

    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template. Raises: RequestError when they would take the place of the request's own."""
        given = dict(self.take("chat_template_kwargs", dict) or {})
        check_template_kwargs(given)
        return given

    def sampling(self, max_tokens: tuple[str, ...], stop: str = "stop", *, max_temperature: float = 2.0) -> Sampling:
        """The sampling parameters that all dialects share, and the engines' own."""
        limits = [limit for name in max_tokens if (limit := self.integer(name, 1)) is not None]
        bias = self.take("logit_bias", dict)
        # Engines write "all tokens" as -1 or 0, and the field is theirs, not OpenAI's.
        top_k = self.integer("top_k", -1)
        return Sampling(
            max_tokens=min(limits) if limits else None,
            temperature=self.number("temperature", 0.0, max_temperature),
            top_p=self.number("top_p", 0.0, 1.0),
            top_k=top_k,
            min_p=self.number("min_p", 0.0, 1.0),
            seed=self.integer("seed"),
            stop=self._stops(stop),
            presence_penalty=self.number("presence_penalty", -2.0, 2.0),
            frequency_penalty=self.number("frequency_penalty", -2.0, 2.0),
            repetition_penalty=self.number("repetition_penalty", 0.0),
            logit_bias={str(k): v for k, v in bias.items()} if bias else None,
            other={name: self._other(name) for name in sorted(ENGINE_PARAMETERS & self._left.keys())},
        )

    def _stops(self, field: str) -> list[str]:
        stops = self.strings(field)
        if sum(map(len, stops)) > MAX_STOP_CHARACTERS or len(stops) > MAX_STOP_CHARACTERS:
            why = f"{self.name(field)} may have {MAX_STOP_CHARACTERS} characters in all"
            raise RequestError(why, param=self.name(field))
        return stops

    def _other(self, name: str) -> Any:
        """An engine's own parameter. Those that are read here as well must be what they are taken for."""
        value = self._left.pop(name)
        if name not in _IDS or value is None:
            return value
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
            raise RequestError(f"{self.name(name)} must be a list of token ids", param=self.name(name))
        return value


_NAMES: dict[type, str] = {
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _kind(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)
