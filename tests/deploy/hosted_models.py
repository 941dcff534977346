"""SageMaker's hosting calls and the price list on loopback, with the shapes of botocore.

moto has no updates of endpoints, no statuses, and no OpenAI route.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import botocore.session
import httpx
from botocore.validate import ParamValidator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

_SERVICES = {
    "SageMaker": botocore.session.get_session().get_service_model("sagemaker"),
    "AWSPriceListService": botocore.session.get_session().get_service_model("pricing"),
}
CHANGES = ("Create", "Update", "Delete")


class HostedModels:
    """An account's models, configurations and endpoints.

    An endpoint is in service at the second look. ``refuse`` names the change, counted from 1, from which all changes are refused.
    ``answer_url`` is a chat server, which the endpoints' OpenAI route leads to.
    """

    def __init__(self, answer_url: str = "") -> None:
        self.models: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.endpoints: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, list[dict[str, str]]] = {}
        self.answer_url = answer_url
        self.refuse: int | None = None
        self.changes = 0
        self.wrong: list[str] = []
        self.app = Starlette(
            routes=[
                Route("/", self._call, methods=["POST"]),
                Route("/endpoints/{name}/openai/v1/{path:path}", self._chat, methods=["POST"]),
            ]
        )

    async def _chat(self, request: Request) -> Response:
        if request.path_params["name"] not in self.endpoints:
            return JSONResponse({"message": "no such endpoint"}, 404)
        async with httpx.AsyncClient() as client:
            reply = await client.post(
                f"{self.answer_url}/v1/{request.path_params['path']}", content=await request.body(), timeout=60
            )
        return Response(reply.content, reply.status_code, media_type="application/json")

    async def _call(self, request: Request) -> Response:
        service, _, operation = request.headers["x-amz-target"].partition(".")
        body = json.loads(await request.body() or b"{}")
        report = ParamValidator().validate(body, _SERVICES[service].operation_model(operation).input_shape)
        if report.has_errors():
            self.wrong.append(report.generate_report())
            return _refused(report.generate_report())
        if operation.startswith(CHANGES):
            self.changes += 1
            if self.refuse is not None and self.changes >= self.refuse:
                return _refused("not allowed", "AccessDeniedException")
        handler: Callable[[dict[str, Any]], Response] = getattr(self, f"_{operation}")
        return handler(body)

    def _GetProducts(self, body: dict[str, Any]) -> Response:
        instance = next(each["Value"] for each in body["Filters"] if each["Field"] == "instanceName")
        if instance != "ml.g6.xlarge":
            return JSONResponse({"PriceList": []})
        terms = {"OnDemand": {"t": {"priceDimensions": {"d": {"pricePerUnit": {"USD": "1.1267"}}}}}}
        return JSONResponse({"PriceList": [json.dumps({"terms": terms})]})

    def _CreateModel(self, body: dict[str, Any]) -> Response:
        self.models[body["ModelName"]] = body
        return JSONResponse({"ModelArn": f"arn:aws:sagemaker:us-west-2:123456789012:model/{body['ModelName']}"})

    def _DescribeModel(self, body: dict[str, Any]) -> Response:
        found = self.models.get(body["ModelName"])
        return _refused("Could not find model") if found is None else JSONResponse(_without_tags(found))

    def _DeleteModel(self, body: dict[str, Any]) -> Response:
        return JSONResponse({}) if self.models.pop(body["ModelName"], None) else _refused("Could not find model")

    def _ListModels(self, body: dict[str, Any]) -> Response:
        return JSONResponse({"Models": [{"ModelName": n} for n in self.models if body["NameContains"] in n]})

    def _CreateEndpointConfig(self, body: dict[str, Any]) -> Response:
        assert all(variant["ModelName"] in self.models for variant in body["ProductionVariants"])
        self.configs[body["EndpointConfigName"]] = body
        return JSONResponse({})

    def _DescribeEndpointConfig(self, body: dict[str, Any]) -> Response:
        found = self.configs.get(body["EndpointConfigName"])
        return _refused("Could not find configuration") if found is None else JSONResponse(_without_tags(found))

    def _DeleteEndpointConfig(self, body: dict[str, Any]) -> Response:
        return JSONResponse({}) if self.configs.pop(body["EndpointConfigName"], None) else _refused("Could not find it")

    def _ListEndpointConfigs(self, body: dict[str, Any]) -> Response:
        found = [{"EndpointConfigName": n} for n in self.configs if body["NameContains"] in n]
        return JSONResponse({"EndpointConfigs": found})

    def _CreateEndpoint(self, body: dict[str, Any]) -> Response:
        name = body["EndpointName"]
        if name in self.endpoints:
            return _refused("Cannot create already existing endpoint")
        arn = f"arn:aws:sagemaker:us-west-2:123456789012:endpoint/{name.lower()}"
        self.tags[arn] = body["Tags"]
        self.endpoints[name] = {"EndpointStatus": "Creating", "EndpointConfigName": body["EndpointConfigName"]}
        return JSONResponse({"EndpointArn": arn})

    def _UpdateEndpoint(self, body: dict[str, Any]) -> Response:
        now = self.endpoints[body["EndpointName"]]
        if now["EndpointStatus"] != "InService":
            return _refused("Cannot update in-progress endpoint")
        now |= {"EndpointStatus": "Updating", "EndpointConfigName": body["EndpointConfigName"]}
        return JSONResponse({"EndpointArn": "arn:aws:sagemaker:us-west-2:123456789012:endpoint/x"})

    def _DescribeEndpoint(self, body: dict[str, Any]) -> Response:
        found = self.endpoints.get(body["EndpointName"])
        if found is None:
            return _refused("Could not find endpoint")
        shown = dict(found)
        if found["EndpointStatus"] in ("Creating", "Updating"):
            found["EndpointStatus"] = "InService"
        return JSONResponse({"EndpointName": body["EndpointName"], **shown})

    def _DeleteEndpoint(self, body: dict[str, Any]) -> Response:
        return (
            JSONResponse({}) if self.endpoints.pop(body["EndpointName"], None) else _refused("Could not find endpoint")
        )

    def _ListTags(self, body: dict[str, Any]) -> Response:
        return JSONResponse({"Tags": self.tags.get(body["ResourceArn"], [])})


def _refused(message: str, code: str = "ValidationException") -> Response:
    return JSONResponse({"__type": code, "message": message}, 400)


def _without_tags(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "Tags"}
