"""Expert routing of a training sequence, from the engine's bytes."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import CaptureError
from .samples import Sample

INT32_BYTES = 4


def routed_experts(sample: Sample, *, layers: int, top_k: int) -> memoryview[Any] | None:
    """Expert numbers of every token but the last, as the engine saw them; None when the engine reported none.

    A turn's routing covers its whole prompt and completion, so the last turn's array covers the sequence up to that
    turn. The view has no copy in it: ``.tolist()`` or ``torch.frombuffer`` make one.
    Shapes: -> (T - 1, layers, top_k), int32.
    Raises: CaptureError when the bytes do not fit the sequence and the model's dimensions.
    """
    if not sample.routed_experts:
        return None
    span = sample.routed_experts[-1]
    rows = len(sample.token_ids) - 1
    wanted = rows * layers * top_k * INT32_BYTES
    if len(span.data) != wanted:
        raise CaptureError(
            f"expert routing of {span.turn_id} has {len(span.data)} bytes; {rows} tokens x {layers} layers x top {top_k} as "
            f"int32 are {wanted}",
            session_id=sample.session_id,
        )
    if sys.byteorder != "little":
        raise CaptureError("expert routing is little-endian; this machine is not", session_id=sample.session_id)
    return memoryview(span.data).cast("i", shape=[rows, layers, top_k])
