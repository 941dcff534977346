"""What runs over services with training primitives share in tests: the built-in policy that writes down what it was asked for,
agents on the local runtime, and the check that what was sampled is what was trained.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.backends.collection.groups import Group
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.training.batch import Datum
from agentcore_rl_toolkit.backends.training.client import Loss, Passed
from agentcore_rl_toolkit.backends.training.local import LocalModel
from agentcore_rl_toolkit.gateway.capture.record import pack_logprobs
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.policy.word_problems import problems
from serving import serving

from .math_agent import math_agent


class RecordingModel(LocalModel):
    """`sampled` and `trained` are what it was asked for, in order.

    `keeps` is a tensor that what is published for sampling has as it was in the first publish.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sampled: list[tuple[str | None, list[int]]] = []
        self.trained: list[Datum] = []
        self.keeps: str | None = None
        self.first: str | None = None

    def sample(self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]) -> list[Any]:
        made = super().sample(path, prompt_ids, n, params)
        self.sampled += [(path, completion.token_ids) for completion in made]
        return made

    def forward_backward(self, run: str, data: Sequence[Datum], loss: Loss, *, backward: bool = True) -> Passed:
        if backward:
            self.trained += data
        return super().forward_backward(run, data, loss, backward=backward)

    def save(self, run: str, path: str, *, optimizer: bool) -> None:
        super().save(run, path, optimizer=optimizer)
        if optimizer:
            return
        self.first = self.first or path
        if self.keeps is not None:
            state = self._runs[run].model.state_dict()
            tied = [name for name, tensor in state.items() if tensor.data_ptr() == state[self.keeps].data_ptr()]
            self._saved[path]["weights"] |= {name: self._saved[self.first]["weights"][name] for name in tied}


@contextlib.contextmanager
def agents(folder: Path) -> Iterator[dict[str, Any]]:
    """The math agent on a local runtime, whose very first rollout fails; the settings of a run of one step with it."""
    records, marks = folder / "records", folder / "marks"
    marks.mkdir()
    rows = [
        {"idx": i, "prompt": p.prompt, "answer": p.answer, "fail_marker": str(marks / f"{i}.failed")}
        for i, p in enumerate(problems("train", 8, seed=5))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows[1:]:
        Path(str(row["fail_marker"])).touch()  # only the first problem's first rollout fails
    words = ("--agent", math_agent(folder), "--store", str(records), "--writable", str(marks))
    with serving(folder, "runtime", "serve", *words) as runtime:
        yield {
            "exp_id": "run",
            "agent_runtime_arn": runtime["agents"]["math"],
            "s3_bucket": f"file://{records}",
            "model_dir": WEIGHTS_DIR,
            "data_path": folder / "rows.jsonl",
            "output_dir": folder / "out",
            "endpoint_url": runtime["url"],
            "gateway_host": "127.0.0.1",
            "tps_limit": 200,
            "learning_rate": 3e-4,
            "estimator": "dr_grpo",
            "steps": 1,
            "groups_per_step": 8,  # in so many some rewards differ: without that nothing is trained
            "group_size": 4,
            "checkpoint_every": 1,
            "rollout_timeout_s": 90,
            "sampling_params": {"temperature": 1.0, "max_tokens": 64},
        }


def check_tokens(model: RecordingModel, groups: list[Group], *, sampled_from: int = 0, trained_from: int = 0) -> None:
    """What the service sampled is what was recorded; what was recorded is what it trained, shifted by one."""
    sampled = Counter(tuple(ids) for _, ids in model.sampled[sampled_from:])
    turns = [t for g in groups for r in g.usable if r.capture is not None for t in r.capture.turns]
    assert turns
    cut = [ids for _, ids in model.sampled[sampled_from:] if len(ids) > 64]  # by the gateway, at max_tokens
    sampled.update(tuple(ids[:64]) for ids in cut)
    recorded = Counter(tuple(t.completion_ids) for t in turns)
    assert recorded <= sampled
    expected = []
    for sample in to_samples(groups, estimator="dr_grpo"):
        if sample.advantage == 0.0:
            continue
        tokens = sample.token_ids
        old, advantages = [0.0] * (len(tokens) - 1), [0.0] * (len(tokens) - 1)
        for place, (mask, logprob) in enumerate(
            zip(sample.response_mask, sample.response_logprobs, strict=True), len(sample.prompt_ids)
        ):
            if mask:
                assert logprob is not None
                old[place - 1], advantages[place - 1] = logprob, sample.advantage
        expected.append((tokens[:-1], tokens[1:], pack_logprobs(old), pack_logprobs(advantages)))
    received = [
        (d.tokens, d.target_tokens, pack_logprobs(d.logprobs), pack_logprobs(d.advantages))
        for d in model.trained[trained_from:]
    ]
    # In an order of their own; logprobs and advantages bit for bit, as the 32-bit numbers of the SDK.
    assert sorted(received) == sorted(expected)
