"""The control plane: agent runtimes and their endpoints by AWS's API.

Source: botocore service model `bedrock-agentcore-control` 2023-06-05. All paths end with a slash. Lists are POST.
"""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..agents.agent import NAME, Agent
from ..agents.registry import DEFAULT, Endpoint, Record
from ..agents.version_fields import IDLE, LIFETIME, check_fields
from ..runtime import Runtime
from ..wire import WireError, invalid, parse_target
from .responses import object_of

_ENDPOINTS = "/runtimes/{runtime}/runtime-endpoints"
_ENDPOINT = _ENDPOINTS + "/{endpoint}"


def routes(runtime: Runtime) -> list[Route]:
    """Return the routes of the control plane."""
    plane = ControlPlane(runtime)
    found = (
        ("PUT", "/runtimes", "CreateAgentRuntime", plane.create),
        ("POST", "/runtimes", "ListAgentRuntimes", plane.list),
        ("GET", "/runtimes/{runtime}", "GetAgentRuntime", plane.get),
        ("PUT", "/runtimes/{runtime}", "UpdateAgentRuntime", plane.update),
        ("DELETE", "/runtimes/{runtime}", "DeleteAgentRuntime", plane.delete),
        ("PUT", _ENDPOINTS, "CreateAgentRuntimeEndpoint", plane.create_endpoint),
        ("POST", _ENDPOINTS, "ListAgentRuntimeEndpoints", plane.list_endpoints),
        ("GET", _ENDPOINT, "GetAgentRuntimeEndpoint", plane.get_endpoint),
        ("PUT", _ENDPOINT, "UpdateAgentRuntimeEndpoint", plane.update_endpoint),
        ("DELETE", _ENDPOINT, "DeleteAgentRuntimeEndpoint", plane.delete_endpoint),
        ("GET", "/tags/{runtime:path}", "ListTagsForResource", plane.list_tags),
    )
    return [Route(path, endpoint, methods=[method], name=name) for method, path, name, endpoint in found]


class ControlPlane:
    """Answers control-plane calls over the agents of a runtime. Each endpoint raises WireError."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.registry = runtime, runtime.registry

    def _record(self, request: Request) -> Record:
        return self.registry.get(request.path_params["runtime"])

    # -- runtimes
    async def create(self, request: Request) -> Response:
        body = object_of(request)
        name = _name(body, "agentRuntimeName")
        record = self.registry.create(name, check_fields(body), tags=body.get("tags") or {})
        self.runtime.deploy(record.latest)
        return JSONResponse(self._describe(record, record.latest), 202)

    async def update(self, request: Request) -> Response:
        record, fields = self._record(request), check_fields(object_of(request))
        version = self.registry.update(record, fields)
        self.runtime.deploy(version)
        return JSONResponse(self._describe(record, version), 202)

    async def get(self, request: Request) -> Response:
        record, number = self._record(request), request.query_params.get("version")
        version = record.latest if number is None else record.version(number)
        lifecycle = {IDLE: math.ceil(version.idle_timeout_s), LIFETIME: math.ceil(version.max_lifetime_s)}
        reply = {**version.fields, **self._describe(record, version), "lifecycleConfiguration": lifecycle}
        if version.failure is not None:
            reply["failureReason"] = version.failure
        return JSONResponse({**reply, "platformVersion": "V2"})

    async def delete(self, request: Request) -> Response:
        record = self._record(request)
        del self.registry.records[record.id]
        await self.runtime.remove(record)
        return JSONResponse({"status": "DELETING", "agentRuntimeId": record.id}, 202)

    async def list(self, request: Request) -> Response:
        newest_first = reversed(self.registry.records.values())
        return JSONResponse({"agentRuntimes": [self._describe(record, record.latest) for record in newest_first]})

    def _describe(self, record: Record, version: Agent) -> dict[str, Any]:
        return {
            "agentRuntimeArn": self.registry.arn(record.id),
            "agentRuntimeId": record.id,
            "agentRuntimeVersion": str(version.version),
            "agentRuntimeName": record.name,
            "description": version.fields.get("description", ""),
            "status": version.status,
            "createdAt": iso(version.created_s),
            "lastUpdatedAt": iso(version.updated_s),
        }

    # -- endpoints
    async def create_endpoint(self, request: Request) -> Response:
        body, record = object_of(request), self._record(request)
        name, number = _name(body, "name"), body.get("agentRuntimeVersion")
        version = record.latest if number is None else record.version(number)
        if name in record.endpoints:
            raise WireError("ConflictException", f"Endpoint {name} already exists")
        endpoint = record.endpoints[name] = Endpoint(name, version.version, body.get("tags") or {})
        ids = {"agentRuntimeId": record.id, "endpointName": name}
        return JSONResponse({**self._describe_endpoint(record, endpoint), **ids, "status": "CREATING"}, 202)

    async def get_endpoint(self, request: Request) -> Response:
        record = self._record(request)
        return JSONResponse(self._describe_endpoint(record, record.endpoint(request.path_params["endpoint"])))

    async def update_endpoint(self, request: Request) -> Response:
        record, number = self._record(request), object_of(request).get("agentRuntimeVersion")
        endpoint = record.endpoint(request.path_params["endpoint"])
        if endpoint.name == DEFAULT:
            raise WireError("ConflictException", "The DEFAULT endpoint always follows the latest version")
        if number is not None:
            version = record.version(number)
            if version.status != "READY":
                why = version.failure or "it is being loaded"
                raise WireError("ConflictException", f"Version {version.version} is not ready: {why}")
            endpoint.version = version.version
        endpoint.updated_s = time.time()
        return JSONResponse({**self._describe_endpoint(record, endpoint), "status": "UPDATING"}, 202)

    async def delete_endpoint(self, request: Request) -> Response:
        record = self._record(request)
        endpoint = record.endpoint(request.path_params["endpoint"])
        if endpoint.name == DEFAULT:
            raise WireError("ConflictException", "The DEFAULT endpoint cannot be deleted")
        del record.endpoints[endpoint.name]
        return JSONResponse({"status": "DELETING", "agentRuntimeId": record.id, "endpointName": endpoint.name}, 202)

    async def list_endpoints(self, request: Request) -> Response:
        record = self._record(request)
        return JSONResponse(
            {"runtimeEndpoints": [self._describe_endpoint(record, e) for e in record.endpoints.values()]}
        )

    async def list_tags(self, request: Request) -> Response:
        arn = request.path_params["runtime"]
        target = parse_target(arn, {})
        record = self.registry.find(target)
        tagged = record.endpoint(target.endpoint) if "/runtime-endpoint/" in arn else record
        return JSONResponse({"tags": tagged.tags})

    def _describe_endpoint(self, record: Record, endpoint: Endpoint) -> dict[str, Any]:
        arn = self.registry.arn(record.id)
        return {
            "agentRuntimeEndpointArn": f"{arn}/runtime-endpoint/{endpoint.name}",
            "agentRuntimeArn": arn,
            "name": endpoint.name,
            "id": endpoint.name,
            "liveVersion": str(endpoint.version),
            "targetVersion": str(endpoint.version),
            "status": record.versions[endpoint.version].status,
            "createdAt": iso(endpoint.created_s),
            "lastUpdatedAt": iso(endpoint.updated_s),
        }


def iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _name(body: dict[str, Any], field: str) -> str:
    name: str = body[field]
    if not NAME.fullmatch(name):
        raise invalid(f"{field} must match {NAME.pattern}", field=field)
    return name
