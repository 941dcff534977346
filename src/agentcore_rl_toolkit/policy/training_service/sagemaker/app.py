"""Both APIs on one port: the control plane (JSON 1.1, `X-Amz-Target`) and the runtime (rest-json).

The chat routes ``/training-sessions/{name}/sample`` and ``…/sample-with-response-stream`` are not served: a chat needs a
renderer, and tokens to train on come from ExecuteSamplingOperation only.

Faults on purpose hit the runtime's requests, each its share of them: ``throttle`` (429, nothing was done), ``error`` (500,
nothing was done), ``lost`` (the request was obeyed, then the connection breaks). ``PUT /_local/faults`` sets the shares.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...._servers import sigv4
from ...._servers.process import break_off
from . import wire
from .packages import Packages, hub_content
from .sessions import Service, Session
from .wire import RefusedError, read

log = logging.getLogger(__name__)
Fault = Literal["throttle", "error", "lost"]
ERRORS = {
    "throttle": ("ThrottlingException", "Rate exceeded"),
    "error": ("InternalServerException", "An internal error occurred."),
}


class SageMakerApp:
    """ASGI application. ``credential``: access key and secret of its clients."""

    def __init__(
        self,
        service: Service,
        *,
        credential: tuple[str, str],
        tokenizer: str,
    ) -> None:
        self.faults: dict[Fault, float] = {}
        self._service = service
        self._credential = credential
        self._tokenizer = tokenizer
        self._random = random.Random(0)
        self._sessions: dict[str, Session] = {}
        self._control: dict[str, tuple[type[Any], Callable[[Any], dict[str, Any]]]] = {
            "CreateTrainingSession": (wire.CreateTrainingSession, self._create),
            "DescribeTrainingSession": (wire.NamedSession, self._describe),
            "ListTrainingSessions": (wire.Page, self._list),
            "StopTrainingSession": (wire.NamedSession, self._stop),
            "DeleteTrainingSession": (wire.NamedSession, self._delete),
            "CreateModelPackageGroup": (wire.NamedGroup, self._create_group),
            "ListModelPackages": (wire.Page, self._list_packages),
            "DescribeModelPackage": (wire.NamedPackage, self._describe_package),
            "ListHubContents": (wire.Page, self._list_contents),
            "DescribeHubContent": (wire.NamedContent, self._describe_content),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.body()
        lost = False
        try:
            self._check_signature(scope, body)
            target = request.headers.get("x-amz-target", "")
            if target:
                status, content = 200, self._controlled(target, body)
            else:
                lost = "/_local/" not in request.url.path and self._faulty()
                status, content = 200, self._run(request.method, request.url.path.split("/")[1:], body)
        except Exception as e:
            code, message = self._error(e)
            status, content = wire.STATUS.get(code, 400), {"__type": code, "message": message}
        if lost:
            await break_off(send)
            return
        headers = {"x-amzn-errortype": content["__type"]} if status != 200 else {}
        media = "application/x-amz-json-1.1" if "x-amz-target" in request.headers else "application/json"
        await Response(msgspec.json.encode(content), status, headers, media)(scope, receive, send)

    def _error(self, error: Exception) -> tuple[str, str]:
        if isinstance(error, RefusedError):
            return error.code, error.message
        log.error("a request failed for an unforeseen reason", exc_info=error)
        return "InternalServerException", f"{type(error).__name__}: {error}"

    def _check_signature(self, scope: Any, body: bytes) -> None:
        refusal = sigv4.refusal(
            dict([self._credential]),
            method=scope["method"],
            path=scope["raw_path"].partition(b"?")[0].decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
            headers=scope["headers"],
            body=body,
            now=time.time(),
        )
        if refusal is None and b"/sagemaker/aws4_request" not in dict(scope["headers"])[b"authorization"]:
            refusal = "Credential should be scoped to correct service: 'sagemaker'."
        if refusal is not None:
            raise RefusedError(refusal, code="AccessDeniedException")

    def _faulty(self) -> bool:
        """Whether the response is to be lost. Raises: RefusedError, the planned one."""
        drawn = [kind for kind, share in self.faults.items() if self._random.random() < share]
        for kind in drawn:
            if kind in ERRORS:
                code, message = ERRORS[kind]
                raise RefusedError(message, code=code)
        return "lost" in drawn

    # -- the runtime

    def _run(self, method: str, path: list[str], body: bytes) -> dict[str, Any]:
        match [method, *path]:
            case ["POST", "v1", "training-sessions", name, "operations"]:
                return {"operationId": self._running(name).train(read(body, wire.TrainingOperation))}
            case ["POST", "v1", "training-sessions", name, "sampling-operations"]:
                return {"operationId": self._running(name).sample(read(body, wire.SamplingOperation))}
            case ["GET", "v1", "training-sessions", name, "operations" | "sampling-operations", operation]:
                return self._running(name).answer(operation)
            case ["PUT", "_local", "faults"]:
                self.faults = read(body, dict[Fault, float])
                return {}
            case ["POST", "training-sessions", _, "sample" | "sample-with-response-stream"]:
                what = "The local service has no chat routes; sample tokens by ExecuteSamplingOperation."
                raise RefusedError(what, code="ResourceNotFoundException")
        raise RefusedError(f"There is no {method} /{'/'.join(path)}.", code="ResourceNotFoundException")

    def _running(self, name: str) -> Session:
        return self._session(name, code="ResourceNotFoundException")

    def _session(self, name: str, code: str = "ResourceNotFound") -> Session:
        if name not in self._sessions:
            raise RefusedError(f"Training session {name} does not exist.", code=code)
        return self._sessions[name]

    # -- the control plane

    def _controlled(self, target: str, body: bytes) -> dict[str, Any]:
        operation = target.removeprefix("SageMaker.")
        if operation not in self._control:
            raise RefusedError(f"The local service has no {operation}.", code="UnknownOperationException")
        kind, answer = self._control[operation]
        return answer(read(body, kind))

    def _create(self, asked: wire.CreateTrainingSession) -> dict[str, Any]:
        name = asked.training_session_name
        if name in self._sessions:
            raise RefusedError(f"Training session {name} already exists.", code="ResourceInUse")
        session = self._sessions[name] = Session(self._service, asked)
        return {"TrainingSessionArn": session.summary()["TrainingSessionArn"]}

    def _describe(self, asked: wire.NamedSession) -> dict[str, Any]:
        return {"TrainingSessionDetail": self._session(asked.training_session_name).described()}

    def _list(self, asked: wire.Page) -> dict[str, Any]:
        found = [session.summary() for session in self._sessions.values()]
        kept = [
            {key: value for key, value in summary.items() if key != "TrainingSessionName"}
            for summary in found
            if asked.name_contains in summary["TrainingSessionName"]
            and asked.status_equals in (None, summary["TrainingSessionStatus"])
        ]
        return _page(asked, kept, "TrainingSessionSummaries")

    def _stop(self, asked: wire.NamedSession) -> dict[str, Any]:
        self._session(asked.training_session_name).stop()
        return {}

    def _delete(self, asked: wire.NamedSession) -> dict[str, Any]:
        self._session(asked.training_session_name).check_transition("Deleting", "Stopped", "Failed")
        del self._sessions[asked.training_session_name]
        return {}

    def _create_group(self, asked: wire.NamedGroup) -> dict[str, Any]:
        return {"ModelPackageGroupArn": wire.arn(f"model-package-group/{asked.model_package_group_name}")}

    def _list_packages(self, asked: wire.Page) -> dict[str, Any]:
        found = [package.summary() for package in self._packages.of_group(asked.model_package_group_name)]
        return _page(asked, found, "ModelPackageSummaryList")

    def _describe_package(self, asked: wire.NamedPackage) -> dict[str, Any]:
        return self._packages.get(asked.model_package_name).described()

    def _list_contents(self, asked: wire.Page) -> dict[str, Any]:
        content = self._content(self._service.model.base_model.replace("/", "-"))
        unlisted = ("HubName", "HubArn", "HubContentDocument")
        return {"HubContentSummaries": [{k: v for k, v in content.items() if k not in unlisted}]}

    def _describe_content(self, asked: wire.NamedContent) -> dict[str, Any]:
        return self._content(asked.hub_content_name)

    def _content(self, name: str) -> dict[str, Any]:
        return hub_content(name, self._tokenizer)

    @property
    def _packages(self) -> Packages:
        return self._service.packages


def _page(asked: wire.Page, found: Iterable[dict[str, Any]], name: str) -> dict[str, Any]:
    """A response with the part of a list that a request asks for; ``found`` is in the order of creation."""
    kept = [one for one in found if asked.creation_time_after < one["CreationTime"] < asked.creation_time_before]
    if asked.sort_order == "Descending":
        kept.reverse()
    first = int(asked.next_token)
    last = first + asked.max_results
    return {name: kept[first:last], **({"NextToken": str(last)} if last < len(kept) else {})}
