"""The routes of jobs, in front of those of training sessions: the control plane's (JSON 1.1), and the job runtime's. And the
chat routes of sessions, which need a gateway as jobs do.

The job runtime takes both forms of each route: the job in a header or in the body, a signature or a bearer token.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...._servers import sigv4
from . import wire
from .app import SageMakerApp
from .jobs import Jobs, Trajectory
from .wire import RefusedError

CONTROL = ("CreateJob", "DescribeJob", "StopJob", "ListJobs")
STREAM = "/sample-with-response-stream"
CHAT = re.compile("/training-sessions/([^/]+)(/sample|/sample-with-response-stream)")
RUNTIME = ("/sample", STREAM, "/v1/chat/completions", "/complete-rollout", "/update-reward")


class JobsApp:
    """ASGI application; requests of other kinds go to ``rest``. ``credential``: access key and secret of its clients."""

    def __init__(self, jobs: Jobs, *, credential: tuple[str, str], rest: SageMakerApp) -> None:
        self._jobs, self._credential, self._rest = jobs, credential, rest
        self._chats: set[str | None] = set()  # the weights that a place of their own samples
        self._opening = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        target = request.headers.get("x-amz-target", "").removeprefix("SageMaker.")
        chat = CHAT.fullmatch(scope["path"])
        if target not in CONTROL and scope["path"] not in RUNTIME and chat is None:
            await self._rest(scope, receive, send)
            return
        body = await request.body()
        try:
            self._check(request, body)
            asked = wire.request(body, wire.CONTROL, target) if target else wire.read(body, dict[str, Any])
            if chat is not None:
                arn = request.headers.get("x-amzn-sagemaker-model-package")
                response = await self._chat(chat[1], arn, {**asked, "stream": chat[2] == STREAM})
            else:
                response = _json(self._control(target, asked)) if target else await self._run(request, asked)
        except (RefusedError, KeyError, msgspec.ValidationError) as e:
            code = e.code if isinstance(e, RefusedError) else "ValidationException"
            response = _json({"__type": code, "message": str(e)}, wire.STATUS.get(code, 400))
            response.headers["x-amzn-errortype"] = code
        await response(scope, receive, send)

    def _check(self, request: Request, body: bytes) -> None:
        """Raises: RefusedError for a request that is neither signed nor has a bearer token."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind != "Bearer":
            self._rest.check_signature(request.scope, body)
        elif (refusal := sigv4.bearer_refusal(dict([self._credential]), token, now=time.time())) is not None:
            raise RefusedError(refusal, code="AccessDeniedException")

    def _control(self, target: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        if target == "CreateJob":
            return {"JobArn": self._jobs.create(asked).arn}
        category, status = asked["JobCategory"], asked.get("StatusEquals")
        if target == "ListJobs":
            found = [job.listed() for job in self._jobs.all.values() if job.category == category]
            return wire.page("JobSummaries", [s for s in found if status in (None, s["JobStatus"])], asked)
        job = self._jobs.all.get((category, asked["JobName"]))
        if job is None:
            raise RefusedError(f"Job {asked['JobName']} does not exist.", code="ResourceNotFound")
        if target == "DescribeJob":
            return job.described()
        self._jobs.stop(job)
        return {}

    async def _run(self, request: Request, asked: dict[str, Any]) -> Response:
        path, headers = request.url.path, request.headers
        arn = headers.get("x-amzn-sagemaker-job-arn") or asked.get("JobArn")
        trajectory_id = headers.get("x-amzn-sagemaker-trajectory-id") or asked["TrajectoryId"]
        trajectory = self._jobs.trajectories.get(trajectory_id)
        reports = path in RUNTIME[3:]
        if trajectory is None or trajectory.job_arn != arn:
            code = "ResourceNotFoundException" if reports else "ValidationException"
            raise RefusedError(f"Trajectory not found: {trajectory_id}", code=code)
        if not reports:
            return await self._sampled(trajectory, {**asked, "stream": path == STREAM or asked.get("stream") is True})
        token = f"{path} {asked.get('ClientToken') or time.monotonic_ns()}"
        if path == "/complete-rollout":
            trajectory.complete(asked.get("Status", "ready"), token)
        else:
            trajectory.update(msgspec.convert(asked["Rewards"], list[float]), token)
        return _json({})

    async def _sampled(self, trajectory: Trajectory, asked: dict[str, Any]) -> Response:
        trajectory.sample()
        return await _reply(self._jobs.around.chat(trajectory.job_arn, trajectory.id, asked), asked["stream"])

    async def _chat(self, session: str, arn: str | None, asked: dict[str, Any]) -> Response:
        path = self._rest.session(session).weights(arn)
        async with self._opening:
            if path not in self._chats:
                await self._jobs.around.use(f"chat {path}", path)
                self._chats.add(path)
        return await _reply(self._jobs.around.chat(f"chat {path}", f"chat-{uuid.uuid4()}", asked), asked["stream"])


async def _reply(pieces: AsyncIterator[bytes], stream: bool) -> Response:
    first = await anext(pieces)  # an error comes before it, with a status of its own
    if not stream:
        return Response(first + b"".join([piece async for piece in pieces]), media_type="application/json")

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(whole(), media_type="text/event-stream")


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
