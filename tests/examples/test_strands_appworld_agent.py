"""AppWorld: the client and the server process against a real AppWorld, on a task made here."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from .loading import EXAMPLES, load

EXAMPLE = EXAMPLES / "strands_appworld_agent"


@pytest.fixture(scope="module")
def appworld() -> Iterator[SimpleNamespace]:
    """The example's modules."""
    sys.path[:0] = [str(EXAMPLE)]
    try:
        modules = {name: import_module(f"appworld_http.{name}") for name in ("errors", "request", "server", "world")}
        yield SimpleNamespace(**modules, reward=load(EXAMPLE / "reward.py"), made_world=load(EXAMPLE / "made_world.py"))
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def python() -> str:
    """AppWorld's own Python. Its environment takes half a minute to make: the proof does that, not the tests."""
    python = EXAMPLE / ".appworld-env" / "bin" / "python"
    if not list(python.parents[1].glob("lib/python*/site-packages/appworld/apps/supervisor/apis.py")):
        pytest.skip("AppWorld is not installed beside its agent: examples/strands_appworld_agent/proof.py does it")
    return str(python)


@pytest.fixture(scope="module")
def root(appworld: SimpleNamespace, python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("appworld-root")
    subprocess.run([python, EXAMPLE / "made_world.py", root], check=True, timeout=300)
    return root


@pytest.fixture(scope="module")
def server(appworld: SimpleNamespace, python: str, root: Path) -> Iterator[str]:
    with appworld.server.running_server(python, root) as url:
        yield url


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_world_is_initialised_used_and_evaluated_by_the_real_server(appworld: SimpleNamespace, server: str) -> None:
    reward, task_id = appworld.reward.AppWorldReward(), appworld.made_world.TASK_ID
    with appworld.world.World(server, task_id) as world:
        assert world.task.instruction == appworld.made_world.INSTRUCTION
        assert "Ada Ames (ada@example.com" in appworld.request.system_prompt(world.task)
        untouched = world.evaluate()
        assert reward(evaluation=untouched) == 0.0
        assert [test["label"] for test in untouched.failures] == ["no_op_fail"] * untouched.num_tests
        assert not world.is_complete()
        assert '"last_name": "Ames"' in world.execute("me = apis.supervisor.show_profile()\nprint(me)")
        assert "NameError" in world.execute("print(you)")
        assert "Syntax error" in world.execute("print(")
        assert "not allowed" in world.execute("print(open('data/tasks/0000000_1/ground_truth/answer.json').read())")
        assert "left out" in world.execute("print('x' * 30_000)")
        world.execute("apis.supervisor.complete_task(answer='Smith')")
        assert world.is_complete()
        wrong = world.evaluate()
        assert reward(evaluation=wrong) == 0.0
        assert appworld.reward.AppWorldReward(partial=True)(evaluation=wrong) == 0.5
        world.execute("apis.supervisor.complete_task(answer=me['last_name'])")
        assert reward(evaluation=world.evaluate()) == 1.0
    with appworld.world.World(server, task_id) as again:  # a new world of the same task begins anew
        assert reward(evaluation=again.evaluate()) == 0.0
        other = appworld.world.World(server, "82e2fac_1")
        with contextlib.closing(other), pytest.raises(appworld.errors.AppWorldError, match="500"):
            other.execute("print(1)")


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(
    appworld: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appworld.server.tempfile, "tempdir", str(tmp_path))
    with (
        pytest.raises(appworld.errors.AppWorldError, match=r"(?s)ended with 1.*appworld"),
        appworld.server.running_server(sys.executable, tmp_path),  # an environment without AppWorld
    ):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("passes", "failures", "whole", "partial"),
    [
        (["no_op_fail", "no_op_pass"], [], 1.0, 1.0),
        (["no_op_fail", "no_op_fail", "no_op_pass"], ["no_op_fail", "no_op_fail"], 0.0, 0.5),
        (["no_op_pass"], ["no_op_fail"], 0.0, 0.0),  # doing nothing
        (["no_op_fail"], ["no_op_pass"], 0.0, 0.0),  # done, and something else broken
        ([], ["no_op_fail"], 0.0, 0.0),
    ],
)
def test_the_reward_counts_what_was_done_not_what_was_so_before(
    appworld: SimpleNamespace, passes: list[str], failures: list[str], whole: float, partial: float
) -> None:
    evaluation = appworld.world.Evaluation(
        success=not failures,
        num_tests=len(passes) + len(failures),
        passes=tuple({"requirement": "x", "label": label} for label in passes),
        failures=tuple({"requirement": "x", "label": label} for label in failures),
    )
    assert appworld.reward.AppWorldReward()(evaluation=evaluation) == whole
    assert appworld.reward.AppWorldReward(partial=True)(evaluation=evaluation) == partial
