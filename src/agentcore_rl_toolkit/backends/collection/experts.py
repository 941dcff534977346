"""Expert routing of a training sequence, from the engine's bytes: a numpy file (vLLM) or bare int32 (SGLang)."""

from __future__ import annotations

from typing import Any

from ...errors import CaptureError
from ...trajectory import ExpertSpan
from ...trajectory.experts import read
from .samples import Sample

INT32_BYTES = 4


def routed_experts(sample: Sample, *, layers: int, top_k: int) -> memoryview[Any] | None:
    """Return the experts of every token but the last, as they were when it was sampled, if the engine reports them.

    A turn's routing covers its whole prompt and completion. From each turn come the rows after the end of the earlier turn:
    for its own tokens, and for the context that it read first. A later turn's rows for earlier tokens may be of other weights.
    For a single turn's bare int32, the result is a view without a copy.
    Shapes: -> (T - 1, layers, top_k), int32.
    Raises: CaptureError when the bytes do not fit the sequence and the model's dimensions.
    """
    if not sample.routed_experts:
        return None
    row = layers * top_k * INT32_BYTES
    parts: list[bytes] = []
    begin = 0
    for span in sorted(sample.routed_experts, key=lambda span: span.stop):
        end = span.stop - 1  # the last token has no routing: nothing was sampled after it
        parts.append(_rows(sample, span, (end, layers, top_k))[begin * row : end * row])
        begin = end
    rows = len(sample.token_ids) - 1
    if begin != rows:
        raise CaptureError(
            f"expert routing ends at token {begin} of {rows}: the last turn has none", session_id=sample.session_id
        )
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts)).cast("i", shape=[rows, layers, top_k])


def _rows(sample: Sample, span: ExpertSpan, wanted: tuple[int, int, int]) -> bytes:
    rows, layers, top_k = wanted
    shape, data = read(span.data)
    size = rows * layers * top_k * INT32_BYTES
    fits = (
        len(data) == size if shape is None else shape in (wanted, (rows + 1, layers, top_k))
    )  # some with the last token
    if not fits:
        has = f"{len(data)} bytes as int32" if shape is None else f"the shape {shape}"
        raise CaptureError(
            f"expert routing of {span.turn_id} has {has}; {rows} tokens, {layers} layers and top {top_k} are {wanted}, "
            f"{size} bytes",
            session_id=sample.session_id,
        )
    return data
