"""Expert routing: from the engine's form in a reply's JSON to bytes: base64, of a numpy file (vLLM) or bare int32 (SGLang)."""

from __future__ import annotations

import binascii

import msgspec

from ...errors import CaptureError

_text = msgspec.json.Decoder(str)
_NULL = b"null"


def binary(value: msgspec.Raw) -> bytes | None:
    """The array's bytes, None for null. Raises: CaptureError when it is no such array."""
    data = bytes(value)
    if data == _NULL:
        return None
    try:
        return binascii.a2b_base64(_text.decode(data), strict_mode=True)
    except (msgspec.DecodeError, UnicodeError, ValueError) as e:
        raise CaptureError(f"the engine's routed_experts are no base64: {e}") from e
