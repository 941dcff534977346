"""Expert routing of a training sequence, from the engine's bytes: a numpy file (vLLM) or bare int32 (SGLang)."""

from __future__ import annotations

import sys
from typing import Any

from ...errors import CaptureError
from ...trajectory.experts import int32_of, shape_of
from .samples import Sample

INT32_BYTES = 4


def routed_experts(sample: Sample, *, layers: int, top_k: int) -> memoryview[Any] | None:
    """Expert numbers of every token but the last, as the engine saw them; None when the engine reported none.

    A turn's routing covers its whole prompt and completion, so the last turn's array covers the sequence up to that
    turn. Of bare int32 the view has no copy in it: ``.tolist()`` or ``torch.frombuffer`` make one.
    Shapes: -> (T - 1, layers, top_k), int32.
    Raises: CaptureError when the bytes do not fit the sequence and the model's dimensions.
    """
    if not sample.routed_experts:
        return None
    span = sample.routed_experts[-1]
    rows = len(sample.token_ids) - 1
    wanted = rows * layers * top_k * INT32_BYTES
    shape = shape_of(span.data)
    if shape is not None and shape not in ((rows, layers, top_k), (rows + 1, layers, top_k)):
        raise CaptureError(
            f"expert routing of {span.turn_id} has the shape {shape}; {rows} tokens, {layers} layers and top {top_k} are "
            f"{(rows, layers, top_k)}",
            session_id=sample.session_id,
        )
    data = int32_of(span.data)
    if shape is not None:
        data = data[:wanted]  # some engines also report the last token, from which nothing was sampled
    if len(data) != wanted:
        raise CaptureError(
            f"expert routing of {span.turn_id} has {len(data)} bytes; {rows} tokens x {layers} layers x top {top_k} as "
            f"int32 are {wanted}",
            session_id=sample.session_id,
        )
    if sys.byteorder != "little":
        raise CaptureError("expert routing is little-endian; this machine is not", session_id=sample.session_id)
    return memoryview(data).cast("i", shape=[rows, layers, top_k])
