"""A public name stays what it is whatever was imported before."""

from __future__ import annotations

import importlib

from agentcore_rl_toolkit import policy


def test_the_generator_of_problems_is_no_module() -> None:
    importlib.import_module("agentcore_rl_toolkit.policy.word_problems")
    assert policy.problems("train", 1, seed=0)[0].prompt
