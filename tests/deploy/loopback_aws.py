"""What moto lacks of an account that serves models, on loopback. Every call is checked against botocore's shapes and patterns.

It has SageMaker's hosting with OpenAI's route and invocations, Bedrock's imports and InvokeModel, configuration bundles, and the
price list. Other calls of AgentCore's control plane go on to the local runtime.
"""

from __future__ import annotations

import functools
import json
import re
import ssl
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import botocore.session
import httpx
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.validate import ParamValidator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

ACCOUNT, REGION = "123456789012", "us-west-2"
CHANGES = ("Create", "Update", "Delete", "AddTags")
JSON_SERVICES = {"SageMaker": "sagemaker", "AWSPriceListService": "pricing"}
REST_SERVICES = ("bedrock", "bedrock-runtime", "sagemaker-runtime", "bedrock-agentcore-control")
Body = dict[str, Any]
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # to read the certificates for each call takes longer than the call


@functools.cache
def service_model(name: str) -> Any:
    return botocore.session.get_session().get_service_model(name)


class Refused(Exception):
    def __init__(self, message: str, code: str = "ValidationException", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


class LoopbackAWS:
    """An account's models, imports, endpoints and bundles in one region. Other regions have nothing.

    An endpoint is in service, and an import has ended, at the second look. ``chat_url`` and ``engine_url`` are the servers of the
    models: of chats, and of completions of token ids. ``control_url`` is the local runtime. ``not_ready`` is how often a model is
    not ready, ``failure`` the reason why the next import fails.
    """

    def __init__(self, chat_url: str = "", engine_url: str = "", control_url: str = "") -> None:
        self.models: dict[str, Body] = {}
        self.configs: dict[str, Body] = {}
        self.endpoints: dict[str, Body] = {}
        self.jobs: dict[str, Body] = {}
        self.imported: dict[str, Body] = {}
        self.bundles: dict[str, list[Body]] = {}
        self.tags: dict[str, Any] = {}
        self.chat_url, self.engine_url, self.control_url = chat_url, engine_url, control_url
        self.changes = 0
        self.not_ready = 0
        self.failure: str | None = None
        self.wrong: list[str] = []
        routes = [
            Route("/", self._json_call, methods=["POST"]),
            Route("/endpoints/{name}/openai/v1/{path:path}", self._chat, methods=["POST"]),
        ]
        for name in REST_SERVICES:
            model = service_model(name)
            for operation in map(model.operation_model, model.operation_names):
                if hasattr(self, f"_{operation.name}"):
                    path = operation.http["requestUri"].partition("?")[0].replace("+", "")
                    if name != "bedrock-agentcore-control" or "Arn}" in path:  # ARNs have slashes
                        path = path.replace("}", ":path}")
                    routes.append(Route(path, self._rest_call(operation), methods=[operation.http["method"]]))
        routes.append(Route("/{path:path}", self._control, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]))
        self.app = Starlette(routes=routes)

    def has_nothing(self) -> bool:
        return not (self.models or self.configs or self.endpoints or self.imported or self.bundles)

    # -- protocols

    async def _json_call(self, request: Request) -> Response:
        service, _, name = request.headers["x-amz-target"].partition(".")
        operation = service_model(JSON_SERVICES[service]).operation_model(name)
        return await self._answer(operation, json.loads(await request.body() or b"{}"), request)

    def _rest_call(self, operation: Any) -> Callable[[Request], Any]:
        async def call(request: Request) -> Response:
            shape, raw = operation.input_shape, await request.body()
            payload = shape.serialization.get("payload")
            body: Body = {payload: raw} if payload else {}
            sent = {} if payload else json.loads(raw or b"{}")
            for name, member in shape.members.items():
                key, where = member.serialization.get("name", name), member.serialization.get("location")
                source = {"uri": request.path_params, "querystring": request.query_params, "header": request.headers}
                found = source[where].get(key) if where else sent.get(key)
                if found is not None and name != payload:
                    body[name] = int(found) if where == "querystring" and member.type_name == "integer" else found
            return await self._answer(operation, body, request)

        return call

    async def _answer(self, operation: Any, body: Body, request: Request) -> Response:
        wrong = mistakes(body, operation.input_shape)
        if wrong:
            self.wrong += wrong
            return _error(Refused("; ".join(wrong)))
        if operation.name.startswith(CHANGES):
            self.changes += 1
        try:
            here = f"/{REGION}/" in request.headers["authorization"]
            found = getattr(self if here else LoopbackAWS(), f"_{operation.name}")(body)
            found = await found if hasattr(found, "__await__") else found
        except Refused as refused:
            return _error(refused)
        payload = operation.output_shape.serialization.get("payload") if operation.output_shape else None
        if payload:
            return Response(found, media_type="application/json")
        if operation.output_shape is None:
            return JSONResponse({})
        found = {name: value for name, value in found.items() if name in operation.output_shape.members}
        assert not mistakes(found, operation.output_shape), mistakes(found, operation.output_shape)
        return JSONResponse(found)

    async def _chat(self, request: Request) -> Response:
        if request.path_params["name"] not in self.endpoints:
            return JSONResponse({"message": "no such endpoint"}, 404)
        return Response(await self._engine(await request.body()), media_type="application/json")

    async def _engine(self, content: bytes) -> bytes:
        """Send a request to the server of its kind: prompts are completed, messages answered."""
        url = (
            f"{self.engine_url}/v1/completions"
            if b'"prompt"' in content[:20]
            else f"{self.chat_url}/v1/chat/completions"
        )
        async with httpx.AsyncClient(verify=_NO_TLS) as client:
            reply = await client.post(url, content=content, timeout=60)
        if reply.status_code >= 400:
            raise Refused(reply.text, "ModelErrorException", 424)
        return reply.content

    async def _control(self, request: Request) -> Response:
        """Send a call on to the local runtime, signed again for its address."""
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        sent = AWSRequest(request.method, f"{self.control_url}{path}", data=await request.body())
        sent.headers["content-type"] = request.headers.get("content-type", "application/json")
        SigV4Auth(Credentials("AKLOCAL", "secret"), "bedrock-agentcore", REGION).add_auth(sent)
        async with httpx.AsyncClient(verify=_NO_TLS) as client:
            reply = await client.request(
                request.method, sent.url, content=sent.data, headers=dict(sent.headers), timeout=60
            )
        kept = {name: value for name, value in reply.headers.items() if name.startswith("x-amzn")}
        return Response(reply.content, reply.status_code, headers=kept, media_type="application/json")

    # -- price list

    def _GetProducts(self, body: Body) -> Body:
        instance = next(each["Value"] for each in body["Filters"] if each["Field"] == "instanceName")
        terms = {"OnDemand": {"t": {"priceDimensions": {"d": {"pricePerUnit": {"USD": "1.1267"}}}}}}
        return {"PriceList": [json.dumps({"terms": terms})] if instance == "ml.g6.xlarge" else []}

    # -- SageMaker

    def _CreateModel(self, body: Body) -> Body:
        return {"ModelArn": self._put(self.models, "model", body["ModelName"], body)}

    def _DescribeModel(self, body: Body) -> Body:
        arn = _arn("sagemaker", f"model/{body['ModelName'].lower()}")
        return {**_get(self.models, body["ModelName"]), "ModelArn": arn, "CreationTime": time.time()}

    def _DeleteModel(self, body: Body) -> Body:
        return _delete(self.models, body["ModelName"])

    def _ListModels(self, body: Body) -> Body:
        return {"Models": self._listed("Model", "model", self.models, body["NameContains"])}

    def _CreateEndpointConfig(self, body: Body) -> Body:
        assert all(variant["ModelName"] in self.models for variant in body["ProductionVariants"])
        name = body["EndpointConfigName"]
        return {"EndpointConfigArn": self._put(self.configs, "endpoint-config", name, body)}

    def _DescribeEndpointConfig(self, body: Body) -> Body:
        arn = _arn("sagemaker", f"endpoint-config/{body['EndpointConfigName'].lower()}")
        found = _get(self.configs, body["EndpointConfigName"])
        return {**found, "EndpointConfigArn": arn, "CreationTime": time.time()}

    def _DeleteEndpointConfig(self, body: Body) -> Body:
        return _delete(self.configs, body["EndpointConfigName"])

    def _ListEndpointConfigs(self, body: Body) -> Body:
        found = self._listed("EndpointConfig", "endpoint-config", self.configs, body["NameContains"])
        return {"EndpointConfigs": found[::-1] if body.get("SortOrder") == "Descending" else found}

    def _CreateEndpoint(self, body: Body) -> Body:
        if body["EndpointName"] in self.endpoints:
            raise Refused("Cannot create already existing endpoint")
        new = {
            "EndpointStatus": "Creating",
            **{name: body[name] for name in ("EndpointConfigName", "Tags") if name in body},
        }
        return {"EndpointArn": self._put(self.endpoints, "endpoint", body["EndpointName"], new)}

    def _UpdateEndpoint(self, body: Body) -> Body:
        now = _get(self.endpoints, body["EndpointName"])
        if now["EndpointStatus"] != "InService":
            raise Refused("Cannot update in-progress endpoint")
        now |= {"EndpointStatus": "Updating", "EndpointConfigName": body["EndpointConfigName"]}
        return {"EndpointArn": _arn("sagemaker", f"endpoint/{body['EndpointName'].lower()}")}

    def _DescribeEndpoint(self, body: Body) -> Body:
        found, name = _get(self.endpoints, body["EndpointName"]), body["EndpointName"]
        shown = {"EndpointName": name, "EndpointArn": _arn("sagemaker", f"endpoint/{name.lower()}"), **found}
        if found["EndpointStatus"] in ("Creating", "Updating"):
            found["EndpointStatus"] = "InService"
        config = self.configs.get(found["EndpointConfigName"], {"ProductionVariants": []})
        counts = {each["VariantName"]: each["InitialInstanceCount"] for each in config["ProductionVariants"]}
        variants = [{"VariantName": name, "CurrentInstanceCount": count} for name, count in counts.items()]
        shown |= {"ProductionVariants": variants} if variants else {}
        return {**shown, "CreationTime": time.time(), "LastModifiedTime": time.time()}

    def _DeleteEndpoint(self, body: Body) -> Body:
        self.tags.pop(_arn("sagemaker", f"endpoint/{body['EndpointName'].lower()}"), None)
        return _delete(self.endpoints, body["EndpointName"])

    async def _InvokeEndpoint(self, body: Body) -> bytes:
        if _get(self.endpoints, body["EndpointName"])["EndpointStatus"] != "InService":
            raise Refused("not in service", "ValidationError")
        return await self._engine(body["Body"])

    def _put(self, into: dict[str, Body], kind: str, name: str, body: Body) -> str:
        arn, tags = _arn("sagemaker", f"{kind}/{name.lower()}"), body.pop("Tags", [])
        into[name], self.tags[arn] = body, {tag["Key"]: tag["Value"] for tag in tags}
        return arn

    def _ListTags(self, body: Body) -> Body:
        found = self.tags.get(body["ResourceArn"], {})
        return {"Tags": [{"Key": key, "Value": value} for key, value in found.items()]}

    def _AddTags(self, body: Body) -> Body:
        self.tags[body["ResourceArn"]] |= {tag["Key"]: tag["Value"] for tag in body["Tags"]}
        return self._ListTags(body)

    def _listed(self, name: str, kind: str, found: Mapping[str, Body], part: str) -> list[Body]:
        arns = {each: _arn("sagemaker", f"{kind}/{each.lower()}") for each in found if part in each}
        return [{f"{name}Name": n, f"{name}Arn": arn, "CreationTime": time.time()} for n, arn in arns.items()]

    # -- Bedrock

    def _CreateModelImportJob(self, body: Body) -> Body:
        for job in self.jobs.values():
            if job["jobName"] == body["jobName"]:
                raise Refused("the name is taken", "ConflictException")
        arn = _arn("bedrock", f"model-import-job/{len(self.jobs) + 1:012d}")
        self.jobs[arn] = {**body, "status": "InProgress"}
        return {"jobArn": arn}

    def _GetModelImportJob(self, body: Body) -> Body:
        job = _get(self.jobs, body["jobIdentifier"], "ResourceNotFoundException")
        shown = {name: job[name] for name in ("jobName", "importedModelName", "status", "roleArn")}
        shown |= {name: job[name] for name in ("failureMessage", "importedModelArn") if name in job}
        if job["status"] == "InProgress":
            self._end(job)
        return {"jobArn": body["jobIdentifier"], **shown}

    def _end(self, job: Body) -> None:
        if self.failure is not None:
            job |= {"status": "Failed", "failureMessage": self.failure}
            self.failure = None
            return
        arn = _arn("bedrock", f"imported-model/{len(self.jobs):012d}")
        job |= {"status": "Completed", "importedModelArn": arn}
        self.imported[arn] = {"modelArn": arn, "modelName": job["importedModelName"], "creationTime": time.time()}
        self.tags[arn] = job["importedModelTags"]

    def _ListModelImportJobs(self, body: Body) -> Body:
        found = [
            {"jobArn": arn, "creationTime": time.time()}
            | {name: job[name] for name in ("jobName", "importedModelName", "status")}
            for arn, job in self.jobs.items()
            if body["nameContains"] in job["jobName"] and job["status"] == body["statusEquals"]
        ]
        return _page("modelImportJobSummaries", found, body)

    def _ListImportedModels(self, body: Body) -> Body:
        found = [model for model in self.imported.values() if body["nameContains"] in model["modelName"]]
        return _page("modelSummaries", found, body)

    def _DeleteImportedModel(self, body: Body) -> Body:
        return _delete(self.imported, body["modelIdentifier"], "ResourceNotFoundException")

    async def _InvokeModel(self, body: Body) -> bytes:
        if body["modelId"] not in self.imported:
            raise Refused("no such model", "ResourceNotFoundException", 404)
        if self.not_ready:
            self.not_ready -= 1
            raise Refused("try again", "ModelNotReadyException", 429)
        return await self._engine(body["body"])

    # -- bundles; the operation of this name belongs to Bedrock, too

    def _ListTagsForResource(self, body: Body) -> Body:
        return {"tags": self.tags.get(body.get("resourceARN") or body.get("resourceArn"), [])}

    def _CreateConfigurationBundle(self, body: Body) -> Body:
        if any(versions[0]["bundleName"] == body["bundleName"] for versions in self.bundles.values()):
            raise Refused("the name is taken", "ConflictException", 409)
        identity = f"{body['bundleName']}-{uuid.uuid4().hex[:10]}"
        self.tags[_arn("bedrock-agentcore", f"configuration-bundle/{identity}")] = body["tags"]
        return self._version(identity, body["bundleName"], body["components"], [])

    def _UpdateConfigurationBundle(self, body: Body) -> Body:
        now = _get(self.bundles, body["bundleId"], "ResourceNotFoundException")[-1]
        if body["parentVersionIds"] != [now["versionId"]]:
            raise Refused("the parent is not the newest version", "ConflictException", 409)
        return self._version(body["bundleId"], now["bundleName"], body["components"], body["parentVersionIds"])

    def _version(self, identity: str, name: str, components: Body, parents: list[str]) -> Body:
        arn = _arn("bedrock-agentcore", f"configuration-bundle/{identity}")
        made = {"bundleArn": arn, "bundleId": identity, "versionId": str(uuid.uuid4())}
        lineage = {"parentVersionIds": parents, "branchName": "mainline"}
        new = {**made, "bundleName": name, "components": components, "lineageMetadata": lineage}
        times = dict.fromkeys(("createdAt", "updatedAt", "versionCreatedAt"), time.time())
        self.bundles.setdefault(identity, []).append({**new, **times})
        return {**made, **times}

    def _GetConfigurationBundle(self, body: Body) -> Body:
        return dict(_get(self.bundles, body["bundleId"], "ResourceNotFoundException")[-1])

    def _GetConfigurationBundleVersion(self, body: Body) -> Body:
        versions = _get(self.bundles, body["bundleId"], "ResourceNotFoundException")
        return next(dict(each) for each in versions if each["versionId"] == body["versionId"])

    def _ListConfigurationBundles(self, body: Body) -> Body:
        shown = ("bundleArn", "bundleId", "bundleName")
        return {"bundles": [{name: versions[0][name] for name in shown} for versions in self.bundles.values()]}

    def _DeleteConfigurationBundle(self, body: Body) -> Body:
        arn = _get(self.bundles, body["bundleId"], "ResourceNotFoundException")[0]["bundleArn"]
        del self.bundles[body["bundleId"]]
        return {"bundleArn": arn, "bundleId": body["bundleId"], "status": "DELETING"}


