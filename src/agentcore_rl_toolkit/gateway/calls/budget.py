"""The budget of an answer's thinking, in one call: which server holds it (`engines.thinking_budget`)."""

from __future__ import annotations

from ..dialects.canonical import Request
from ..engines import thinking_budget
from ..upstreams.router import Router, Worker


class Budget:
    """``worker`` is the server that was sent the budget: None while it is not held."""

    __slots__ = ("_asked", "_router", "worker")

    def __init__(self, router: Router, asked: Request) -> None:
        self._router = router
        self._asked = asked
        self.worker: Worker | None = None

    def at(self, worker: Worker) -> int | None:
        """The budget that this server is to be sent."""
        budget = self._asked.thinking_budget
        taken = budget is not None and thinking_budget.takes(self._router, worker)
        self.worker = worker if taken else None
        return budget if taken else None

    def goes_without(self, status: int, body: bytes) -> bool:
        """Whether the server refused the budget: it is sent none for a while."""
        if self.worker is None or not thinking_budget.refused(status, body):
            return False
        thinking_budget.leave_out(self._router, self.worker)
        return True

    def headers(self) -> list[tuple[bytes, bytes]]:
        return thinking_budget.NOT_HELD if self._asked.thinking_budget is not None and self.worker is None else []
