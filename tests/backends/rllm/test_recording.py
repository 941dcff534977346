"""rLLM's episodes into a run's folder. No rLLM needed."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.rllm.recording import Recorder
from agentcore_rl_toolkit.errors import WeightsError
from agentcore_rl_toolkit.runs import RunReader, TokenSequence

from ..recorded import Replay, recorded_episodes, requests_for


def episodes() -> list[Any]:
    """Two groups of four as rLLM has them after its advantages: a trajectory for each sequence, a step for each trained span."""
    recorded = recorded_episodes(8, per_group=4)
    replay = Replay(recorded)
    groups = collect(requests_for(recorded), client=replay.client, gateway=replay.gateway)
    made: dict[str, Any] = {}
    for sample in to_samples(groups):
        episode = made.setdefault(
            sample.session_id,
            SimpleNamespace(session_id=sample.session_id, trajectories=[], metadata={}, termination_reason="ENV_DONE"),
        )
        uid, ids, start = f"{sample.session_id}-{sample.sequence_index}", sample.token_ids, len(sample.prompt_ids)
        steps = []
        for trained, span in itertools.groupby(range(len(sample.response_mask)), sample.response_mask.__getitem__):
            at = list(span)
            begin, end = at[0], at[-1] + 1
            if trained:
                steps.append(
                    SimpleNamespace(
                        id=f"{uid}-{len(steps)}",
                        model_output=None,
                        chat_completions=[
                            {"role": "user", "content": "How many?"},
                            {"role": "assistant", "content": f"{len(steps)}"},
                        ],
                        prompt_ids=ids[: start + begin],
                        response_ids=ids[start + begin : start + end],
                        logprobs=sample.response_logprobs[begin:end],
                        weight_version=sample.weight_versions[begin],
                        advantage=sample.advantages[begin:end],
                    )
                )
        episode.trajectories.append(SimpleNamespace(uid=uid, reward=sample.reward, steps=steps))
    return list(made.values())


class Ended:
    """A future of our client that ended with a record."""

    attempt = 1

    def __init__(self) -> None:
        self.record = {"rewards": 1.0, "status_code": 200}
        self.stages = {"queue": 0.1, "run": 1.0}

    def elapsed(self) -> float:
        return 1.1


def written(folder: Path, found: list[Any]) -> Recorder:
    recorder = Recorder(str(folder), {"trainer": "rllm"})
    for place, episode in enumerate(found):
        recorder.invoked(episode.session_id, Ended())
        recorder.ended(episode, task_id="task", place=place, task={"prompt": "How many?"}, step=1, validation=False)
    return recorder


def test_a_step_is_written_with_tokens_dialogue_and_advantages(
    tmp_path: Path, is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    found = episodes()
    recorder = written(tmp_path, found)
    kept, dropped = found[:-1], found[-1]
    recorder.logged({"loss": 0.5, "told": "x"}, 1, [SimpleNamespace(trajectories=e.trajectories) for e in kept])
    recorder.close()
    is_what_the_docs_say(tmp_path, "rLLM")
    with RunReader(tmp_path) as run:
        rows = {row["session_id"]: row for row in run.rollouts()}
        assert len(rows) == len(found) > 3
        for episode in kept:
            row = rows[episode.session_id]
            assert (row["outcome"], row["step"], row["mask_reason"]) == ("ok", 1, None)
            assert row["advantage"] == pytest.approx(episode.trajectories[0].steps[0].advantage[0])
            sampled = [token for t in episode.trajectories for step in t.steps for token in step.response_ids]
            whole = run.rollout(row["id"])
            assert whole is not None
            trained = [
                token
                for s in map(TokenSequence.decoded, whole["sequences"])
                for token, mask in zip(s.ids, s.mask, strict=True)
                if mask
            ]
            assert sorted(trained) == sorted(sampled)
            assert whole["dialogue"][0]["content"] == "How many?"
            assert whole["detail"]["stages"] == {"queue": 0.1, "run": 1.0}
        assert (rows[dropped.session_id]["mask_reason"], rows[dropped.session_id]["advantage"]) == ("filtered", None)
        (event,) = run.metrics()
        assert (event["event"], event["step"], event["loss"]) == ("step", 1, 0.5)
        assert "told" not in event


def test_rollouts_that_end_at_once_are_in_one_run(tmp_path: Path) -> None:
    """rLLM's rollouts end in threads. Each might be the first, which opens the run and forgets what was there of its step."""
    found = episodes()
    recorder = Recorder(str(tmp_path), {"trainer": "rllm"})
    together = threading.Barrier(len(found))
    for episode in found:
        recorder.invoked(episode.session_id, Ended())

    def end(place: int) -> None:
        together.wait(30)
        recorder.ended(found[place], task_id="task", place=place, task={}, step=1, validation=False)

    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(end, range(len(found))))
    recorder.close()
    with RunReader(tmp_path) as run:
        assert {row["session_id"] for row in run.rollouts()} == {episode.session_id for episode in found}


@pytest.mark.parametrize(
    ("logged", "ends"),
    [
        ({"train/kl_sample_train_v1": 0.02}, False),  # Tinker
        ({"train/kl_sample_train_v1": 1.4}, True),
        ({"offpolicy/kl": 0.01, "actor/ppo_kl": 0.0}, False),  # verl
        ({"offpolicy/kl": 1.4, "actor/ppo_kl": 0.0}, True),
        ({"offpolicy/kl": 0.0, "actor/ppo_kl": 1.4}, True),  # with the sampler's logprobs for the old ones
        ({"offpolicy/kl": math.nan}, True),
        ({"val/reward": 0.5}, False),
    ],
)
def test_a_step_that_other_weights_sampled_ends_the_run(tmp_path: Path, logged: dict[str, float], ends: bool) -> None:
    with pytest.raises(WeightsError, match=r"the weights did not arrive: .* of step 3") if ends else nullcontext():
        Recorder(str(tmp_path), {}).check(logged, 3)
    Recorder(str(tmp_path), {}, max_mean_gap=None).check(logged, 3)
    Recorder(str(tmp_path), {}, asynchronous=True).check(logged, 3)
