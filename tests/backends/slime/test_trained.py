"""The run's folder of slime, with what its trainer computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.backends.collection.advantages import grpo
from agentcore_rl_toolkit.backends.service import RolloutService
from agentcore_rl_toolkit.backends.slime import generate as module
from agentcore_rl_toolkit.backends.slime import trained
from agentcore_rl_toolkit.backends.slime.convert import NOTE, final_text
from agentcore_rl_toolkit.backends.slime.hooks import normalize_rewards
from agentcore_rl_toolkit.backends.slime.rollout import _finished
from agentcore_rl_toolkit.backends.slime.settings import SlimeSettings
from agentcore_rl_toolkit.errors import WeightsError
from agentcore_rl_toolkit.runs import Query, RunReader, TokenSequence

from ..recorded import Replay, recorded_episodes
from .stand_in import Sample, arguments

GAP, ENTROPY = 0.125, 0.5


def recorded_format(shards: list[dict[str, Any]], *, rollout_id: int, writer_rank: int) -> dict[str, Any]:
    """What slime 0.3.1 (git 624b824) makes of the data of its ranks, for the fields that are written here."""
    samples: list[dict[str, Any]] = []
    for shard in shards:
        data = dict(shard["rollout_data"])
        positions, _ = data.pop("partition"), data.pop("num_microbatches")
        samples += [
            {"rollout_position": position, **{key: column[i] for key, column in data.items()}}
            for i, position in enumerate(positions)
        ]
    samples.sort(key=lambda sample: int(sample["rollout_position"]))
    layout = [{"num_microbatches": shard["rollout_data"]["num_microbatches"]} for shard in shards]
    return {"format_version": 2, "rollout_id": rollout_id, "rank": writer_rank, "samples": samples, "dp_shards": layout}


def computed(samples: list[Any], advantages: list[float], steps: int = 1, gap: float = GAP) -> list[dict[str, Any]]:
    """What two data parallel ranks of slime's trainer hold after a step over these samples."""
    shards = []
    for rank in range(2):
        mine = list(range(len(samples)))[rank::2]
        columns: dict[str, list[Any]] = {
            "tokens": [torch.tensor(samples[i].tokens) for i in mine],
            "response_lengths": [samples[i].response_length for i in mine],
            "loss_masks": [torch.tensor(samples[i].loss_mask, dtype=torch.int) for i in mine],
            "log_probs": [torch.tensor(samples[i].rollout_log_probs) - gap for i in mine],
            "rollout_log_probs": [torch.tensor(samples[i].rollout_log_probs) for i in mine],
            "entropy": [torch.full((samples[i].response_length,), ENTROPY) for i in mine],
            "advantages": [torch.full((samples[i].response_length,), advantages[i]) for i in mine],
        }
        data = {"partition": mine, "num_microbatches": [1] * steps, **columns}
        shards.append({"rank": rank, "data_parallel_rank": rank, "rollout_data": data})
    return shards


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A folder that the rollouts of this process are recorded in."""
    folder = tmp_path / "run"
    replay = Replay(recorded_episodes(32), by_input=False)
    settings = SlimeSettings.from_args(arguments(record_dir=str(folder)))
    service = RolloutService(settings, replay.client, replay.gateway)
    module.use(service)
    yield folder
    module.use(None)
    service.close()


async def handed_over(args: Any, step: int) -> tuple[list[Any], list[float]]:
    """The flat samples of a step of two groups, as slime gets and processes them: with their advantages."""
    groups = []
    for g in range(2):
        plain = [
            Sample(index=i, group_index=g, rollout_id=i, prompt=f"p{g}", metadata={"answer": str(g)})
            for i in range(8 * g, 8 * g + 8)
        ]
        groups.append([await module.generate(args, sample, {"temperature": 1.0}) for sample in plain])
    output = _finished(SimpleNamespace(samples=groups, metrics={"rollout/truncated_ratio": 0.25}), args, step, 2.0)
    samples = [sample for group in output.samples for sample in group]
    return samples, normalize_rewards(args, samples)[1]


async def test_advantages_logprobs_and_entropy_of_slimes_trainer_are_in_the_run(
    run: Path, is_what_the_docs_say: Callable[[Path, str], None]
) -> None:
    args = arguments(save_debug_train_data=trained.template(run))
    last: list[Any] = []
    for step in range(2):
        samples, advantages = await handed_over(args, step)
        whole = recorded_format(computed(samples, advantages), rollout_id=step, writer_rank=0)
        torch.save(whole, args.save_debug_train_data.format(rollout_id=step))
        last = samples
    service = module.rollouts(args)
    service.close()  # the process that slime rolls out in is gone, and so the last step is left
    assert [path.name for path in sorted((run / trained.FOLDER).iterdir())] == ["1.json", "1.pt"]
    trained.take_rest(run)
    assert not (run / trained.FOLDER).exists()

    is_what_the_docs_say(run, "slime")
    with RunReader(run) as reader:
        rows = [reader.rollout(row["id"]) or {} for row in reader.rollouts(Query(phase="train", step=1))]
        events = reader.metrics()
    assert [(e["event"], e["step"], e["rollouts"]) for e in events] == [("step", 0, 16.0), ("step", 1, 16.0)]
    assert (events[0]["rollout_s"], events[0]["rollout/truncated_ratio"]) == (2.0, 0.25)
    assert len(rows) == 16
    by_session = {sample.metadata[NOTE]["session_id"]: sample for sample in last}
    forked = 0
    for row in rows:
        sample = by_session[row["session_id"]]
        if sample.remove_sample:
            assert (row["advantage"], row["gap_max"], row["entropy_mean"]) == (None, None, None)  # absent is not zero
            continue
        sequences = [s for s in map(TokenSequence.decoded, row["sequences"]) if s.side_call is None]
        forked += len(sequences) > 1
        assert (row["gap_max"], row["entropy_mean"]) == (pytest.approx(GAP), pytest.approx(ENTROPY))
        for sequence in sequences:
            assert sequence.trainer_logprobs is not None
            known = [value is not None for value in sequence.trainer_logprobs]
            assert known == [bool(m) for m in sequence.mask]
            assert sequence.updates == 0
    assert forked
    for g in (0, 1):
        members = [row for row in rows if by_session[row["session_id"]].group_index == g]
        rewards = [None if by_session[m["session_id"]].remove_sample else m["reward"] for m in members]
        assert [m["advantage"] for m in members] == pytest.approx(grpo(rewards))


async def test_what_is_no_whole_file_of_the_step_is_left_out(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(save_debug_train_data=trained.template(run), use_rollout_logprobs=True)
    samples, advantages = await handed_over(args, 0)
    recording = module.recording_of_process()
    assert recording is not None
    path = run / trained.FOLDER / "0.pt"
    # Of several optimizer steps the later logprobs come after updates: they say nothing of sampler and trainer.
    torch.save(recorded_format(computed(samples, advantages, steps=2), rollout_id=0, writer_rank=0), path)
    whole = path.read_bytes()
    for written in (0, 1, len(whole) // 2):  # slime is writing it
        path.write_bytes(whole[:written])
        assert trained.take(recording) == 0
    path.write_bytes(whole)
    assert trained.take(recording) == 1
    assert recording.run.flush()
    with RunReader(run) as reader:
        found = [reader.rollout(row["id"]) or {} for row in reader.rollouts(Query(usable=True))]
    assert {row["gap_max"] for row in found} == {None}
    assert {row["entropy_mean"] for row in found} == {ENTROPY}

    await handed_over(args, 1)
    torch.save({"format_version": 3}, run / trained.FOLDER / "1.pt")
    (run / trained.FOLDER / "2.json").mkdir()  # as on a full disk
    await handed_over(args, 2)
    assert "of step 1 are not kept: KeyError" in caplog.text
    assert "of step 2 will not be kept" in caplog.text


async def test_a_step_whose_logprobs_are_far_from_slimes_own_ends_the_run(run: Path) -> None:
    args = arguments(save_debug_train_data=trained.template(run))
    samples, advantages = await handed_over(args, 0)
    far = recorded_format(computed(samples, advantages, gap=0.5), rollout_id=0, writer_rank=0)
    torch.save(far, run / trained.FOLDER / "0.pt")
    with pytest.raises(WeightsError, match=r"the weights did not arrive: .* of version 0 differ by 0\.5 on average"):
        await handed_over(args, 1)


async def test_a_run_that_goes_on_from_a_checkpoint_has_its_steps_once(run: Path) -> None:
    for step in range(2):
        await handed_over(arguments(), step)
    old = module.rollouts(None)
    old.close()
    replay = Replay(recorded_episodes(32), by_input=False)
    module.use(RolloutService(old.settings, replay.client, replay.gateway))
    for step in (1, 2):
        await handed_over(arguments(), step)
    module.rollouts(None).close()
    with RunReader(run) as reader:
        assert [(s["phase"], s["step"], s["rollouts"]) for s in reader.steps()] == [("train", n, 16) for n in range(3)]


def test_the_final_text_of_a_rollout_is_the_last_that_the_model_wrote() -> None:
    dialogue = [
        {"role": "assistant", "content": "42"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "?"},
    ]
    assert final_text(SimpleNamespace(capture=SimpleNamespace(dialogue=dialogue))) == "42"  # type: ignore[arg-type]
