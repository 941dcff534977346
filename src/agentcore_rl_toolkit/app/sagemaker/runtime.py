"""A job's runtime for one rollout: samples, and the reward at the end. boto3 signs the calls."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, ReadTimeoutError, UnknownServiceError

from ..._installation import missing_extra
from ...aws_errors import Fate, Fault, look_up
from ...contract import Cause, extract_reward, parse_record, record_error, record_outcome
from ...errors import ContractError, StoreError
from ...store import ObjectStore, backoff_s
from ...store.base import TransientStoreError
from ...store.remote import find_session
from ..settings import Failures
from .job import JobRollout

log = logging.getLogger(__name__)

READ_S = 300.0  # a whole reply of 8,192 tokens, the most that a job samples per turn
RETRY_S = 240.0  # a job gives a rollout 300 s at least
_BUSY = frozenset({500, 503})
# The service's words for a rollout that it has ended.
_ENDED = ("not in valid status", "cannot transition trajectory", "already processed", "trajectory not found")


class JobCallError(Exception):
    """A call that the job runtime refused, or that did not reach it. ``again``: nothing was sampled, and a retry may help."""

    def __init__(self, message: str, *, status: int, again: bool = False) -> None:
        super().__init__(message)
        self.status, self.again = status, again

    @property
    def ended(self) -> bool:
        """True if the job has ended the rollout."""
        return self.status < 500 and any(text in str(self).lower() for text in _ENDED)


@functools.lru_cache(maxsize=8)
def _client(region: str, endpoint: str | None) -> Any:
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1}, connect_timeout=10, read_timeout=READ_S, max_pool_connections=64)
    try:
        made = {"region_name": region, "endpoint_url": endpoint, "config": config}
        return find_session().client("sagemakerjobruntime", **made)
    except UnknownServiceError as e:
        raise missing_extra("this version of boto3 has no multi-turn RL jobs: update boto3", "sagemaker") from e


class JobRuntime:
    """The job runtime of one rollout. Its methods block."""

    def __init__(self, job: JobRollout) -> None:
        self.job = job
        self._boto = _client(job.region, job.endpoint)

    def sample(self, request: bytes, *, stream: bool) -> Any:
        """Return the reply to a chat completion: its bytes, or an object that streams them. Retry while the job is busy.

        Raises: JobCallError.
        """
        name = "sample_with_response_stream" if stream else "sample"
        began_s, failures = time.monotonic(), 0
        while True:
            try:
                reply = self.call(name, TrajectoryId=self.job.trajectory_id, Body=request)
                self.job.samples += 1
                return reply
            except JobCallError as e:
                self.job.ended = self.job.ended or e.ended
                failures += 1
                delay_s = backoff_s(failures, first_s=0.5, most_s=8.0)
                if not e.again or time.monotonic() - began_s + delay_s > RETRY_S:
                    raise
            time.sleep(delay_s)

    def call(self, operation: str, **arguments: Any) -> Any:
        """Send one request, without retries, and return the body of the reply. Raises: JobCallError."""
        try:
            body = getattr(self._boto, operation)(JobArn=self.job.arn, **arguments).get("Body")
            return body.read() if operation == "sample" else body
        except (BotoCoreError, ClientError) as e:
            fault = look_up(e) or Fault(fate=Fate.FINAL, code="")
            status = fault.status or (504 if isinstance(e, ReadTimeoutError) else 502)
            again = fault.status in _BUSY
            if fault.fate is Fate.TRANSIENT:
                status, again = 503, True
            elif fault.fate is Fate.REFUSED and status != 409:  # a throttling may have any status
                status, again = 429, status != 402
            raise JobCallError(str(e), status=status, again=again) from e


class JobRewards(ObjectStore):
    """The store of a job's record: the reward in the record goes to the job, once.

    Args:
        failures: the report of a rollout that agent or infrastructure failed: "failed", or "zero" for a reward of 0.
        turn_rewards: send a list of rewards as it is if it has one per sample; otherwise its last element counts.
    """

    attempt_s = 60.0

    def __init__(self, job: JobRollout, runtime: JobRuntime, *, failures: Failures, turn_rewards: bool) -> None:
        super().__init__(job.arn)
        self._job, self._runtime = job, runtime
        self._failures, self._turn_rewards = failures, turn_rewards
        self._verdict: tuple[str, list[float]] | None = None
        self._completed = False

    async def _put(self, key: str, body: bytes, create_only: bool, durable: bool) -> None:
        if self._verdict is None:
            self._verdict = self._judge(parse_record(body))
        if self._job.ended:
            log.error("the job has ended %s already: nothing is reported", key)
            return
        status, rewards = self._verdict
        if not self._completed:
            await self._report(key, "complete_rollout", Status=status)
            self._completed = True
        await self._report(key, "update_reward", Rewards=rewards)

    async def _report(self, key: str, operation: str, **arguments: Any) -> None:
        ids = {"TrajectoryId": self._job.trajectory_id, "ClientToken": self._job.client_token(operation)}
        try:
            await asyncio.to_thread(self._runtime.call, operation, **ids, **arguments)
        except JobCallError as e:
            if e.ended:
                log.warning("%s of %s: the job already has it: %s", operation, key, e)
            elif e.status >= 500 or e.status == 429:
                raise TransientStoreError(str(e), key=key) from e
            else:
                raise StoreError(f"{operation} of {key}: {e}", key=key) from e

    def _judge(self, record: Mapping[str, Any]) -> tuple[str, list[float]]:
        """Return the rollout's status and rewards."""
        if self._job.samples == 0:
            log.error("%s sampled nothing from the job's model: SageMaker may end the whole job", self._job.key)
        error = record_error(record)
        scored = error is None or error.cause == Cause.POLICY
        given = record.get("rewards", record.get("reward"))
        reward = _number(given) if scored else None
        if reward is None:
            why = f"its reward is {given!r}" if scored else f"{record_outcome(record)}: {record.get('stop_reason')}"
            log.error("%s failed (%s) and is reported as %s", self._job.key, why, self._failures)
            return "ready" if self._failures == "zero" else "failed", [0.0]
        if self._turn_rewards and isinstance(given, list):
            turns = [one for one in map(_number, given) if one is not None]
            if len(turns) == len(given) == self._job.samples:
                return "ready", turns
            log.warning("%s: %d rewards for %d samples: the last counts", self._job.key, len(given), self._job.samples)
        return "ready", [reward]

    async def _none(self, *_: Any, **__: Any) -> Any:
        raise StoreError("a job does not return records")

    _get = _head = _list = _delete = _none


def _number(reward: Any) -> float | None:
    try:
        return extract_reward({"rewards": reward})
    except ContractError:
        return None
