"""Multi-turn RL jobs: each runs its agent on a batch of rows, collects the rewards, and trains; or it evaluates.

Theory of operation. A job is one task. A rollout is an invocation of the agent with the payload of AWS's jobs; it is over when
CompleteRollout and UpdateReward have come, whatever the agent answers. A rollout that failed is tried again under a new id. A
fault that was seen to end whole jobs at AWS ends this job too. A rollout whose tries are used up is left out of its group.

Hyperparameters have the names that the API was seen to accept, and the ranges of the developer guide. Steps are synchronous,
all weights are trained (no LoRA), nothing is validated between steps; advantage methods that are not computed here are refused.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

from ....contract import nearly_equal
from ..interface import Example
from ..model import PolicyModel
from . import wire
from .control import Packages
from .wire import RefusedError

log = logging.getLogger(__name__)

REWARD_S = 60.0  # from CompleteRollout to UpdateReward; AWS's own limit is not known
REPORTED = ("ready", "failed")
PASS = 32  # examples in one pass, which bounds its memory


class Rollouts(Struct, kw_only=True, forbid_unknown_fields=True):
    """The hyperparameters that trainings and evaluations share. Those of type Any are read by AWS only."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    sampling_top_p: wire.Fraction = 1.0
    sampling_max_tokens: Annotated[int, Meta(ge=512, le=8192)] = 4096
    rollout_timeout: Annotated[int, Meta(ge=300, le=86400)] = 600
    rollout_max_concurrency: Annotated[int, Meta(ge=32, le=96)] = 96
    rollout_max_retries: Annotated[int, Meta(ge=1, le=10)] = 3
    pass_k_values: Any = None
    success_threshold: Any = None


