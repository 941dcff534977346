"""What a recording keeps of a trainer's log."""

from __future__ import annotations

import math

from agentcore_rl_toolkit.backends.collection.recording import step_numbers


def test_a_loss_that_is_no_number_is_kept_under_the_name_of_all_trainers() -> None:
    found = step_numbers({"actor/pg_loss": math.nan, "actor/grad_norm": math.inf, "words": "x", "lr": 1e-6})
    assert math.isnan(found["loss"])
    assert found["grad_norm"] == math.inf
    assert found["lr"] == 1e-6
    assert "words" not in found
