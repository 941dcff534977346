"""A whole run on training sessions by real HTTP: the local service over the built-in policy, a gateway, real agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from agentcore_rl_toolkit.backends.collection.groups import Group
from agentcore_rl_toolkit.backends.sagemaker.adapter import run_async
from agentcore_rl_toolkit.backends.sagemaker.local.service import running
from agentcore_rl_toolkit.backends.sagemaker.settings import SageMakerConfig
from agentcore_rl_toolkit.backends.training.settings import STATE_FILE
from agentcore_rl_toolkit.contract import Outcome
from agentcore_rl_toolkit.runs.folder import append_event, read_metrics, status

from ..service_runs import RecordingModel, agents, check_tokens


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_session_trains_exactly_what_it_sampled_and_a_second_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RecordingModel()
    steps: list[dict[str, Any]] = []
    batches: list[list[Group]] = []

    def keep(event: str, facts: dict[str, Any]) -> None:
        if event == "collected":
            batches.append(facts["groups"])
        elif event == "step":
            steps.append(facts)

    with contextlib.closing(model), running(model) as service, agents(tmp_path) as settings:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        config = SageMakerConfig(
            base_model="arn:aws:sagemaker:us-west-2:aws:hub-content/SageMakerPublicHub/Model/m",
            role_arn="arn:aws:iam::123456789012:role/training",
            output_s3="s3://bucket/runs",
            **settings,
        )
        assert asyncio.run(run_async(config, keep)) == 1
        assert status(config.output_dir) == "finished"
        [groups] = batches
        assert Counter(r.outcome for g in groups for r in g.rollouts) == {Outcome.OK: 31, Outcome.AGENT_ERROR: 1}
        assert steps[0]["billed_sample_tokens"] > 0
        check_tokens(model, groups)
        assert [d.mask for d in model.trained] == [[a != 0 for a in d.advantages] for d in model.trained]
        state = json.loads((config.output_dir / STATE_FILE).read_text())
        assert state["state"] in model.paths

        append_event(
            config.output_dir, "step", {"step": 1}
        )  # a step without a checkpoint, before the process was killed
        sampled, trained = len(model.sampled), len(model.trained)
        asyncio.run(run_async(config.replace(steps=2), keep))
        groups = batches[1]
        assert steps[1]["step"] == 1
        assert ["loss" in event for event in read_metrics(config.output_dir)] == [True, True]
        # Its first rollouts come from the restored weights, under the version they had.
        turns = [t for g in groups for r in g.usable if r.capture is not None for t in r.capture.turns]
        assert {t.weight_version_first for t in turns} == {1}
        check_tokens(model, groups, sampled_from=sampled, trained_from=trained)
