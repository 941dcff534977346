"""What all tests with Tinker's SDK need."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def sdk_sockets() -> Iterator[None]:
    """The SDK never closes the connections it asks for its settings over: they go before another test is blamed."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
