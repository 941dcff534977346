"""Training rows in the form that slime reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..data import encode_payload, read_rows
from .convert import NOTE


def prepare_data(source: str | Path, target: Path) -> int:
    """Write rows in slime's ``{"prompt", "metadata"}`` form, the payload as metadata. Returns the number of rows.

    slime needs the key `prompt`; a payload without one gets an empty prompt there, which the agent does not see.
    Raises: ConfigError.
    """
    rows = read_rows(source)
    reserved = next((i for i, row in enumerate(rows) if NOTE in row), None)
    if reserved is not None:
        raise ConfigError(f"{source}: row {reserved} has a field `{NOTE}`, which this backend writes; rename it")
    lines = [encode_payload({"prompt": _text(row.get("prompt", "")), "metadata": row}) for row in rows]
    partial = target.with_name(target.name + ".new")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(target)
    return len(rows)


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
