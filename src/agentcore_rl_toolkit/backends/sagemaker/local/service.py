"""The service on a port: the control plane (JSON 1.1, `X-Amz-Target`), and the runtimes of sessions and of jobs (rest-json)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ...._servers import keys, sigv4
from ...._servers.process import listen, url_of
from ....client.transport import Transport
from ....gateway.sampling_services.sagemaker import CONTROL, RUNTIME
from ....policy.server.process import Server
from ...training.local import LocalModel
from . import wire
from .jobs import MOST_ROLLOUTS, Job, Rollout
from .sessions import Session
from .wire import RefusedError

log = logging.getLogger(__name__)
HOST, ACCESS_KEY = "127.0.0.1", "local"
ENDPOINTS = ("SAGEMAKER", "SAGEMAKERTRAININGSESSIONRUNTIME", "SAGEMAKERJOBRUNTIME")  # suffixes of AWS_ENDPOINT_URL_
STREAM = "/sample-with-response-stream"
JOB_RUNTIME = ("/sample", STREAM, "/complete-rollout", "/update-reward")


class SageMakerApp:
    """ASGI application. ``secret`` is the secret of its clients' credential. ``url`` is its address, for the agents of jobs."""

    agent_at: Callable[..., Any] = Transport

    def __init__(self, model: LocalModel, url: str) -> None:
        self._model, self.url, self.secret = model, url, keys.make()
        self._sessions: dict[str, Session] = {}
        self._jobs: dict[tuple[str, str], Job] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._trainer = ThreadPoolExecutor(1, "sagemaker-train")
        self._samplers = ThreadPoolExecutor(MOST_ROLLOUTS, "sagemaker-sample")

    @property
    def endpoints(self) -> dict[str, str]:
        """The variables by which unmodified clients find it."""
        return {**{f"AWS_ENDPOINT_URL_{name}": self.url for name in ENDPOINTS}, "AWS_DEFAULT_REGION": wire.REGION}

    @property
    def environment(self) -> dict[str, str]:
        """The variables of clients in other processes: `endpoints`, and the credential."""
        return {**self.endpoints, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": self.secret}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body, target = await request.body(), request.headers.get("x-amz-target", "").removeprefix("SageMaker.")
        try:
            self._check_signature(scope, request.headers.get("authorization", ""), body)
            if target:
                response: Response = JSONResponse(self._control(target, body))
            elif request.url.path in JOB_RUNTIME:
                response = await self._job_runtime(request, wire.read(body))
            else:
                response = JSONResponse(self._session_runtime(request.method, request.url.path.split("/")[1:], body))
        except Exception as e:
            code = getattr(e, "code", "InternalServerException")
            if isinstance(e, (KeyError, msgspec.ValidationError)):
                code = "ValidationException"
            elif not isinstance(e, RefusedError):
                log.exception("a request failed with an unexpected error")
            error = {"__type": code, "message": str(e)}
            response = JSONResponse(error, wire.STATUS.get(code, 400), {"x-amzn-errortype": code})
        await response(scope, receive, send)

    def close(self) -> None:
        for pool in (self._trainer, self._samplers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_signature(self, scope: Any, authorization: str, body: bytes) -> None:
        """Raise RefusedError for a request that this service's credential did not sign."""
        refusal = sigv4.refusal({ACCESS_KEY: self.secret}, scope, body)
        if refusal is None and "/sagemaker/aws4_request" not in authorization:
            refusal = "Credential should be scoped to correct service: 'sagemaker'."
        if refusal is not None:
            raise RefusedError(refusal, code="AccessDeniedException")

    def _session_runtime(self, method: str, path: list[str], body: bytes) -> dict[str, Any]:
        missing = "ResourceNotFoundException"
        match [method, *path]:
            case ["POST", "v1", "training-sessions", name, "operations"]:
                operation = wire.request(body, RUNTIME, "ExecuteTrainingOperation", trainingSessionName=name)
                return {"operationId": self._session(name, missing).train(operation)}
            case ["POST", "v1", "training-sessions", name, "sampling-operations"]:
                operation = wire.request(body, RUNTIME, "ExecuteSamplingOperation", trainingSessionName=name)
                return {"operationId": self._session(name, missing).sample(operation)}
            case ["GET", "v1", "training-sessions", name, "operations" | "sampling-operations", operation_id]:
                return self._session(name, missing).result(operation_id)
        raise RefusedError(f"There is no {method} /{'/'.join(path)}.", code=missing)

    def _session(self, name: str, missing: str = "ResourceNotFound") -> Session:
        if name not in self._sessions:
            raise RefusedError(f"Training session {name} does not exist.", code=missing)
        return self._sessions[name]

    async def _job_runtime(self, request: Request, given: dict[str, Any]) -> Response:
        path, headers = request.url.path, request.headers
        arn = headers.get("x-amzn-sagemaker-job-arn") or given.get("JobArn")
        rollout_id = headers.get("x-amzn-sagemaker-trajectory-id") or given["TrajectoryId"]
        rollout = self._rollouts.get(rollout_id)
        samples = path in ("/sample", STREAM)
        if rollout is None or rollout.job.arn != arn:
            code = "ValidationException" if samples else "ResourceNotFoundException"
            raise RefusedError(f"Trajectory not found: {rollout_id}", code=code)
        if samples:
            return await _reply(rollout.sample({**given, "stream": path == STREAM}), stream=path == STREAM)
        report = path, given.get("ClientToken")
        if report[1] is None or report not in rollout.reports:  # otherwise it was sent again
            if path == "/complete-rollout":
                rollout.complete(given.get("Status", "ready"))
            else:
                rollout.update(msgspec.convert(given["Rewards"], list[float]))
            rollout.reports.add(report)
        return JSONResponse({})

    def _control(self, operation: str, body: bytes) -> dict[str, Any]:
        given = wire.request(body, CONTROL, operation)
        name = given.get("TrainingSessionName", "")
        match operation:
            case "CreateTrainingSession":
                if name in self._sessions:
                    raise RefusedError(f"Training session {name} already exists.", code="ResourceInUse")
                session = self._sessions[name] = Session(self._model, self._trainer, self._samplers, given)
                return {"TrainingSessionArn": session.arn}
            case "DescribeTrainingSession":
                return {"TrainingSessionDetail": {"TrainingSessionName": name, **self._session(name).described()}}
            case "StopTrainingSession":
                self._session(name).stop()
            case "CreateJob":
                return {"JobArn": self._create_job(given).arn}
            case "DescribeJob":
                return self._job(given).described()
            case "StopJob":
                self._job(given).stop()
            case _:
                raise RefusedError(f"The local service has no {operation}.", code="UnknownOperationException")
        return {}

    def _create_job(self, given: dict[str, Any]) -> Job:
        key = given["JobCategory"], given["JobName"]
        if key in self._jobs:
            raise RefusedError(f"Job {key[1]} already exists.", code="ResourceInUse")
        self._jobs[key] = Job(given, self._model, self._trainer, self.agent_at, self._rollouts, self.url)
        return self._jobs[key]

    def _job(self, given: dict[str, Any]) -> Job:
        key = given["JobCategory"], given["JobName"]
        if key not in self._jobs:
            raise RefusedError(f"Job {key[1]} does not exist.", code="ResourceNotFound")
        return self._jobs[key]


async def _reply(pieces: AsyncIterator[bytes], *, stream: bool) -> Response:
    first = await anext(pieces)  # an error comes first, with its own status
    if not stream:  # complete before its status is sent: the gateway may end meanwhile
        return Response(first + b"".join([piece async for piece in pieces]), media_type="application/json")

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(whole(), media_type="text/event-stream")


@contextlib.contextmanager
def running(model: LocalModel, *, app: type[SageMakerApp] = SageMakerApp) -> Iterator[SageMakerApp]:
    """Serve a model on a thread of this process until the block ends.

    Clients of this package that run as the same user find the service's key by its address.
    """
    with listen(HOST, 0) as listener:
        made = app(model, url_of(listener))
        server = Server(made, HOST, listener, ())
        key_file = keys.leave(keys.RUNTIME, made.url, f"{ACCESS_KEY}:{made.secret}")
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listener])), name="sagemaker", daemon=True
        )
        thread.start()
        try:
            yield made
        finally:
            server.should_exit = True
            thread.join()
            made.close()
            keys.forget(key_file)
