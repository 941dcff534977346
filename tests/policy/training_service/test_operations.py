"""Operations are done in the order of their numbers, and their results are kept."""

from __future__ import annotations

import pytest

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy.training_service.operations import Operations


def test_a_runs_operations_wait_for_the_numbers_before_them_and_are_done_once() -> None:
    operations, done = Operations(), []
    operations.begin("a", first=1)
    operations.begin("b")
    third = operations.submit("a", 3, lambda: done.append("a3"))
    second = operations.submit("a", 2, lambda: done.append("a2"))
    other = operations.submit("b", 0, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        operations.result(other).result(30)
    assert done == []  # the first is missing
    operations.submit("a", 1, lambda: done.append("a1"))
    operations.result(third).result(30)
    assert operations.submit("a", 2, lambda: done.append("again")) == second
    assert done == ["a1", "a2", "a3"]
    for ask in (lambda: operations.submit("c", 0, list), lambda: operations.result("c:0")):
        with pytest.raises(ConfigError, match="there is no"):
            ask()
    operations.close()
