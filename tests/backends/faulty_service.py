"""SageMaker's local service with faults on purpose: each kind hits its share of the requests about operations."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from starlette.responses import JSONResponse

from agentcore_rl_toolkit._servers.process import break_off
from agentcore_rl_toolkit.backends.sagemaker.local.service import SageMakerApp

REFUSALS = {"throttle": (429, "ThrottlingException"), "error": (500, "InternalServerException")}


class FaultyApp(SageMakerApp):
    """``faults`` are the shares: ``throttle`` and ``error`` do nothing, ``lost`` obeys and then breaks the connection."""

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
