"""An environment for rLLM's own code: this one plus the few packages its configuration and gateway manager import."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# verl as rLLM pins it, without what its actor needs: its configuration, and what rLLM's trainer does beside the actor.
VERL = ("--no-deps", "verl==0.8.0")


@pytest.fixture(scope="session")
def rllm_python(make_environment: Callable[..., str]) -> str:
    """Path of a Python for rLLM's checkout."""
    wanted = ("omegaconf", "hydra-core", "codetiming", "tensordict", "ray", "fastapi", "cachetools", "einops", "pillow")
    return make_environment("rllm-test", *wanted, then=VERL, upon_this=True)
