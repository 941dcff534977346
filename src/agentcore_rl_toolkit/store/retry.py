"""When to try a store operation again, and for how long to wait: pure arithmetic, no clock and no sleep."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import StoreError


class TransientStoreError(StoreError):
    """A fault that may pass: the operation is worth another try.

    ``ambiguous`` means that the store may have done the work although no answer came back.
    """

    def __init__(self, message: str = "", *, ambiguous: bool = True, key: str | None = None) -> None:
        super().__init__(message, key=key)
        self.ambiguous = ambiguous


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Units: seconds. ``attempt_s`` bounds one try; ``bytes_per_s`` adds time for the body, so that 100 MB get longer than
    100 bytes.
    """

    attempt_s: float = 20.0
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    bytes_per_s: float = 1e6

    def attempt_limit_s(self, body_bytes: int) -> float:
        """How long one try may take."""
        return self.attempt_s + body_bytes / self.bytes_per_s

    def delay_s(self, failures: int, fraction: float) -> float:
        """Pause before the next try, after `failures` >= 1 failed ones; `fraction` in [0, 1) is the jitter."""
        ceiling = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, 30))
        return ceiling * (0.25 + 0.75 * fraction)


def jitter() -> float:
    """A fraction in [0, 1) from the operating system.

    Not from `random`: sessions restored from one snapshot share its state and would all retry in step.
    """
    return int.from_bytes(os.urandom(4)) / 2**32
