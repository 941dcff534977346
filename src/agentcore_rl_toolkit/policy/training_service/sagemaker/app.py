"""All APIs on one port: the control plane (JSON 1.1, `X-Amz-Target`) and the runtime (rest-json).

Faults on purpose hit the runtime's requests, each its share of them: ``throttle`` and ``error`` (429 and 500, nothing was done),
``lost`` (the request was obeyed, then the connection breaks). ``PUT /_local/faults`` sets the shares.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...._servers import sigv4
from ...._servers.process import break_off
from . import wire
from .control import described_hub_content, hub_content
from .job_app import RUNTIME, JobRoutes
from .sessions import Service, Session
from .wire import RefusedError, read

log = logging.getLogger(__name__)
OPERATIONS = (
    *(f"{verb}TrainingSession" for verb in ("Create", "Describe", "Stop", "Delete")),
    *("ListTrainingSessions", "CreateModelPackageGroup", "ListModelPackages", "DescribeModelPackage"),
    *("ListHubContents", "DescribeHubContent"),
)
Faults = dict[Literal["throttle", "error", "lost"], float]


class SageMakerApp:
    """ASGI application. ``credential``: access key and secret of its clients. ``tokenizer``: the base model's folder.
    ``jobs``: the routes of jobs, if they are served.
    """

    def __init__(
        self, service: Service, *, credential: tuple[str, str], tokenizer: str, jobs: JobRoutes | None = None
    ) -> None:
        self.faults: Faults = {}
        self._service = service
        self._credential = dict([credential])
        self._tokenizer = tokenizer
        self._jobs = jobs
        self._random = random.Random(0)
        self._sessions: dict[str, Session] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body, target = await request.body(), request.headers.get("x-amz-target", "").removeprefix("SageMaker.")
        try:
            self._check(request, body)
            response = await self._answer(request, target, body)
        except ConnectionResetError:
            await break_off(send)
            return
        except Exception as e:
            code = getattr(e, "code", "InternalServerException")
            if isinstance(e, (KeyError, msgspec.ValidationError)):
                code = "ValidationException"
            elif not isinstance(e, RefusedError):
                log.exception("a request failed for an unforeseen reason")
            error = {"__type": code, "message": str(e)}
            response = JSONResponse(error, wire.STATUS.get(code, 400), {"x-amzn-errortype": code})
        await response(scope, receive, send)

    def _check(self, request: Request, body: bytes) -> None:
        """Raises: RefusedError for a request without a signature; agents of jobs may have a bearer token in its place."""
        scope, now = request.scope, time.time()
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind == "Bearer" and scope["path"] in RUNTIME:
            refusal = sigv4.bearer_refusal(self._credential, token, now=now)
        else:
            refusal = sigv4.refusal(
                self._credential,
                method=scope["method"],
                path=scope["raw_path"].decode("latin-1"),
                query=scope["query_string"].decode("latin-1"),
                headers=scope["headers"],
                body=body,
                now=now,
            )
            if refusal is None and "/sagemaker/aws4_request" not in request.headers["authorization"]:
                refusal = "Credential should be scoped to correct service: 'sagemaker'."
        if refusal is not None:
            raise RefusedError(refusal, code="AccessDeniedException")

    async def _answer(self, request: Request, target: str, body: bytes) -> Response:
        """Raises: RefusedError; ConnectionResetError where the response is to be lost."""
        method, path = request.method, request.url.path.split("/")[1:]
        if self._jobs is not None and (found := await self._jobs.answer(request, target, body)) is not None:
            return found
        return JSONResponse(self._control(target, body) if target else self._run(method, path, body))

    def _run(self, method: str, path: list[str], body: bytes) -> dict[str, Any]:
        """A request to the runtime. Raises: RefusedError; ConnectionResetError where the response is to be lost."""
        if path == ["_local", "faults"]:
            self.faults = read(body, Faults)
            return {}
        hit = {kind for kind, share in self.faults.items() if self._random.random() < share}
        if "throttle" in hit:
            raise RefusedError("Rate exceeded", code="ThrottlingException")
        if "error" in hit:
            raise RefusedError("a planned fault", code="InternalServerException")
        missing = "ResourceNotFoundException"
        match [method, *path]:
            case ["POST", "v1", "training-sessions", name, "operations"]:
                content = {"operationId": self._session(name, missing).train(_operation(body, "Training", name))}
            case ["POST", "v1", "training-sessions", name, "sampling-operations"]:
                content = {"operationId": self._session(name, missing).sample(_operation(body, "Sampling", name))}
            case ["GET", "v1", "training-sessions", name, "operations" | "sampling-operations", operation]:
                content = self._session(name, missing).answer(operation)
            case _:
                raise RefusedError(f"There is no {method} /{'/'.join(path)}.", code=missing)
        if "lost" in hit:
            raise ConnectionResetError("a planned fault")
        return content

    def _session(self, name: str, missing: str = "ResourceNotFound") -> Session:
        if name not in self._sessions:
            raise RefusedError(f"Training session {name} does not exist.", code=missing)
        return self._sessions[name]

    def _control(self, operation: str, body: bytes) -> dict[str, Any]:
        """A request to the control plane: what the SDK asks for. Lists are newest first."""
        if operation not in OPERATIONS:
            raise RefusedError(f"The local service has no {operation}.", code="UnknownOperationException")
        packages, asked = self._service.packages, wire.request(body, wire.CONTROL, operation)
        name = asked.get("TrainingSessionName", "")
        match operation:
            case "CreateTrainingSession":
                if name in self._sessions:
                    raise RefusedError(f"Training session {name} already exists.", code="ResourceInUse")
                session = Session(self._service, asked)
                self._sessions[name] = session
                return {"TrainingSessionArn": session.summary()["TrainingSessionArn"]}
            case "DescribeTrainingSession":
                return {"TrainingSessionDetail": {"TrainingSessionName": name, **self._session(name).described()}}
            case "ListTrainingSessions":
                part, status = asked.get("NameContains", ""), asked.get("StatusEquals")
                named = [s.summary() for s in reversed(self._sessions.values()) if part in s.name]
                found = [s for s in named if status in (None, s["TrainingSessionStatus"])]
                return wire.page("TrainingSessionSummaries", found, asked)
            case "StopTrainingSession":
                self._session(name).stop()
                return {}
            case "DeleteTrainingSession":
                self._session(name).check_transition("Deleting", "Stopped", "Failed")
                del self._sessions[name]
                return {}
            case "CreateModelPackageGroup":
                return {"ModelPackageGroupArn": wire.arn(f"model-package-group/{asked['ModelPackageGroupName']}")}
            case "ListModelPackages":
                found = packages.summaries(asked.get("ModelPackageGroupName", ""))
                return wire.page("ModelPackageSummaryList", found, asked)
            case "DescribeModelPackage":
                package = packages.all.get(asked["ModelPackageName"])
                if package is None:
                    raise RefusedError(f"Model package {asked['ModelPackageName']} does not exist.")
                return package
            case "ListHubContents":
                return {"HubContentSummaries": [hub_content(self._service.model.base_model.replace("/", "-"))]}
        return described_hub_content(asked["HubContentName"], self._tokenizer)


def _operation(body: bytes, kind: str, session: str) -> dict[str, Any]:
    return wire.request(body, wire.RUNTIME, f"Execute{kind}Operation", trainingSessionName=session)
