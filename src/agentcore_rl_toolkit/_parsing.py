"""JSON from outside: of callers, sessions and files. What cannot be kept, answered or written again is refused here."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64  # reading and writing JSON recurse; AWS's deepest request has six levels
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def parse_json(data: bytes | str) -> Any:
    """Return the value. Raises: ValueError with the reason: no JSON, too deep, a number out of range, half a surrogate pair."""
    try:
        value = json.loads(data, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, str):
            if not part.isascii():
                part.encode()  # UnicodeEncodeError is a ValueError
        elif isinstance(part, float):
            if not math.isfinite(part):
                raise ValueError("a number is too large")
        elif isinstance(part, (dict, list)):
            if depth > MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
            waiting += ((inner, depth + 1) for inner in (part.values() if isinstance(part, dict) else part))
            if isinstance(part, dict):
                waiting += ((name, depth) for name in part)
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
