"""Results to JSON: strict, deterministic, and in pieces small enough that the process keeps answering `/ping`.

The C encoder of the standard library holds the interpreter for as long as one call lasts: a second for 100 MB. So values are
measured first, and large ones are taken apart here until every call into it is short.

What becomes what: see the table in ``docs/agent.md``. Values that JSON does not know are converted by a fixed rule and noted, or
refused with their path; nothing is ever turned into ``str(obj)`` in silence.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from ..errors import InvalidResultError

MAX_DEPTH = 200
SMALL = 20_000  # nodes, or 50 characters of text each: about 5 ms in the C encoder
_CHARS_PER_NODE = 50
_SLICE = 500_000  # characters of a long string per call
MAX_CONVERSIONS = 50
_PLAIN = (str, int, float, bool, type(None))
_SCALARS = frozenset({int, float, bool, type(None)})


class Encoder:
    """Encodes one result. ``conversions`` maps the path of each converted value to what was done with it."""

    def __init__(self) -> None:
        self.conversions: dict[str, str] = {}

    def members(self, fields: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of ``"key": value, "key": value`` for a top-level object, without its braces.

        Raises: InvalidResultError with the path of the value that cannot be stored.
        """
        first = True
        for key, value in fields.items():
            name = self._key(key, "")
            yield ("" if first else ", ") + json.dumps(name) + ": "
            first = False
            yield from self._pieces(value, name, ())

    def _pieces(self, value: Any, path: str, above: tuple[int, ...]) -> Iterator[str]:
        if len(above) > MAX_DEPTH:
            raise InvalidResultError(f"result[{path}] is nested more than {MAX_DEPTH} levels deep")
        plain, small = _measure(value)
        if plain and small:
            try:
                yield json.dumps(value, allow_nan=False)
                return
            except (ValueError, RecursionError):
                pass  # a NaN, a cycle, or depth: the walk below says which and where
        if isinstance(value, str) and not small:
            yield '"'
            for start in range(0, len(value), _SLICE):
                yield json.dumps(value[start : start + _SLICE])[1:-1]
            yield '"'
            return
        value = self._simple(value, path)
        if isinstance(value, _PLAIN):
            try:
                yield json.dumps(value, allow_nan=False)
            except ValueError as e:  # an integer of more digits than Python writes or reads
                raise InvalidResultError(f"result[{path}] cannot be written: {e}") from None
            return
        if id(value) in above:
            raise InvalidResultError(f"result[{path}] contains itself")
        inside = (*above, id(value))
        if isinstance(value, dict):
            seen: set[str] = set()
            yield "{"
            for i, (key, item) in enumerate(value.items()):
                name = self._key(key, path)
                if name in seen:
                    raise InvalidResultError(f"result[{path}] has two keys that are both {name!r} in JSON")
                seen.add(name)
                yield (", " if i else "") + json.dumps(name) + ": "
                yield from self._pieces(item, f"{path}.{name}", inside)
            yield "}"
            return
        yield "["
        at = 0
        while at < len(value):
            # as many neighbours at once as stay small, so that a million numbers are not a million calls
            part = value[at : at + 2_000]
            plain, small = _measure(part)
            done = None
            if plain and small:
                try:
                    done = json.dumps(part, allow_nan=False)[1:-1]
                except (ValueError, RecursionError):
                    done = None
            if done is not None:
                yield (", " if at else "") + done
            else:
                for i, item in enumerate(part, at):
                    yield ", " if i else ""
                    yield from self._pieces(item, f"{path}[{i}]", inside)
            at += len(part)
        yield "]"

    def _key(self, key: Any, path: str) -> str:
        if isinstance(key, enum.Enum):
            key = key.value
        if hasattr(key, "item") and callable(key.item):  # numpy scalar
            key = key.item()
        if isinstance(key, str):
            return str(key)
        if key is None or isinstance(key, bool | int):
            return json.dumps(key)
        if isinstance(key, float) and math.isfinite(key):
            return json.dumps(key)
        where = f"result[{path}]" if path else "the result"
        raise InvalidResultError(f"{where} has a key of type {type(key).__name__}; JSON keys are strings")

    def _note(self, path: str, what: str) -> None:
        if len(self.conversions) < MAX_CONVERSIONS:
            self.conversions[path] = what

    def _simple(self, value: Any, path: str) -> Any:
        """One level of a value as str, int, float, bool, None, dict or list."""
        kind = type(value)
        if kind in (str, int, bool, type(None), dict, list):
            return value
        if isinstance(value, enum.Enum):
            return self._simple(value.value, path)
        if isinstance(value, float):
            if math.isfinite(value):
                return float(value)
            if path in ("rewards", "reward") or path.startswith(("rewards[", "rewards.", "reward[", "reward.")):
                raise InvalidResultError(f"result[{path}] is {value!r}; a reward must be a finite number")
            self._note(path, f"{float(value)!r} became null")
            return None
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, bytes | bytearray | memoryview):
            self._note(path, "bytes became base64")
            return base64.b64encode(value).decode("ascii")
        if isinstance(value, dt.datetime | dt.date | dt.time):
            return value.isoformat()
        if isinstance(value, dt.timedelta):
            return value.total_seconds()
        if isinstance(value, decimal.Decimal | fractions.Fraction):
            return self._simple(float(value), path)
        if isinstance(value, uuid.UUID | os.PathLike):
            return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
        if isinstance(value, Set):
            return self._sorted(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        for method in ("model_dump", "tolist"):  # pydantic models; numpy and torch arrays and scalars
            convert = getattr(value, method, None)
            if callable(convert) and not isinstance(value, type):
                return self._simple(convert(), path)
        if isinstance(value, Sequence):
            return list(value)
        raise InvalidResultError(
            f"result[{path}] is a {kind.__module__}.{kind.__qualname__}, which has no JSON form; return plain values instead"
        )

    def _sorted(self, items: Set[Any], path: str) -> list[Any]:
        # by their JSON text, because mixed types do not compare; hash order differs from process to process
        texts = {"".join(self._pieces(item, path, ())): item for item in items}
        return [json.loads(text) for text in sorted(texts)]


def is_quick(value: Any) -> bool:
    """Whether encoding a value is a matter of a few milliseconds and runs no foreign code."""
    plain, small = _measure(value)
    return plain and small


def _measure(value: Any) -> tuple[bool, bool]:
    """Whether a value is plain JSON data (exact types only), and whether it is small; looks at SMALL nodes at most."""
    nodes = 0
    plain = True
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            nodes += 1
            kind = type(item)
            if kind is str:
                nodes += len(item) // _CHARS_PER_NODE
            elif kind is dict:
                plain = plain and all(type(key) is str for key in item)
                below.extend(item.values())
            elif kind is list or kind is tuple:
                below.extend(item)
            elif kind not in _SCALARS:
                plain = False
            if nodes + len(below) > SMALL:
                return plain, False
        if not below:
            return plain, True
        level = below
    return False, False  # deeper than any reader should have to follow, or a cycle: the careful way says which
