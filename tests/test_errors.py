"""The error tree: everything pickles, carries its ids, and answers to the standard classes callers already catch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from agentcore_rl_toolkit import errors


def tree(cls: type[errors.AgentCoreRLError]) -> Iterator[type[errors.AgentCoreRLError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


CLASSES = sorted(tree(errors.AgentCoreRLError), key=lambda c: c.__name__)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling_with_its_ids(cls: type[errors.AgentCoreRLError]) -> None:
    error = cls("what to do next", session_id="s", input_id="i", key="k")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "what to do next"
    assert copy.__dict__ == error.__dict__
    assert (copy.session_id, copy.input_id, copy.key) == ("s", "i", "k")


def test_extra_fields_survive_pickling() -> None:
    error = errors.AgentError("m", error_type="ValueError", agent_traceback="tb", session_id="s")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.error_type, copy.agent_traceback, copy.session_id) == ("ValueError", "tb", "s")
    assert pickle.loads(pickle.dumps(errors.RolloutTimeoutError("m", stage="run"))).stage == "run"
    assert pickle.loads(pickle.dumps(errors.GatewayError("m", status=503))).status == 503
    failure = pickle.loads(pickle.dumps(errors.PolicyFailure("turns", "after 6 of them")))
    assert (failure.reason, str(failure)) == ("turns", "after 6 of them")
    reply = pickle.loads(pickle.dumps(errors.AgentError("m", cause="policy", failure="turns")))
    assert (reply.cause, reply.failure) == ("policy", "turns")
    assert pickle.loads(pickle.dumps(errors.InvalidResultError("m", cause="infrastructure"))).cause == "infrastructure"
