"""SageMaker's local service with the lists that `doctor --aws` asks for, and with faults on purpose."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from starlette.responses import JSONResponse

from agentcore_rl_toolkit._servers.process import break_off
from agentcore_rl_toolkit.backends.sagemaker.local import wire
from agentcore_rl_toolkit.backends.sagemaker.local.service import SageMakerApp
from agentcore_rl_toolkit.gateway.sampling_services.sagemaker import CONTROL

REFUSALS = {"throttle": (429, "ThrottlingException"), "error": (500, "InternalServerException")}


class ListingApp(SageMakerApp):
    """The service with the lists that `doctor --aws` asks for."""

    def _control(self, operation: str, body: bytes) -> dict[str, Any]:
        if operation == "ListJobs":
            return {"JobSummaries": []}
        if operation != "ListTrainingSessions":
            return super()._control(operation, body)
        given = wire.request(body, CONTROL, operation)
        found = [s for s in reversed(self._sessions.values()) if given.get("StatusEquals") in (None, s.status)]
        times = {"CreationTime": 0, "LastModifiedTime": 0}
        summaries = [{"TrainingSessionArn": s.arn, "TrainingSessionStatus": s.status, **times} for s in found]
        return {"TrainingSessionSummaries": summaries}


class FaultyApp(ListingApp):
    """Each kind of fault hits its share of the requests about operations.

    ``faults`` are the shares: ``throttle`` and ``error`` do nothing, ``lost`` obeys and then breaks the connection.
    """

    faults: ClassVar[dict[str, float]] = {}
    _random = random.Random(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        hit = {kind for kind, share in self.faults.items() if self._random.random() < share}
        refused = [REFUSALS[kind] for kind in REFUSALS if kind in hit]
        if "operations" not in scope["path"] or not hit:
            await super().__call__(scope, receive, send)
        elif refused:
            status, code = refused[0]
            error = JSONResponse({"__type": code, "message": "planned"}, status, {"x-amzn-errortype": code})
            await error(scope, receive, send)
        else:
            await super().__call__(scope, receive, _nowhere)
            await break_off(send)


async def _nowhere(message: Any) -> None:
    """The response is lost."""
