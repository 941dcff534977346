"""Results to JSON: strict and deterministic.

The rules are the table in ``docs/agent.md``. Values that JSON does not know are converted by a fixed rule and noted, or
refused with their path; no value silently becomes ``str(obj)``.
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
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ..errors import InvalidResultError

MAX_DEPTH = 200
MAX_CONVERSIONS = 50


class Encoder:
    """Encodes one result. ``conversions`` maps the path of each converted value to what was done with it."""

    def __init__(self) -> None:
        self.conversions: dict[str, str] = {}

    def members(self, fields: Mapping[str, Any]) -> str:
        """``"key": value, "key": value`` for a top-level object, without its braces.

        Raises: InvalidResultError with the path of the value that cannot be stored.
        """
        plain = {name: self._plain(value, name, 0) for name, value in self._members(fields, "")}
        try:
            return json.dumps(plain, allow_nan=False)[1:-1]
        except ValueError as e:  # an integer of more digits than Python writes or reads
            raise InvalidResultError(f"the result cannot be written: {e}") from None

    def _plain(self, value: Any, path: str, depth: int) -> Any:
        """A value as str, int, float, bool, None, dict and list, all the way down."""
        if depth > MAX_DEPTH:  # also where it contains itself
            raise InvalidResultError(f"result[{path}] is nested more than {MAX_DEPTH} levels deep")
        value = self._simple(value, path)
        if isinstance(value, dict):
            return {n: self._plain(item, f"{path}.{n}", depth + 1) for n, item in self._members(value, path)}
        if isinstance(value, list):
            return [self._plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return value

    def _members(self, value: Mapping[Any, Any], path: str) -> list[tuple[str, Any]]:
        """The members of an object, by the names that their keys have in JSON."""
        found = [(self._key(key, path), item) for key, item in value.items()]
        names = {name for name, _ in found}
        if len(names) < len(found):
            twice = next(name for name in names if sum(n == name for n, _ in found) > 1)
            where = f"result[{path}]" if path else "the result"
            raise InvalidResultError(f"{where} has two keys that are both {twice!r} in JSON")
        return found

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
        if kind in (str, bool, type(None), dict, list):
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
        plain = [self._plain(item, path, 0) for item in items]
        return sorted(plain, key=json.dumps)
