"""The built-in policy behind SGLang's HTTP interface, as a process: what slime calls an external engine.

It samples for real; every generation that ended, by itself or cut off, is a line of the `--journal` file, under the
name its caller gave it (`rid`). Served are the routes that slime 0.3.1, sglang-router 0.3.2 and our gateway use.
Wire format: docs.sglang.ai, "Native APIs"; `/abort_request`: sglang 0.5.15, `managers/tokenizer_manager.py` and
`managers/scheduler.py`. Other than SGLang it lets a call run on whose connection was closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentcore_rl_toolkit.policy.batch import Generation
from agentcore_rl_toolkit.policy.engine import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams

STREAM_S = 0.005  # between the events of a stream


class Server:
    def __init__(self, engine: Engine, journal: Path, delay_s: float, pace_s: float) -> None:
        self.engine, self.journal, self.delay_s, self.pace_s = engine, journal, delay_s, pace_s
        self.running: dict[Generation, str] = {}
        self.tasks: set[asyncio.Task[dict[str, Any]]] = set()
        self.weight_version = "0"
        self.aborted_calls = 0

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        asked = body["sampling_params"]
        stops = tuple(asked.get("stop_token_ids") or ())
        params = SamplingParams(
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p", 1.0),
            top_k=max(0, asked.get("top_k", 0)),
            max_tokens=asked.get("max_new_tokens", 64),
            stop_token_ids=stops,
        )
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def received(generation: Generation) -> None:  # on the thread that samples
            if generation.finish_reason:
                loop.call_soon_threadsafe(done.set)
            else:
                time.sleep(self.pace_s)

        made = Generation(
            prompt_ids=list(body["input_ids"]), params=params, listener=received, notify_every=1 if self.pace_s else 0
        )
        name = self.running[made] = str(body.get("rid", ""))
        ended = asyncio.create_task(self._run(made, done, name))
        self.tasks.add(ended)
        ended.add_done_callback(self.tasks.discard)
        if body.get("stream"):
            return StreamingResponse(self._events(made, ended), media_type="text/event-stream")
        return JSONResponse(await asyncio.shield(ended))

    async def _run(self, made: Generation, done: asyncio.Event, name: str) -> dict[str, Any]:
        """Sample, write the journal's line, and then the whole answer."""
        try:
            await asyncio.sleep(self.delay_s)
            if not made.cancelled:
                self.engine.submit([made])
                await done.wait()
        finally:
            del self.running[made]
        self.aborted_calls += made.cancelled
        answer = self._answer(made, len(made.logprobs), self._finish(made))
        with self.journal.open("a") as lines:
            line = {"rid": name, "prompt": made.prompt_ids, "ids": made.token_ids, "logprobs": made.logprobs}
            lines.write(json.dumps({**line, "finish": answer["meta_info"]["finish_reason"]["type"]}) + "\n")
        return answer

    async def _events(self, made: Generation, ended: asyncio.Task[dict[str, Any]]) -> AsyncIterator[str]:
        """Everything sampled so far, again and again, as SGLang streams by default."""
        reply = 0
        while not ended.done():
            upto = len(made.logprobs)  # written after the token, on the thread that samples
            if upto > reply:
                reply = upto
                yield f"data: {json.dumps(self._answer(made, upto, None))}\n\n"
            await asyncio.wait({ended}, timeout=STREAM_S)
        yield f"data: {json.dumps(ended.result())}\n\n"
        yield "data: [DONE]\n\n"

    def _finish(self, made: Generation) -> dict[str, Any]:
        if made.cancelled:
            return {"type": "abort", "message": "AbortReq from /abort_request"}
        if made.finish_reason == "length":
            return {"type": "length", "length": len(made.token_ids)}
        return {"type": "stop", "matched": made.token_ids[-1]}

    def _answer(self, made: Generation, upto: int, finish: dict[str, Any] | None) -> dict[str, Any]:
        ids, logprobs = made.token_ids[:upto], made.logprobs[:upto]
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": "generation",
                "finish_reason": finish,
                "prompt_tokens": len(made.prompt_ids),
                "completion_tokens": upto,
                "cached_tokens": made.cached_tokens,
                "weight_version": self.weight_version,
                "output_token_logprobs": [[lp, token, None] for lp, token in zip(logprobs, ids, strict=True)],
            },
        }

    async def abort(self, request: Request) -> Response:
        body = await request.json()
        start, everything = body.get("rid") or "", body.get("abort_all", False)
        for made, name in list(self.running.items()):
            if everything or (start and name.startswith(start)):
                self.engine.cancel(made)
        return JSONResponse({})

    async def loads(self, request: Request) -> Response:
        return JSONResponse({"loads": [{"dp_rank": 0, "num_reqs": len(self.running)}]})

    async def set_version(self, request: Request) -> Response:
        self.weight_version = str((await request.json())["new_version"])
        return JSONResponse({"success": True, "new_version": self.weight_version})

    async def info(self, request: Request) -> Response:
        return JSONResponse(
            {"tp_size": 1, "pp_size": 1, "dp_size": 1, "enable_memory_saver": False, "version": "0.5.15",
             "model_path": "policy", "served_model_name": "policy", "is_generation": True,
             "aborted_calls": self.aborted_calls}
        )  # fmt: skip

    async def ok(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.weight_version, "object": "list", "data": [{"id": "policy"}]})

    def app(self) -> Starlette:
        info = ("/server_info", "/get_server_info", "/model_info", "/get_model_info")
        ok = ("/health", "/health_generate", "/v1/models", "/get_weight_version", "/flush_cache")
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/abort_request", self.abort, methods=["POST"]),
                Route("/update_weight_version", self.set_version, methods=["POST"]),
                Route("/v1/loads", self.loads),
                *(Route(path, self.info) for path in info),
                *(Route(path, self.ok, methods=["GET", "POST"]) for path in ok),
            ]
        )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="Seconds before the first token.")
    parser.add_argument("--pace", type=float, default=0.0, help="Seconds more for each token of each running call.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with Engine.from_directory(None, seed=7) as engine:
        app = Server(engine, given.journal, given.delay, given.pace).app()
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="warning"))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        partial = given.ready_file.with_suffix(".new")
        partial.write_text(json.dumps({"url": f"http://127.0.0.1:{port}", "pid": os.getpid()}))
        partial.replace(given.ready_file)
        while not serving.done():
            await asyncio.sleep(0.5)
            server.should_exit = server.should_exit or os.getppid() != given.parent_pid


if __name__ == "__main__":
    asyncio.run(main())
