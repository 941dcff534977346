"""Expert routing: from the engine's form in a reply's JSON to bytes.

vLLM: base64 of a numpy file. SGLang: base64 of bare int32. Either may come as nested lists by a server in between.
"""

from __future__ import annotations

import binascii
import struct

import msgspec

from ...errors import CaptureError
from ...trajectory.experts import as_file

_text = msgspec.json.Decoder(str)
_lists = msgspec.json.Decoder(list[list[list[int]]])
_NULL = b"null"


def binary(value: msgspec.Raw) -> bytes | None:
    """The array's bytes, None for null. Raises: CaptureError when it is no such array."""
    data = bytes(value)
    if data == _NULL:
        return None
    try:
        if data[:1] == b'"':
            return binascii.a2b_base64(_text.decode(data), strict_mode=True)
        tokens = _lists.decode(data)
    except (msgspec.DecodeError, UnicodeError, ValueError) as e:
        raise CaptureError(f"the engine's routed_experts are neither base64 nor lists of numbers: {e}") from e
    layers = len(tokens[0]) if tokens else 0
    top = len(tokens[0][0]) if layers else 0
    if any(len(token) != layers or any(len(layer) != top for layer in token) for token in tokens):
        raise CaptureError("the engine's routed_experts have rows of different lengths")
    try:
        return as_file((len(tokens), layers, top), [n for token in tokens for layer in token for n in layer])
    except struct.error as e:
        raise CaptureError(f"the engine's routed_experts are no int32: {e}") from e
