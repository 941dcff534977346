"""A job runtime over HTTP, as strict as the real one was seen: it checks signatures and, by botocore's model, requests."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import botocore.session
import pytest
import uvicorn
from botocore.validate import ParamValidator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentcore_rl_toolkit._servers import sigv4

JOB = "arn:aws:sagemaker:us-west-2:123456789012:job/AgentRFT/sums"
CREDENTIAL = ("AKIDEXAMPLE", "secret-of-the-session")
REPLY = "4"
MODEL = botocore.session.get_session().get_service_model("sagemakerjobruntime")
OPERATIONS = {MODEL.operation_model(name).http["requestUri"]: name for name in MODEL.operation_names}


@dataclass
class Trajectory:
    """What a job knows of a rollout. ``rewards`` are all that it took, in their order."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    status: str | None = None
    rewards: list[list[float]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


class Lost(Response):
    """An answer that breaks off behind its head."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})


class JobServer:
    """``fault(operation)`` gives the status to refuse a call with, an error's name for a 400, -1 to serve it and hang up
    unanswered, or None.
    """

    def __init__(self) -> None:
        self.trajectories: dict[str, Trajectory] = {}
        self.calls: list[str] = []
        self.fault: Callable[[str], int | str | None] = lambda _: None
        self.go_on = asyncio.Event()  # a stream waits for it after its first piece
        self.go_on.set()
        self.message: dict[str, Any] = {"role": "assistant", "content": REPLY}
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        routes = [Route(path, self._serve, methods=["POST"]) for path in OPERATIONS]
        app = Starlette(routes=[*routes, Route("/v1/chat/completions", self._plain, methods=["POST"])])
        self.loop = asyncio.new_event_loop()
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(
            target=lambda: self.loop.run_until_complete(self._server.serve([listener])), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.loop.close()

    @property
    def env(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": CREDENTIAL[0], "AWS_SECRET_ACCESS_KEY": CREDENTIAL[1]}

    def payload(self, rollout_id: str, prompt: Any = "2+2", **metadata: Any) -> dict[str, Any]:
        """An invocation as a job makes it."""
        return {
            "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt),
            "metadata": {"jobArn": JOB, "rolloutId": rollout_id, "endpoint": self.url, **metadata},
            "inferenceParams": {"temperature": 0.7, "topP": 0.9, "maxTokens": 512},
        }

    async def _serve(self, request: Request) -> Response:
        operation, body = OPERATIONS[request.url.path], await request.body()
        self.calls.append(operation)
        refusal = sigv4.refusal(dict([CREDENTIAL]), request.scope, body)
        if refusal is not None or "/us-west-2/sagemaker/" not in request.headers["authorization"]:
            return self._error(403, "AccessDeniedException", refusal or "another scope")
        params: dict[str, Any] = {"JobArn": request.headers.get("x-amzn-sagemaker-job-arn")}
        if operation.startswith("Sample"):
            params |= {"TrajectoryId": request.headers.get("x-amzn-sagemaker-trajectory-id"), "Body": body}
        else:
            params |= json.loads(body)
        report = ParamValidator().validate(params, MODEL.operation_model(operation).input_shape)
        if report.has_errors() or params["JobArn"] != JOB:
            return self._error(400, "ValidationException", report.generate_report() or "Job not found")
        status = self.fault(operation)
        if isinstance(status, str):
            return self._error(400, status, "on purpose")
        if status is not None and status > 0:
            return self._error(status, "ThrottlingException" if status == 429 else "InternalServiceError", "on purpose")
        response = await self._operation(operation, params)
        return Lost() if status == -1 else response

    async def _operation(self, operation: str, params: dict[str, Any]) -> Response:
        trajectory = self.trajectories.setdefault(params["TrajectoryId"], Trajectory())
        if operation.startswith("Sample"):
            if trajectory.status is not None:
                return self._error(400, "ValidationException", "Trajectory is not in valid status for sampling")
            trajectory.samples.append(json.loads(params["Body"]))
            return await self._sampled(trajectory.samples[-1], operation == "SampleWithResponseStream")
        known = params["ClientToken"] in trajectory.tokens
        trajectory.tokens.add(params["ClientToken"])
        if operation == "CompleteRollout":
            if trajectory.status is not None and not known:
                return self._error(409, "ConflictException", "Cannot transition trajectory")
            trajectory.status = trajectory.status or params["Status"]
        elif not known:
            assert trajectory.status is not None, "the reward came first"
            trajectory.rewards.append(params["Rewards"])
        return JSONResponse({})

    async def _sampled(self, asked: dict[str, Any], stream: bool) -> Response:
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        head = {"id": "chatcmpl-1", "created": 1, "model": "default"}
        end = "tool_calls" if "tool_calls" in self.message else "stop"
        if not stream:
            choice = {"index": 0, "message": self.message, "finish_reason": end}
            return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        calls = [{"index": i, **call} for i, call in enumerate(self.message.get("tool_calls", []))]
        text = self.message["content"] or ""
        deltas = [
            {"role": "assistant", "content": text[:1]},
            {"content": text[1:], **({"tool_calls": calls} if calls else {})},
        ]

        async def events() -> AsyncIterator[bytes]:
            for i, delta in enumerate([*deltas, {}]):
                choice = {"index": 0, "delta": delta, "finish_reason": end if i == len(deltas) else None}
                chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
                yield f"data: {json.dumps(chunk)}\n\n".encode()
                await self.go_on.wait()
            if (asked.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _plain(self, request: Request) -> Response:
        """The model server of another trainer."""
        asked = await request.json()
        return await self._sampled(asked, asked.get("stream", False))

    def _error(self, status: int, name: str, message: str) -> Response:
        return JSONResponse({"Message": message}, status, {"x-amzn-errortype": name})


@pytest.fixture(scope="module")
def shared_jobs() -> Iterator[JobServer]:
    server = JobServer()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        yield server
    server.close()


@pytest.fixture
def jobs(shared_jobs: JobServer) -> Iterator[JobServer]:
    """The job runtime of this file, without faults when a test begins."""
    yield shared_jobs
    shared_jobs.fault = lambda _: None
    shared_jobs.message = {"role": "assistant", "content": REPLY}
    shared_jobs.loop.call_soon_threadsafe(shared_jobs.go_on.set)
