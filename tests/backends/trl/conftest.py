"""An environment with TRL: this one if it has it, else a small one on top of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"


@pytest.fixture(scope="session")
def trl_python(make_environment: Callable[..., str]) -> str:
    """Path of a Python that can import TRL and this package."""
    if importlib.util.find_spec("trl") and importlib.util.find_spec("peft"):
        return sys.executable
    return make_environment("trl-test", "-c", str(CONSTRAINTS), "trl>=1.16,<2", "peft>=0.15", upon_this=True)
