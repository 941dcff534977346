"""verl's servers as an engine of our gateway: token ids in, token ids out, through verl's own client.

Agents use HTTP, verl's servers use Ray. The bridge is a small HTTP server in the trainer's process with the wire
format of SGLang's ``/generate``; every call goes to ``llm_client.generate``. So rollouts get the features of
verl's client for its own agent loops: load balancing over changing servers, the weight version of every reply, expert
routing, and in the asynchronous modes generations that continue after an update of the weights interrupted them.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import secrets
import uuid
from collections.abc import Mapping
from typing import Any

from ..._installation import missing_extra
from ..._servers.process import BACKLOG, listen, url_of
from .._portal import portal

log = logging.getLogger(__name__)

# The gateway's (SGLang's) names of sampling parameters -> the names of verl's servers.
_TO_VLLM = {
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    **{k: k for k in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")},
    **{k: k for k in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")},
}


class Bridge:
    """An HTTP server on loopback in front of verl's `LLMServerClient`. `url` is set once it listens. Requests need `key`."""

    def __init__(self, llm_client: Any, *, engine: str = "vllm") -> None:
        self.llm_client, self.engine = llm_client, engine
        self.url, self.key = "", secrets.token_urlsafe(24)
        self.expert_shape: tuple[int, int] | None = None  # (layers, top k), known from the first reply with routing
        self._server: Any = None

    def open(self) -> str:
        """Listen, on the background loop of this process. Returns the URL. Raises: MissingExtraError."""
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ModuleNotFoundError as e:
            raise missing_extra(f"the verl backend needs {e.name!r}", "verl") from e
        routes = [
            Route("/generate", self._answer, methods=["POST"]),
            *(Route(path, _empty_list) for path in ("/health", "/v1/models")),
        ]
        app, listener = Starlette(routes=routes), listen("127.0.0.1", 0)
        quiet = uvicorn.Config(app, ws="none", lifespan="off", log_level="warning", access_log=False, backlog=BACKLOG)
        self._server = uvicorn.Server(quiet)
        # It handles no signals, because its loop is not the main thread's.
        self._serving = portal.submit(self._server.serve(sockets=[listener]))
        self.url = url_of(listener)
        return self.url

    def close(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    async def _answer(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, Response, StreamingResponse

        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), b"Bearer " + self.key.encode()):
            return JSONResponse({"error": {"message": "only the gateway of this server's trainer may use it"}}, 401)
        asked = await request.json()
        session = request.headers.get("x-smg-routing-key") or uuid.uuid4().hex
        work = asyncio.ensure_future(self.generate(asked["input_ids"], asked["sampling_params"], session=session))
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # the agent disconnected
            answers = work.result()
        except Exception as e:
            log.warning("a generation failed: %s: %s", type(e).__name__, e)
            return JSONResponse({"error": {"message": f"{type(e).__name__}: {e}"}}, 500)
        finally:
            for task in (work, gone):
                task.cancel()
        if not asked.get("stream"):
            # One reply has one version: the oldest, so that staleness is not understated.
            oldest = {k: v for k, v in answers[0]["meta_info"].items() if k == "weight_version"}
            return JSONResponse(answers[-1] | {"meta_info": answers[-1]["meta_info"] | oldest})
        events = [*(f"data: {json.dumps(answer)}\n\n" for answer in answers), "data: [DONE]\n\n"]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    async def generate(
        self, prompt_ids: list[int], sampling: Mapping[str, Any], *, session: str
    ) -> list[dict[str, Any]]:
        """Return a generation as SGLang's events. The last has all tokens.

        An earlier event has the version of the first token if that differs. verl's client keeps the calls of one ``session``
        on one server.
        """
        limit = sampling.get("max_new_tokens")
        params = {_TO_VLLM[k] if self.engine == "vllm" else k: v for k, v in sampling.items() if k in _TO_VLLM}
        output = await self.llm_client.generate(
            request_id=session, prompt_ids=prompt_ids, sampling_params={**params, "logprobs": True}
        )
        ids = [int(i) for i in output.token_ids]
        extra = output.extra_fields
        oldest, newest = extra.get("min_global_steps"), extra.get("max_global_steps")
        meta: dict[str, Any] = {"finish_reason": {"type": _finish(output.stop_reason, len(ids), limit)}}
        if newest is not None:
            meta["weight_version"] = int(newest)
        if output.log_probs is not None:
            meta["output_token_logprobs"] = [
                [float(lp), token, None] for lp, token in zip(output.log_probs, ids, strict=True)
            ]
        if output.routed_experts is not None:
            meta["routed_experts"] = self._experts(output.routed_experts, len(prompt_ids) + len(ids) - 1)
        answers = [{"index": 0, "output_ids": ids, "meta_info": meta}]
        if oldest is not None and oldest != newest and ids:
            first = {"weight_version": int(oldest), "finish_reason": None}
            first |= {"output_token_logprobs": meta.get("output_token_logprobs", [])[:1]}
            answers.insert(0, {"index": 0, "output_ids": ids[:1], "meta_info": first})
        return answers

    def _experts(self, experts: Any, rows: int) -> str:
        import numpy as np

        array_ = np.asarray(experts)[:rows].astype("<i4")
        self.expert_shape = (int(array_.shape[1]), int(array_.shape[2]))
        return base64.b64encode(array_.tobytes()).decode()


def _finish(stop_reason: str | None, tokens: int, limit: int | None) -> str:
    """Return SGLang's finish reason. verl says "completed" for both a stop and a length limit."""
    if stop_reason in ("abort", "aborted"):
        return "abort"
    if stop_reason == "length" or (limit is not None and tokens >= limit):
        return "length"
    return "stop"


async def _empty_list(request: Any) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"object": "list", "data": []})
