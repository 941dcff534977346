"""The routes of jobs: the control plane's (JSON 1.1), and the job runtime's, which take the job in a header or in the body."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from . import wire
from .jobs import Jobs
from .wire import RefusedError

CONTROL = ("CreateJob", "DescribeJob", "StopJob", "ListJobs")
STREAM = "/sample-with-response-stream"
RUNTIME = ("/sample", STREAM, "/v1/chat/completions", "/complete-rollout", "/update-reward")


class JobRoutes:
    """Answers to requests about jobs."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    async def answer(self, request: Request, target: str, body: bytes) -> Response | None:
        """None where a request is not about jobs. Raises: RefusedError, KeyError, msgspec.ValidationError."""
        if target in CONTROL:
            return JSONResponse(self._control(target, wire.request(body, wire.CONTROL, target)))
        if request.url.path in RUNTIME:
            return await self._run(request, wire.read(body, dict[str, Any]))
        return None

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
            asked["stream"] = path == STREAM or asked.get("stream") is True
            trajectory.sample()
            return await _reply(self._jobs.around.chat(trajectory.job_arn, trajectory.id, asked), asked["stream"])
        token = f"{path} {asked.get('ClientToken') or time.monotonic_ns()}"
        if path == "/complete-rollout":
            trajectory.complete(asked.get("Status", "ready"), token)
        else:
            trajectory.update(msgspec.convert(asked["Rewards"], list[float]), token)
        return JSONResponse({})


async def _reply(pieces: AsyncIterator[bytes], stream: bool) -> Response:
    first = await anext(pieces)  # an error comes before it, with a status of its own
    if not stream:
        return Response(first + b"".join([piece async for piece in pieces]), media_type="application/json")

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(whole(), media_type="text/event-stream")
