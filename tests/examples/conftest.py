"""Fixtures of several examples' tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from .loading import EXAMPLES, modules_of


@pytest.fixture(scope="module")
def harbor() -> Iterator[SimpleNamespace]:
    names = "harbor_tasks dockerfiles sandbox_server sandboxes reward agents payload trial check_tasks"
    with modules_of(EXAMPLES / "harbor_agent", *names.split()) as found:
        yield found
