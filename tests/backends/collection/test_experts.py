"""Expert routing of a sequence: each token's own, from the turn that read or sampled it first."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from agentcore_rl_toolkit.backends.collection.experts import routed_experts
from agentcore_rl_toolkit.backends.collection.samples import Sample
from agentcore_rl_toolkit.errors import CaptureError
from agentcore_rl_toolkit.trajectory import ExpertSpan

LAYERS, TOP_K = 2, 3


def rows(count: int, first: int) -> Any:
    return np.arange(first, first + count * LAYERS * TOP_K, dtype="<i4").reshape(count, LAYERS, TOP_K)


def file(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def sample(*spans: tuple[int, int, bytes], tokens: int = 9) -> Sample:
    found = [ExpertSpan(turn_id=f"t{n}", start=a, stop=b, data=data) for n, (a, b, data) in enumerate(spans)]
    rest: dict[str, Any] = {"response_mask": [1] * (tokens - 2), "response_logprobs": [], "weight_versions": []}
    return Sample(
        **{**rest, "session_id": "s", "input_id": "i", "group_index": 0, "sequence_index": 0},
        **{"sequences": 1, "prompt_ids": [1, 2], "response_ids": [3] * (tokens - 2), "advantages": [], "reward": 1.0},
        **{"weight": 1.0, "turns": 2, "truncated": False, "routed_experts": found},
    )


def test_a_later_turn_gives_only_the_rows_after_the_end_of_the_earlier_one() -> None:
    one, two = rows(4, 0), rows(8, 1000)
    for first, second in (
        (one.tobytes(), two.tobytes()),
        (file(one), file(two)),
        (file(rows(5, 0)), file(rows(9, 1000))),
    ):
        found = routed_experts(sample((5, 9, second), (2, 5, first)), layers=LAYERS, top_k=TOP_K)
        assert np.array_equal(np.array(found), np.concatenate([one, two[4:]]))
    alone = routed_experts(sample((2, 9, two.tobytes())), layers=LAYERS, top_k=TOP_K)
    assert np.array_equal(np.array(alone), two)
    assert routed_experts(sample(), layers=LAYERS, top_k=TOP_K) is None


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        ([(2, 5, rows(4, 0).tobytes())], "ends at token 4 of 8"),
        ([(2, 9, rows(7, 0).tobytes())], "168 bytes as int32; 8 rows, 2 layers and top 3"),
        ([(2, 9, file(rows(7, 0)))], r"the shape \(7, 2, 3\)"),
        ([(2, 9, file(rows(8, 0) + 0.5))], "cannot be read as int32"),
    ],
)
def test_routing_that_does_not_fit_the_sequence_is_refused(spans: list[tuple[int, int, bytes]], problem: str) -> None:
    with pytest.raises(CaptureError, match=problem.replace("rows, ", "tokens, ")):
        routed_experts(sample(*spans), layers=LAYERS, top_k=TOP_K)
