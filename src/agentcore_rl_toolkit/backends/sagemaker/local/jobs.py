"""Multi-turn RL jobs: the training loop of this package, with rollouts as AWS's jobs make them.

A rollout is an invocation of the agent with the payload of AWS's jobs. It ends with CompleteRollout and UpdateReward,
whatever the agent returns. A fault that ends all of a job on AWS ends this job, too. Hyperparameters have the names that the
API accepted in tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ....client.settings import Deadlines
from ....client.transport import in_thread
from ....contract import Stage
from ....errors import AgentCoreRLError, GatewayError, RolloutLostError, RolloutTimeoutError
from ....gateway import Gateway, GatewayClient, GatewayConfig, UpstreamConfig
from ....gateway.engines import Piece
from ....gateway.engines.errors import upstream_error
from ....gateway.engines.sampling_service import Asked
from ....gateway.http.client import stream
from ....store import open_store
from ...collection.collect import collect_async
from ...collection.groups import GroupRequest, summarize
from ...collection.settings import RolloutSettings
from ...training.batch import Datum
from ...training.client import Adam, Loss, Passed
from ...training.local import LocalModel
from ...training.loop import train
from ...training.settings import LoopSettings, Services
from . import wire
from .sessions import save_package
from .wire import RefusedError

REWARD_S = 60.0  # limit between CompleteRollout and UpdateReward; AWS's own limit is unknown
REPLY_S = 600.0
MOST_ROLLOUTS = 96  # rollouts that a job runs at once
BASE = "base"  # the path of the model's first weights
CODES = {400: "ValidationException", 429: "ThrottlingException"}


class Rollouts(Struct, kw_only=True, forbid_unknown_fields=True):
    """The hyperparameters that training and evaluation share. Only AWS reads those of type Any."""

    temperature: float = 0.0
    sampling_top_p: float = 1.0
    sampling_max_tokens: int = 4096
    rollout_timeout: int = 600
    rollout_max_concurrency: int = MOST_ROLLOUTS
    eval_group_size: int = 1
    rollout_max_retries: Any = None
    pass_k_values: Any = None
    success_threshold: Any = None


class Training(Rollouts, kw_only=True, forbid_unknown_fields=True):
    """The hyperparameters of a training job."""

    # AWS accepts 0, at which all rollouts of a group are the same.
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    global_batch_size: int = 128
    group_size: int = 8
    advantage_method: Literal["group_based", "rloo"] = "group_based"
    loss_fn: Literal["ppo", "importance_sampling", "cispo"] = "ppo"
    clip_low: float = 0.8
    clip_high: float = 1.2
    max_epochs: int = 1
    max_steps: int = 50
    learning_rate: float = 4e-5
    grad_clip: float = 1.0
    val_every: Any = None
    lora_rank: Any = None
    lora_alpha: Any = None
    max_steps_off_policy: Any = None


class ModelSampler:
    """A gateway's `Sampler` and `SamplingService` over a model in this process."""

    def __init__(self, model: LocalModel, path: str = BASE) -> None:
        self._model, self._path = model, None if path == BASE else path

    async def open(self, path: str) -> ModelSampler:
        return ModelSampler(self._model, path)

    async def sample(self, asked: Asked) -> list[Piece]:
        params = {name: getattr(asked, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
        params["stop"] = asked.stop_token_ids or None
        generations = await in_thread(self._model.sample, self._path, asked.prompt, asked.n, params)
        return [
            Piece(choice=i, ids=g.token_ids, logprobs=list(g.logprobs), finish_reason=g.finish_reason)
            for i, g in enumerate(generations)
        ]

    def for_agent(self, error: Exception) -> Any:
        return upstream_error(400, str(error).encode())

    async def close(self) -> None:
        """Leave the model to the service."""


class Rollout:
    """A rollout of a job: the future that the collection waits for, and the trajectory that agents know by its session id."""

    attempt, stage = 1, Stage.RUN
    stages: Mapping[str, float] = {}

    def __init__(
        self, job: Job, session_id: str, prompt: str, gateway: Mapping[str, str], limit_s: float | None
    ) -> None:
        self.session_id, self.job = session_id, job
        self._prompt, self._url, self._key = prompt, gateway["base_url"], gateway["api_key"]
        self._limit_s = limit_s
        self._samples = 0
        loop = asyncio.get_running_loop()
        self._status: asyncio.Future[str] = loop.create_future()
        self._reward: asyncio.Future[float] = loop.create_future()
        self.reports: set[tuple[str, str | None]] = set()  # path and client token of those that were accepted

    async def result_async(self) -> dict[str, Any]:
        """Run the agent. Returns the record of the rollout. Raises: RolloutLostError, RolloutTimeoutError."""
        job = self.job
        try:
            async with asyncio.timeout(self._limit_s):
                response = await self._invoke()
                if isinstance(response, dict) and response.get("status") == "error":
                    raise job.fail("The agent signaled that the trajectory failed")
                if await asyncio.shield(self._status) == "failed":
                    raise RolloutLostError("CompleteRollout said failed", session_id=self.session_id)
                if not self._samples:
                    raise job.fail("No sampling requests were received for this rollout")
                await asyncio.wait([self._reward], timeout=REWARD_S)
                if not self._reward.done():
                    raise job.fail("The rollout completed but no reward was received in time")
        except TimeoutError as e:
            raise RolloutTimeoutError(f"no reward within {self._limit_s:g} s", stage=self.stage) from e
        finally:
            if not self._status.done():
                self._status.set_result("timed out")
            with contextlib.suppress(AgentCoreRLError):  # an idle session ends by itself
                await in_thread(job.agent.stop, f"rollout-{self.session_id}")
        return {"status_code": 200, "rewards": self._reward.result()}

    async def _invoke(self) -> Any:
        payload = json.dumps(self.job.payload(self.session_id, self._prompt)).encode()
        try:
            return json.loads(await in_thread(self.job.agent.invoke, f"rollout-{self.session_id}", payload))
        except (AgentCoreRLError, ValueError) as e:
            raise RolloutLostError(f"the agent could not be invoked: {e}", session_id=self.session_id) from e

    async def cancel_async(self) -> None:
        """Do nothing: `result_async` stops the session when it ends."""

    async def sample(self, request: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """Yield the reply to a chat completion, whole or as a stream. Raises: RefusedError."""
        if self._status.done():
            raise RefusedError(f"Trajectory is not in valid status for sampling: {self._status.result()}")
        self._samples += 1
        url = f"{self._url}/chat/completions"
        try:
            async for piece in stream("POST", url, body=request, key=self._key, timeout_s=REPLY_S):
                yield piece
        except GatewayError as e:
            raise RefusedError(e.message, code=CODES.get(e.status or 0, "InternalServerException")) from e

    def complete(self, status: str) -> None:
        """Complete the rollout once. Raises: RefusedError if another request has completed it."""
        if status not in ("ready", "failed"):
            raise RefusedError(f"Status is neither ready nor failed: {status}")
        if self._status.done():
            raise RefusedError(f"Cannot transition trajectory from {self._status.result()}", code="ConflictException")
        self._status.set_result(status)

    def update(self, rewards: list[float]) -> None:
        """Set the rewards. Raises: RefusedError without rewards, before the rollout is completed, or if it has rewards."""
        if not self._status.done() or self._reward.done():
            raise RefusedError("Trajectory is not in valid status for a reward", code="ConflictException")
        if not rewards:
            raise RefusedError("Rewards is empty")
        self._reward.set_result(rewards[-1])


class PackageTraining:
    """The `TrainingClient` of a job. Each version of its weights is a model package."""

    service = "the local service"
    max_logprob_gap: float | None = None
    penalizes = False

    def __init__(self, model: LocalModel, trainer: Executor, run: str, group: str) -> None:
        self._model, self._trainer, self._run, self._group = model, trainer, run, group

    def do(self, work: Callable[..., Any], *args: Any, **named: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._trainer, lambda: work(*args, **named))

    def forward_backward(self, data: Sequence[Datum], loss: Loss, tokens: float) -> Awaitable[Passed]:
        return self.do(self._model.forward_backward, self._run, data, loss)

    def step(self, adam: Adam) -> Awaitable[Mapping[str, float]]:
        return self.do(self._model.step, self._run, adam)

    async def publish(self, version: int, gateway: Any, probe: Sequence[int] | None) -> None:
        path = await self.do(save_package, self._model, self._run, self._group)
        await gateway.set_weight_version_async(version, sampler=path)

    async def save(self, steps: int) -> str:
        return str(await self.do(save_package, self._model, self._run, self._group, optimizer=True))

    async def close(self, status: str) -> None:
        """Leave the model to the service."""


class Job:
    """A job. It runs as a task from its CreateJob request on. Raises: RefusedError on a request that cannot be honored.

    ``agent_at`` makes the `Transport` to the agent at an ARN.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        model: LocalModel,
        trainer: Executor,
        agent_at: Callable[..., Any],
        rollouts: dict[str, Rollout],
        endpoint: str,
    ) -> None:
        self._model, self._trainer, self._rollouts, self._endpoint = model, trainer, rollouts, endpoint
        self._request, self.category = request, request["JobCategory"]
        training = self.category == "AgentRFT"
        try:
            self._document = wire.read(request["JobConfigDocument"].encode())
            agent = self._document["AgentConfig"]["BedrockAgentCoreConfig"]
            self.agent = agent_at(
                agent["AgentRuntimeArn"],
                qualifier=agent.get("Qualifier", "DEFAULT"),
                region=agent["AgentRuntimeArn"].split(":")[3],
                endpoint_url=None,  # boto3 finds the local runtime by AWS_ENDPOINT_URL_BEDROCK_AGENTCORE
                pool_connections=MOST_ROLLOUTS,
                read_timeout_s=900.0,
            )
            sources = {c["ChannelName"]: c["DataSource"] for c in self._document["InputDataConfig"]}
            self._uri: str = sources["train" if training else "evaluation"]["S3DataSource"]["S3Uri"]
            config = self._document["TrainingConfig" if training else "EvaluationConfig"]
            self._packages: Mapping[str, str] = self._document.get("ModelPackageConfig", {})
            kind = Training if training else Rollouts
            self._params: Rollouts = msgspec.convert(config.get("HyperParameters", {}), kind, strict=False)
        except (LookupError, TypeError, AttributeError) as e:
            raise RefusedError(f"the request lacks {e}, or it has another form") from e
        except msgspec.ValidationError as e:
            raise RefusedError(f"HyperParameters: {e}") from e
        self.arn = wire.arn(f"job/{self.category}/{request['JobName']}")
        self._failure = ""
        self._output: dict[str, Any] = {}
        self._transitions: list[dict[str, Any]] = []
        self._move("Starting")
        self._task = asyncio.create_task(self._run(), name=self.arn)

    def stop(self) -> None:
        """Stop the job. It keeps its last weights."""
        if self.status == "InProgress":
            self._move("Stopping", "Stopping")
            self._task.cancel()

    def fail(self, reason: str) -> RolloutLostError:
        """End the job for this reason. Returns the error of the rollout."""
        self._failure = reason
        self._task.cancel()
        return RolloutLostError(reason)

    def payload(self, rollout_id: str, prompt: str) -> dict[str, Any]:
        """Return the payload of a rollout, as AWS's jobs send it."""
        where = {"jobArn": self.arn, "rolloutId": rollout_id, "endpoint": self._endpoint, "region": wire.REGION}
        params = self._params
        sampling = {"temperature": params.temperature, "topP": params.sampling_top_p}
        sampling["maxTokens"] = params.sampling_max_tokens
        return {"prompt": prompt, "metadata": where, "inferenceParams": sampling}

    def described(self) -> dict[str, Any]:
        changed_s = self._transitions[-1]["StartTime"]
        return {
            "JobArn": self.arn,
            "JobName": self._request["JobName"],
            "JobCategory": self.category,
            "JobStatus": self.status,
            "SecondaryStatus": self._transitions[-1]["Status"],
            "SecondaryStatusTransitions": self._transitions,
            "RoleArn": self._request["RoleArn"],
            "JobConfigSchemaVersion": "1.0.0",
            "JobConfigDocument": msgspec.json.encode({**self._document, "ServiceOutput": self._output}).decode(),
            "CreationTime": self._transitions[0]["StartTime"],
            "LastModifiedTime": changed_s,
            **({"FailureReason": self._failure[:1024]} if self._failure else {}),
        }

    def _move(self, secondary: str, status: str = "InProgress") -> None:
        now_s = time.time()
        if self._transitions:
            self._transitions[-1]["EndTime"] = now_s
        self._transitions.append({"Status": secondary, "StartTime": now_s})
        self.status = status

    async def _run(self) -> None:
        try:
            async with self._gateway() as gateway:
                self._move("Downloading")
                rows = await _rows(self._uri)
                if isinstance(self._params, Training):
                    await self._train(self._params, rows, gateway)
                else:
                    await self._evaluate(self._params, rows, gateway)
            self._move("Completed", "Completed")
        except asyncio.CancelledError:
            ended = "Failed" if self._failure else "Stopped"
            self._move(ended, ended)
        except Exception as e:  # a failed job is a response to the client
            self._failure = str(e) or type(e).__name__
            self._move("Failed", "Failed")
        finally:
            self.agent.close()

    @contextlib.asynccontextmanager
    async def _gateway(self) -> AsyncIterator[GatewayClient]:
        """Run a gateway for this job only: its weights change with the job's steps."""
        key = secrets.token_urlsafe(24)
        upstream = UpstreamConfig(url="http://in-process.invalid", engine="sagemaker")
        config = GatewayConfig(upstreams=(upstream,), model_dir=str(self._model.folder), admin_key=key)
        gateway = Gateway(config, connect=lambda: ModelSampler(self._model))
        await gateway.start()
        try:
            async with GatewayClient(gateway.url, admin_key=key) as client:
                yield client
        finally:
            await gateway.stop()

    def submit(
        self, payload: Mapping[str, Any], *, session_id: str, rollout_config: Any, deadlines: Deadlines, input_id: str
    ) -> Rollout:
        """Make a rollout, as a `RolloutClient` does for a collection."""
        rollout = self._rollouts[session_id] = Rollout(
            self, session_id, payload["prompt"], rollout_config, deadlines.run_s
        )
        return rollout

    def _rollouts_settings(self) -> dict[str, Any]:
        params = self._params
        sampling = {"temperature": params.temperature, "top_p": params.sampling_top_p}
        return {
            "max_concurrent": params.rollout_max_concurrency,
            "rollout_timeout_s": float(params.rollout_timeout),
            "sampling_params": {**sampling, "max_tokens": params.sampling_max_tokens},
            "train_on": "all",
        }

    async def _train(self, params: Training, rows: Sequence[dict[str, str]], gateway: GatewayClient) -> None:
        size, model = params.global_batch_size, self._model
        if len(rows) < size:
            raise RefusedError(f"{len(rows)} rows are fewer than global_batch_size {size}")
        output, checkpoints = (
            self._packages[f"{name}ModelPackageGroupArn"] for name in ("Output", "IntermediateCheckpoint")
        )
        if output == checkpoints:
            raise RefusedError("checkpoints need another model package group than the output")
        run, start = f"{self.arn}:{secrets.token_hex(4)}", self._packages.get("InputModelPackageArn")
        training = PackageTraining(model, self._trainer, run, checkpoints)
        await training.do(model.create, run, temperature=params.temperature)
        if start is not None:
            await training.do(model.load, run, start, optimizer=False)
        clip = {"clip_low_threshold": params.clip_low, "clip_high_threshold": params.clip_high}
        settings = LoopSettings(
            **self._rollouts_settings(),
            steps=min(params.max_steps, params.max_epochs * (len(rows) // size)),
            groups=size,
            rollouts=params.group_size,
            learning_rate=params.learning_rate,
            max_grad_norm=params.grad_clip,
            estimator="rloo" if params.advantage_method == "rloo" else "grpo",
            loss=params.loss_fn,
            loss_options={} if params.loss_fn == "importance_sampling" else clip,
            max_empty_steps=1,
        )
        info = self._output["RolloutInfo"] = {"Completed": 0, "Total": settings.steps * size * params.group_size}
        billed = self._output["BillableTokenUsage"] = {"TrainTokenCount": 0}

        def observe(event: str, facts: dict[str, Any]) -> None:
            if event == "rollout":
                info["Completed"] += 1
            elif event == "step":
                billed["TrainTokenCount"] += facts["computed_tokens"]
                progress = {"CurrentStep": facts["step"] + 1, "MaxSteps": settings.steps, "BatchSize": size}
                self._output["ProgressInfo"] = progress

        self._move("Training")
        services: Any = Services(client=self, gateway=gateway, run_dir=model.folder)  # type: ignore[arg-type]
        try:
            await train(services, training, settings, rows, [], observe)
        finally:
            self._output["OutputModelPackageArn"] = await training.do(save_package, model, run, output)

    async def _evaluate(self, params: Rollouts, rows: Sequence[dict[str, str]], gateway: GatewayClient) -> None:
        await gateway.set_weight_version_async(0, sampler=self._packages.get("InputModelPackageArn", BASE))
        self._move("Evaluating")
        info = self._output["RolloutInfo"] = {"Completed": 0, "Total": params.eval_group_size * len(rows)}

        def count(_: Any) -> None:
            info["Completed"] += 1

        requests = [GroupRequest(input_id=f"row-{i}", payload=r, n=params.eval_group_size) for i, r in enumerate(rows)]
        config = RolloutSettings(**self._rollouts_settings()).collect_config().replace(evaluation=True)
        client: Any = self
        groups = await collect_async(requests, client=client, gateway=gateway, config=config, on_rollout=count)
        self._output["EvaluationMetrics"] = {"eval/reward/mean": summarize(groups).ok_mean}


async def _rows(uri: str) -> list[dict[str, str]]:
    """Read the column ``prompt`` of a data set in JSON Lines, or its first column, as prompts."""
    place, _, prefix = uri.rpartition("/")
    store = open_store(place)
    files = [await store.get_async(found.key) for found in await store.list_async(prefix)]
    rows = [json.loads(line) for file in files for line in file.splitlines() if line.strip()]
    texts = [row.get("prompt", next(iter(row.values()))) for row in rows]
    return [{"prompt": text if isinstance(text, str) else json.dumps(text)} for text in texts]