class Evaluation(Rollouts, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    eval_group_size: Annotated[int, Meta(ge=1)] = 1


class Training(Rollouts, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(gt=0, le=2)] = 1.0  # AWS takes 0, where there is nothing to compare
    global_batch_size: Annotated[int, Meta(ge=32, le=128, multiple_of=32)] = 128
    group_size: Annotated[int, Meta(ge=2, le=32)] = 8
    advantage_method: Literal["group_based", "group_based_per_turn", "rloo"] = "group_based"
    loss_fn: Literal["ppo", "importance_sampling", "cispo"] = "ppo"
    clip_low: wire.Fraction = 0.8
    clip_high: Annotated[float, Meta(ge=1, le=10)] = 1.2
    max_epochs: Annotated[int, Meta(ge=1, le=30)] = 1
    max_steps: Annotated[int, Meta(ge=1, le=1000)] = 50
    learning_rate: Annotated[float, Meta(gt=0, le=0.01)] = 4e-5
    grad_clip: Annotated[float, Meta(ge=0)] = 1.0
    val_every: Any = None
    lora_rank: Any = None
    lora_alpha: Any = None
    max_steps_off_policy: Any = None


class Surroundings(Protocol):
    """The parts of a job that are no model: data, agents, and chats with the model."""

    async def prompts(self, uri: str) -> list[str]:
        """The column ``prompt`` of a data set, else its first."""
        ...

    async def invoke(self, arn: str, qualifier: str, session_id: str, payload: Mapping[str, Any]) -> Any:
        """The agent's answer. Raises: OSError."""
        ...

    async def stop(self, arn: str, qualifier: str, session_id: str) -> None: ...

    async def use(self, place: str, path: str | None) -> None:
        """Sample from these weights in a place (a job's ARN) from now on."""
        ...

    async def leave(self, place: str) -> None:
        """Forget a place and its rollouts."""
        ...

    def chat(self, place: str, trajectory_id: str, request: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The reply to a chat completion, whole or as a stream. Raises: RefusedError."""
        ...

    async def sampled(self, place: str, trajectory_id: str, temperature: float) -> list[Example]:
        """Its sequences, with all inputs of a loss; ``advantages`` are the turn that sampled a token, from 1, else 0.

        Turns of another temperature are left out.
        """
        ...

    async def close(self) -> None: ...


class RolloutFailedError(Exception):
    """A rollout has no reward. ``fatal``: AWS was seen to end the whole job over it."""

    def __init__(self, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.fatal = fatal


@dataclass(kw_only=True)
class Trajectory:
    """One rollout as the job runtime has it. ``tokens`` are the client tokens of the reports that it took."""

    id: str
    job_arn: str
    per_turn: bool  # its rewards are one for each sample; else the last counts
    samples: int = 0
    status: str | None = None
    rewards: list[float] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    completed: asyncio.Event = field(default_factory=asyncio.Event)
    rewarded: asyncio.Event = field(default_factory=asyncio.Event)

    def sample(self) -> None:
        """Raises: RefusedError when it is over."""
        if self.status is not None:
            raise RefusedError(f"Trajectory is not in valid status for sampling: {self.status}")
        self.samples += 1

    def complete(self, status: str, token: str) -> None:
        """Raises: RefusedError when it is over by another request."""
        if token in self.tokens:
            return
        if status not in REPORTED:
            raise RefusedError(f"Status is none of {', '.join(REPORTED)}: {status}")
        if self.status is not None:
            raise RefusedError(f"Cannot transition trajectory from {self.status}", code="ConflictException")
        self.status = status
        self.tokens.add(token)
        self.completed.set()

    def update(self, rewards: list[float], token: str) -> None:
        """Take rewards. Raises: RefusedError when there is none, it is not completed, or has some."""
        if token in self.tokens:
            return
        if self.status not in REPORTED or self.rewards:
            raise RefusedError("Trajectory is not in valid status for a reward", code="ConflictException")
        if not rewards:
            raise RefusedError("Rewards is empty")
        if self.per_turn and len(rewards) != self.samples:
            raise RefusedError(f"Rewards has {len(rewards)} values for {self.samples} sampling requests")
        self.rewards = rewards
        self.tokens.add(token)
        self.rewarded.set()


class Job:
    """One job. ``asked`` is CreateJob's request. Raises: RefusedError on a request that cannot be honoured."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        try:
            self.name, self.category, self.role = asked["JobName"], asked["JobCategory"], asked["RoleArn"]
            self.training = self.category == "AgentRFT"
            self.document = wire.read(asked["JobConfigDocument"].encode(), dict[str, Any])
            agent = self.document["AgentConfig"]["BedrockAgentCoreConfig"]
            self.agent: tuple[str, str] = agent["AgentRuntimeArn"], agent.get("Qualifier", "DEFAULT")
            sources = {c["ChannelName"]: c["DataSource"] for c in self.document["InputDataConfig"]}
            channel = {"AgentRFT": "train", "AgentRFTEvaluation": "evaluation"}[self.category]
            self.uri: str = sources[channel]["S3DataSource"]["S3Uri"]
            config = self.document["TrainingConfig" if self.training else "EvaluationConfig"]
            self.base_model_arn: str = config["BaseModelArn"]
            if "MlflowConfig" not in config:  # the SDK's place for it; the guide's is the other one
                self.document["OutputDataConfig"]["MlflowConfig"]
            self.packages: Mapping[str, str] = self.document.get("ModelPackageConfig", {})
            names = ("OutputModelPackageGroupArn", "IntermediateCheckpointModelPackageGroupArn")
            self.groups = [self.packages[name].rpartition("/")[2] for name in names if self.training]
            kind: type[Training | Evaluation] = Training if self.training else Evaluation
            self.params = msgspec.convert(config.get("HyperParameters", {}), kind, strict=False)
        except (KeyError, TypeError, AttributeError) as e:
            raise RefusedError(f"the request lacks {e}, or it has another form") from e
        except msgspec.ValidationError as e:
            raise RefusedError(f"HyperParameters: {e}") from e
        if self.training and self.groups[0] == self.groups[1]:
            raise RefusedError("checkpoints need another model package group than the output")
        self.arn = wire.arn(f"job/{self.category}/{self.name}")
        self.limit_s = int(self.document.get("StoppingCondition", {}).get("MaxRuntimeInSeconds", 86400))
        self.created_s = time.time()
        self.failure = ""
        self.output: dict[str, Any] = {}
        self.transitions: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None
        self.move("Starting")

    def move(self, secondary: str, status: str = "InProgress") -> None:
        now_s = time.time()
        if self.transitions:
            self.transitions[-1]["EndTime"] = now_s
        self.transitions.append({"Status": secondary, "StartTime": now_s})
        self.status = status

    @property
    def active(self) -> bool:
        return self.status in ("InProgress", "Stopping")

    def summary(self) -> dict[str, Any]:
        """The fields that ListJobs and DescribeJob share."""
        changed_s = self.transitions[-1]["StartTime"]
        return {
            "JobArn": self.arn,
            "JobName": self.name,
            "JobCategory": self.category,
            "JobStatus": self.status,
            "CreationTime": self.created_s,
            "LastModifiedTime": changed_s,
            **({} if self.active else {"EndTime": changed_s}),
        }

    def listed(self) -> dict[str, Any]:
        return {**self.summary(), "JobSecondaryStatus": self.transitions[-1]["Status"]}

    def described(self) -> dict[str, Any]:
        return {
            **self.summary(),
            "RoleArn": self.role,
            "JobConfigSchemaVersion": "1.0.0",
            "JobConfigDocument": msgspec.json.encode({**self.document, "ServiceOutput": self.output}).decode(),
            "SecondaryStatus": self.transitions[-1]["Status"],
            "SecondaryStatusTransitions": self.transitions,
            **({"FailureReason": self.failure[:1024]} if self.failure else {}),
        }


class Jobs:
    """All jobs and rollouts of a service, on one event loop; the model computes in threads.

    ``endpoint`` is the job runtime's address for agents.
    """

    def __init__(self, model: PolicyModel, packages: Packages, around: Surroundings, *, endpoint: str) -> None:
        self.all: dict[tuple[str, str], Job] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self._model, self._packages, self.around = model, packages, around
        self._endpoint = endpoint

    def create(self, asked: Mapping[str, Any]) -> Job:
        """Start a job. Raises: RefusedError."""
        job = Job(asked)
        key = job.category, job.name
        if key in self.all:
            raise RefusedError(f"Job {job.name} already exists.", code="ResourceInUse")
        if any(other.active and other.category == job.category for other in self.all.values()):
            raise RefusedError("The account-level limit is 1 job in progress.", code="ResourceLimitExceeded")
        self.all[key] = job
        job.task = asyncio.create_task(self._run(job), name=job.arn)
        return job

    def stop(self, job: Job) -> None:
        """A job that is stopped keeps its last weights."""
        if job.task is not None and job.status == "InProgress":
            job.move("Stopping", "Stopping")
            job.task.cancel()

    async def _run(self, job: Job) -> None:
        try:
            async with asyncio.timeout(job.limit_s):
                job.move("Downloading")
                rows = await self.around.prompts(job.uri)
                if isinstance(job.params, Training):
                    await self._train(job, job.params, rows)
                else:
                    await self._evaluate(job, job.params, rows)
            job.move("Completed", "Completed")
        except asyncio.CancelledError:
            job.move("Stopped", "Stopped")
        except TimeoutError:
            job.move("MaxRuntimeExceeded", "Stopped")
        except Exception as e:  # a failed job is an answer to the client
            log.exception("job %s failed", job.arn)
            job.failure = str(e) or type(e).__name__
            job.move("Failed", "Failed")
        finally:
            await self.around.leave(job.arn)

    async def _train(self, job: Job, params: Training, rows: list[str]) -> None:
        size = params.global_batch_size
        if len(rows) < size:
            raise RefusedError(f"{len(rows)} rows are fewer than global_batch_size {size}")
        run, start = f"{job.arn}:{secrets.token_hex(4)}", job.packages.get("InputModelPackageArn")
        await asyncio.to_thread(self._model.create, run)
        if start is not None:
            await asyncio.to_thread(self._model.load, run, start, False)
        output, checkpoints = job.groups
        per_epoch = len(rows) // size
        steps = min(params.max_steps, params.max_epochs * per_epoch)
        job.output["BillableTokenUsage"] = {"TrainTokenCount": 0}
        job.move("Training")
        try:
            for step in range(steps):
                await self.around.use(job.arn, await self._save(job, run, checkpoints))
                epoch, place = divmod(step, per_epoch)
                batch = random.Random(epoch).sample(rows, len(rows))[place * size : (place + 1) * size]
                groups = await self._rollouts(job, batch, params.group_size)
                job.output["BillableTokenUsage"]["TrainTokenCount"] += await self._step(run, groups, params)
                log.info("job %s step %d of %d: mean reward %s", job.arn, step + 1, steps, _mean(groups))
                job.output["ProgressInfo"] = {"CurrentStep": step + 1, "MaxSteps": steps, "BatchSize": size}
        finally:
            job.output["OutputModelPackageArn"] = await self._save(job, run, output)

    async def _evaluate(self, job: Job, params: Evaluation, rows: list[str]) -> None:
        await self.around.use(job.arn, job.packages.get("InputModelPackageArn"))
        job.move("Evaluating")
        groups = await self._rollouts(job, rows, params.eval_group_size)
        job.output["EvaluationMetrics"] = {"eval/reward/mean": _mean(groups)}

    async def _save(self, job: Job, run: str, group: str) -> str:
        arn = self._packages.next_arn(group)
        await asyncio.to_thread(self._model.publish, run, arn)
        self._packages.add(arn, description=job.arn, checkpoint=False, base_model_arn=job.base_model_arn)
        return arn

    async def _step(self, run: str, groups: Sequence[Sequence[Trajectory]], params: Training) -> int:
        """One update of the weights; how many tokens it took. Gradients are of sums over tokens."""
        examples: list[Example] = []
        for group in groups:
            for rollout, A in zip(group, _advantages(group, params.advantage_method), strict=True):
                if not any(A):
                    continue
                for one in await self.around.sampled(rollout.job_arn, rollout.id, params.temperature):
                    weighed = [A[min(turn, len(A)) - 1] if turn else 0.0 for turn in one.inputs["advantages"]]
                    examples.append(Example(tokens=one.tokens, inputs={**one.inputs, "advantages": weighed}))
        how = {"clip_low_threshold": params.clip_low, "clip_high_threshold": params.clip_high}
        how["temperature"] = params.temperature
        for first in range(0, len(examples), PASS):
            data = examples[first : first + PASS]
            await asyncio.to_thread(self._model.forward_backward, run, data, params.loss_fn, how, False)
        if examples:
            adam = {"learning_rate": params.learning_rate, "grad_clip_norm": params.grad_clip, "eps": 1e-8}
            await asyncio.to_thread(self._model.optim_step, run, adam)
        return sum(len(example.tokens) for example in examples)

    # -- rollouts

    async def _rollouts(self, job: Job, prompts: Sequence[str], size: int) -> list[list[Trajectory]]:
        """A group for each prompt: its rollouts with a reward. Raises: RolloutFailedError."""
        places, failed = asyncio.Semaphore(job.params.rollout_max_concurrency), "no rollout ended"
        groups: list[list[Trajectory]] = [[] for _ in prompts]
        info = job.output["RolloutInfo"] = {"Completed": 0, "Total": len(prompts) * size}

        async def one(group: list[Trajectory], prompt: str) -> None:
            nonlocal failed
            async with places:
                for _ in range(1 + job.params.rollout_max_retries):
                    try:
                        group.append(await self._rollout(job, prompt))
                        break
                    except RolloutFailedError as e:
                        log.warning("a rollout of %s failed: %s", job.arn, failed := str(e))
                        if e.fatal:
                            raise
            info["Completed"] += 1

        try:
            async with asyncio.TaskGroup() as tasks:
                for group, prompt in zip(groups, prompts, strict=True):
                    for _ in range(size):
                        tasks.create_task(one(group, prompt))
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        if not any(groups):
            raise RolloutFailedError(f"no rollout of a batch has a reward: {failed}")
        return groups

    async def _rollout(self, job: Job, prompt: str) -> Trajectory:
        """One try. Raises: RolloutFailedError."""
        params = job.params
        per_turn = isinstance(params, Training) and params.advantage_method == "group_based_per_turn"
        rollout = Trajectory(id=str(uuid.uuid4()), job_arn=job.arn, per_turn=per_turn)
        self.trajectories[rollout.id] = rollout
        session = (*job.agent, f"rollout-{rollout.id}")
        payload = {
            "prompt": prompt,
            "metadata": {"jobArn": job.arn, "rolloutId": rollout.id, "endpoint": self._endpoint, "region": wire.REGION},
            "inferenceParams": {
                "temperature": params.temperature,
                "topP": params.sampling_top_p,
                "maxTokens": params.sampling_max_tokens,
            },
        }
        try:
            return await self._rewarded(rollout, session, payload, params.rollout_timeout)
        finally:
            rollout.status = rollout.status or "timed out"
            await self.around.stop(*session)

    async def _rewarded(
        self, rollout: Trajectory, session: tuple[str, str, str], payload: Mapping[str, Any], limit_s: float
    ) -> Trajectory:
        try:
            async with asyncio.timeout(limit_s):
                answer = await self.around.invoke(*session, payload)
                if isinstance(answer, dict) and answer.get("status") == "error":
                    raise RolloutFailedError("The agent signaled that the trajectory failed", fatal=True)
                await rollout.completed.wait()
        except TimeoutError as e:
            raise RolloutFailedError("the rollout timed out") from e
        except OSError as e:
            raise RolloutFailedError(f"the agent could not be invoked: {e}") from e
        if rollout.status == "failed":
            raise RolloutFailedError("CompleteRollout said failed")
        if not rollout.samples:
            raise RolloutFailedError("No sampling requests were received for this rollout", fatal=True)
        try:
            await asyncio.wait_for(rollout.rewarded.wait(), REWARD_S)
        except TimeoutError as e:
            raise RolloutFailedError("The rollout completed but no reward was received in time", fatal=True) from e
        return rollout


def _advantages(group: Sequence[Trajectory], method: str) -> list[list[float]]:
    """The advantages of each rollout's turns; the last is that of all turns after it."""
    if method != "group_based_per_turn":
        return [[A] for A in _compared([rollout.rewards[-1] for rollout in group], method)]
    found: list[list[float]] = [[] for _ in group]
    for turn in range(max(len(rollout.rewards) for rollout in group) if group else 0):
        there = [i for i, rollout in enumerate(group) if turn < len(rollout.rewards)]
        for i, A in zip(there, _compared([group[i].rewards[turn] for i in there], method), strict=True):
            found[i].append(A)
    return found


def _compared(rewards_G: Sequence[float], method: str) -> list[float]:
    """Rewards less their mean, in standard deviations, or ("rloo") less the mean of the others."""
    if len(rewards_G) < 2 or nearly_equal(rewards_G):
        return [0.0] * len(rewards_G)
    mean = statistics.fmean(rewards_G)
    scale = (len(rewards_G) - 1) / len(rewards_G) if method == "rloo" else statistics.stdev(rewards_G)
    return [(reward - mean) / (scale + 1e-6) if scale else 0.0 for reward in rewards_G]


def _mean(groups: Sequence[Sequence[Trajectory]]) -> float | None:
    rewards = [rollout.rewards[-1] for group in groups for rollout in group]
    return statistics.fmean(rewards) if rewards else None
