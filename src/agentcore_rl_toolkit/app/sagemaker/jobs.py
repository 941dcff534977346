"""The rollout of a multi-turn RL job: its agent calls the job's model, and its reward goes to the job."""

from __future__ import annotations

import functools
from typing import Any

from ...contract import ROLLOUT_FIELD
from ..record import RolloutInfo
from ..relay import Relay
from ..rollout import Rollout, RolloutFunction
from ..settings import AgentSettings
from .calls import answer
from .job import JobRollout
from .runtime import JobRewards, JobRuntime

relay = functools.cache(Relay)  # one server for the jobs of this process, from the first rollout on


def make_rollout(
    job: JobRollout, function: RolloutFunction, context: Any, session_id: str, settings: AgentSettings
) -> Rollout:
    """Return the rollout, which has not started."""
    runtime = JobRuntime(job)
    address = relay().open(functools.partial(answer, runtime))
    config = job.config(f"{address}/v1")
    payload = {**job.row, ROLLOUT_FIELD: config.to_dict()}
    rewards = JobRewards(
        job, runtime, failures=settings.sagemaker_failures, turn_rewards=settings.sagemaker_turn_rewards
    )
    rollout = Rollout(
        function=function,
        args=function.arguments(payload, context),
        settings=settings,
        info=RolloutInfo(config=config, session_id=session_id, result_key=job.key),
        store=rewards,
    )
    rollout.done.add_done_callback(lambda _: relay().close(address))
    return rollout
