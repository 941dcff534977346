"""Accepts the invocations of multi-turn RL jobs: each runs the agent once, and is answered when its reward is reported."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ...contract import ROLLOUT_FIELD, RolloutConfig
from ...errors import AgentCoreRLError
from ..record import RolloutInfo, find_secrets
from ..rollout import Rollout, RolloutFunction
from ..settings import AgentSettings
from .job import JobRollout
from .relay import Relay
from .runtime import JobRewards, JobRuntime

REMEMBERED = 10_000  # rollouts whose repeated delivery is still recognized


class Jobs:
    """The rollouts of jobs in this process. ``begin`` starts a rollout."""

    def __init__(self, begin: Callable[[Rollout], None]) -> None:
        self._begin = begin
        self._relay = Relay()
        self._running: dict[tuple[str, str], tuple[Rollout, JobRewards]] = {}
        self._reported: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def accept(
        self, job: JobRollout, function: RolloutFunction, context: Any, session_id: str, settings: AgentSettings
    ) -> dict[str, Any]:
        """Run the rollout unless it runs or ran already. Raises: AgentCoreRLError when its reward could not be reported."""
        settings.check_base_url(job.endpoint)
        identity = (job.arn, job.key)
        if identity in self._reported:
            return {"status": "in_progress" if settings.sagemaker_background else "completed"}
        if identity not in self._running:
            self._running[identity] = self._start(job, function, context, session_id, settings)
        rollout, rewards = self._running[identity]
        if settings.sagemaker_background:
            return {"status": "in_progress"}
        await asyncio.wrap_future(rollout.done)
        if not rewards.reported:
            raise AgentCoreRLError(f"the reward of {job.key} could not be reported; the agent's log says why")
        return {"status": "completed"}

    def _start(
        self, job: JobRollout, function: RolloutFunction, context: Any, session_id: str, settings: AgentSettings
    ) -> tuple[Rollout, JobRewards]:
        runtime = JobRuntime(job)
        api_key = self._relay.open(runtime)
        payload = job.payload(self._relay.base_url, api_key)
        config = RolloutConfig.from_dict(payload[ROLLOUT_FIELD])
        info = RolloutInfo(
            config=config,
            session_id=session_id,
            result_key=job.key,
            payload=None,
            secrets=find_secrets(config),
        )
        rewards = JobRewards(
            job, runtime, failures=settings.sagemaker_failures, turn_rewards=settings.sagemaker_turn_rewards
        )
        rollout = Rollout(
            function=function,
            args=function.arguments(payload, context),
            settings=settings,
            session_id=session_id,
            config=config,
            info=info,
            store=rewards,
        )

        def ended(_: Any) -> None:
            self._relay.close(api_key)
            del self._running[job.arn, job.key]
            if rewards.reported:  # otherwise the next delivery runs it once more
                self._reported[job.arn, job.key] = None
            while len(self._reported) > REMEMBERED:
                self._reported.popitem(last=False)

        try:
            self._begin(rollout)
        except BaseException:  # no thread can be started
            self._relay.close(api_key)
            raise
        rollout.done.add_done_callback(ended)
        return rollout, rewards
