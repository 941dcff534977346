"""Operations are done in the order of their numbers."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.policy.training_service.operations import Operations


def test_a_runs_operations_wait_for_the_numbers_before_them() -> None:
    operations, done = Operations(), []
    operations.begin("a", first=1)
    operations.begin("b")
    third = operations.submit("a", 3, lambda: done.append("a3"))
    operations.submit("a", 2, lambda: done.append("a2"))
    with pytest.raises(ZeroDivisionError):
        operations.submit("b", 0, lambda: 1 / 0).result(30)
    assert done == []  # the first is missing
    operations.submit("a", 1, lambda: done.append("a1"))
    third.result(30)
    assert done == ["a1", "a2", "a3"]
    operations.close()