def mistakes(value: Any, shape: Any, at: str = "") -> list[str]:
    """What botocore finds wrong with a value, and what it does not look at: patterns and enumerations."""
    if not at:
        report = ParamValidator().validate(value, shape)
        if report.has_errors():
            return [f"{shape.name}: {report.generate_report()}"]
    if shape.type_name == "structure":
        return [
            wrong
            for name, inner in value.items()
            if name in shape.members
            for wrong in mistakes(inner, shape.members[name], f"{at}.{name}")
        ]
    if shape.type_name == "list":
        return [wrong for each in value for wrong in mistakes(each, shape.member, f"{at}[]")]
    if shape.type_name == "map":
        return [wrong for each in value.values() for wrong in mistakes(each, shape.value, f"{at}[]")]
    if shape.type_name != "string":
        return []
    if shape.enum and value not in shape.enum:
        return [f"{at}: {value!r} is not one of {shape.enum}"]
    pattern = shape.metadata.get("pattern")
    try:
        fits = pattern is None or re.fullmatch(pattern, value) is not None
    except re.error:  # a pattern of Java's that Python does not have
        return []
    return [] if fits else [f"{at}: {value!r} does not match {pattern}"]


def _arn(service: str, resource: str) -> str:
    return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{resource}"


def _get(found: Mapping[str, Any], name: str, code: str = "ValidationException") -> Any:
    if name not in found:
        raise Refused(f"Could not find {name}", code)
    return found[name]


def _delete(found: dict[str, Any], name: str, code: str = "ValidationException") -> Body:
    _get(found, name, code)
    del found[name]
    return {}


def _page(entries: str, found: list[Body], body: Body) -> Body:
    """One entry a page, so that callers have to ask on."""
    place = int(body.get("nextToken") or 0)
    return {entries: found[place : place + 1], **({"nextToken": str(place + 1)} if place + 1 < len(found) else {})}


def _error(refused: Refused) -> Response:
    body = {"__type": refused.code, "message": str(refused)}
    return JSONResponse(body, refused.status, headers={"x-amzn-errortype": refused.code})
