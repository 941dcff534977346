"""`agentcore-rl promote` with a real engine behind the endpoint, and a real agent that gets rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcore_rl_toolkit.weights.engines import EngineAddress
from serving import serving

from .conftest import an_aws
from .loopback_aws import LoopbackAWS
from .test_promote import BUCKET, IDS, agent_of, aws_of_models, chat, hosts, promote, trained

__all__ = ["aws_of_models", "chat", "hosts"]  # fixtures
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with an_aws(tmp_path_factory.mktemp("aws")) as found:
        yield found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("engine"), "policy", "serve") as info:
        yield info["url"]


def test_the_engine_has_the_weights_of_the_run_and_the_agent_answers_rows(
    aws_of_models: LoopbackAWS, account: dict[str, str], engine: str, tmp_path: Path
) -> None:
    logprobs = [0.0, *EngineAddress(url=engine).connect().logprobs(IDS)]
    run = trained(tmp_path / "refund", logprobs)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "one", "prompt": "hello", "_reference": "the answer"}\n')
    words = ("--bucket", BUCKET, "--agent", agent_of(account)[0], "--json")
    done = promote(str(run), *words, "--rows", str(rows))
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["logprob_gap_mean"] < 1e-5
    assert facts["steps"][-1] == 'one: 200 {"rewards": 5.0}'

    rows.write_text('{"id": "two", "prompt": "hello", "fail": true}\n')
    assert "Received error (500)" in str(promote(str(run), *words, "--rows", str(rows)).exception)

    assert promote(str(run), *words, "--remove").exit_code == 0
    other = trained(tmp_path / "other" / "refund", [each - 0.5 for each in logprobs])
    assert "does not serve the weights of the run" in str(promote(str(other), *words).exception)
