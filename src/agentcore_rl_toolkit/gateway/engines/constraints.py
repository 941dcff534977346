"""Constraints on an answer's form, in each engine's own fields.

`ModelRequest.response_format` has the chat shape; ``{"type": "structural_tag", "format": ...}`` is what `render.call_format`
makes of a tool choice. Source: vLLM's `sampling_params.StructuredOutputsParams`, SGLang's `sampling/sampling_params.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...messages.wire.canonical import ModelRequest

_encode = msgspec.json.Encoder().encode
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}  # vLLM's names before 0.11

VLLM = frozenset({"structured_outputs", *_GUIDED})
SGLANG = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})


def holds(asked: ModelRequest) -> bool:
    """Whether the answer is held to a form, so that its logprobs are of the tokens that the form left over."""
    kind = (asked.response_format or {}).get("type", "text")
    return kind != "text" or not (VLLM | SGLANG).isdisjoint(asked.sampling.other)


def for_vllm(response_format: Mapping[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters with ``structured_outputs`` for the constraint; an explicit one of the agent's stays."""
    rest = {key: value for key, value in other.items() if key not in _GUIDED}
    guided = {_GUIDED[key]: value for key, value in other.items() if key in _GUIDED}
    kind = (response_format or {}).get("type")
    if response_format is None or kind == "text":
        found: dict[str, Any] = guided
    elif kind == "json_object":
        found = {"json_object": True}
    elif kind == "json_schema":
        found = {"json": response_format["json_schema"]["schema"]}
    else:
        found = {"structural_tag": _encode(response_format).decode()}
    return {"structured_outputs": found, **rest} if found else rest


def for_sglang(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """The sampling parameter for the constraint; SGLang takes schemas and tags as JSON text."""
    kind = (response_format or {}).get("type")
    if response_format is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema":
        return {"json_schema": _encode(response_format["json_schema"]["schema"]).decode()}
    return {"structural_tag": _encode(response_format).decode()}
