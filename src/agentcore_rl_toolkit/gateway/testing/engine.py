"""A scripted inference server for tests: speaks the wire formats of the engines exactly, samples nothing.

`ScriptedEngine` answers vLLM's chat and text completions (with ``return_token_ids``), whole or streamed token by
token, from a toy tokenizer that is exact in both directions, so a test can say which tokens must have been recorded.
Faults are queued and taken by the next calls, in order::

    async with ScriptedEngine() as engine:
        engine.faults.append(Fault(status=503))
        gateway = Gateway(GatewayConfig(upstreams=(UpstreamConfig(url=engine.url, engine="vllm"),)))
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._servers.process import stop_listening
from .openai_shapes import SampledReply, chunks, vllm_choice, whole
from .tokens import END, VOCABULARY, Fault, Seen, decode_ids, encode_messages, encode_text, error_body, logprob_of


class ScriptedEngine:
    """One server on a free loopback port. ``requests`` lists what it was asked, ``replies`` may hold texts to answer
    with; where there are none, ``decide`` makes the reply, and an error it raises is status 400. To a prompt of token ids
    the reply is ``{"token_ids": [...]}``.

    ``tokens`` is the length of a reply (the end token included) unless the request's max_tokens is smaller;
    ``token_s`` the time per streamed token; ``weight_version`` is put into replies when it is not None;
    ``gives_tokens`` False makes it a plain OpenAI endpoint, whose routes are below ``api_path``.
    """

    def __init__(
        self,
        *,
        tokens: int = 8,
        token_s: float = 0.0,
        weight_version: int | None = None,
        gives_tokens: bool = True,
        seed: int = 0,
        model: str = "scripted",
        api_path: str = "/v1",
        decide: Callable[[Seen], dict[str, Any]] | None = None,
    ) -> None:
        self.tokens = tokens
        self.token_s = token_s
        self.weight_version = weight_version
        self.gives_tokens = gives_tokens
        self.model = model
        self.api_path = api_path
        self.decide = decide
        self.first_id, self.last_id = 10, 900  # range of the ids it samples
        self.url = ""
        self.requests: list[Seen] = []
        self.replies: deque[dict[str, Any]] = deque()
        self.faults: deque[Fault] = deque()
        self.aborted: list[str] = []  # rids, in SGLang's manner
        self.stream_step = 1  # tokens per event of a stream, where the event carries token ids
        self.active = 0
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024, limit=2**26)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stop at once: running calls lose their connection, as when the process dies."""
        if self._server is not None:
            await stop_listening(self._server)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def calls(self) -> list[Seen]:
        """The model calls among the requests."""
        return [r for r in self.requests if r.method == "POST" and r.body and r.path != "/abort_request"]

    # -- HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            early: bytes | None = b""
            while early is not None:
                early = await self._one(reader, writer, early)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, early: bytes) -> bytes | None:
        """Serve one request. Returns what was read of the next one, None when the connection is to end."""
        head = early + await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        seen = Seen(method, path, headers, json.loads(body) if body else {})
        self.requests.append(seen)
        fault = self.faults.popleft() if self.faults and method == "POST" and path != "/abort_request" else Fault()
        answer = asyncio.ensure_future(self._answer(seen, fault, writer))
        watch = asyncio.ensure_future(reader.read(1))
        self.active += 1
        try:
            # A client that goes away while it is answered is what engines take for a cancellation.
            await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                seen.cancelled = True
                return None
            if not answer.result():
                return None
            seen.finished = True
            return watch.result() if watch.done() else b""
        finally:
            self.active -= 1
            for task in (answer, watch):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await task

    async def _answer(self, seen: Seen, fault: Fault, writer: asyncio.StreamWriter) -> bool:
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.gate is not None:
            await fault.gate.wait()
        if fault.drop_after == 0:
            return False
        if fault.status != 200 or fault.body is not None:
            body = fault.body if fault.body is not None else error_body(fault.status)
            return await self._whole(writer, fault.status, body, fault)
        path = seen.path.removeprefix(f"{self.api_path}/")
        if seen.method == "GET":
            listed = {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "scripted"}]}
            return await self._whole(writer, 200, json.dumps(listed).encode() if path == "models" else b"{}", fault)
        if path == "/abort_request":
            self.aborted.append(seen.body["rid"])
            return await self._whole(writer, 200, b"", fault)
        if path == "/inference/v1/generate":
            sampled = self._sampled(seen, "token_ids", "max_tokens")
            choices = [vllm_choice(i, ids, finish) for i, (ids, finish, _) in enumerate(sampled)]
            reply: dict[str, Any] = {"request_id": "generate-1", "choices": choices, "prompt_logprobs": None}
            if self.weight_version is not None:
                reply["weight_version"] = self.weight_version
            return await self._json(writer, reply, fault)
        if path == "/tokenize" and self.gives_tokens:
            seen.prompt_ids = encode_messages(seen.body["messages"])
            counted = {"count": len(seen.prompt_ids), "max_model_len": VOCABULARY, "tokens": seen.prompt_ids}
            return await self._whole(writer, 200, json.dumps(counted).encode(), fault)
        if path not in ("chat/completions", "completions"):
            return await self._at_other_paths(seen, writer, fault)
        chat = path == "chat/completions"
        try:
            choices = self._sample(seen, chat)
        except Exception as e:
            if self.decide is None:
                raise
            return await self._whole(writer, 400, error_body(400, f"{type(e).__name__}: {e}"), fault)
        if not seen.body.get("stream"):
            return await self._json(writer, whole(self._answered(seen, choices)), fault)
        return await self._events(writer, chunks(self._answered(seen, choices), chat), fault)

    async def _at_other_paths(self, seen: Seen, writer: asyncio.StreamWriter, fault: Fault) -> bool:
        return await self._whole(writer, 404, error_body(404), fault)

    async def _whole(self, writer: asyncio.StreamWriter, status: int, body: bytes, fault: Fault) -> bool:
        extra = "".join(f"{k}: {v}\r\n" for k, v in fault.headers)
        kind = (
            "" if any(k.lower() == "content-type" for k, _ in fault.headers) else "content-type: application/json\r\n"
        )
        writer.write(f"HTTP/1.1 {status} X\r\n{kind}{extra}content-length: {len(body)}\r\n\r\n".encode())
        if fault.drop_after is not None:
            writer.write(body[: fault.drop_after])
            await writer.drain()
            await asyncio.sleep(0.01)
            return False
        writer.write(body)
        await writer.drain()
        return True

    async def _json(self, writer: asyncio.StreamWriter, reply: dict[str, Any], fault: Fault) -> bool:
        reply = (fault.edit(reply) if fault.edit is not None else None) or reply
        return await self._whole(writer, 200, json.dumps(reply, separators=(",", ":")).encode(), fault)

    # -- replies

    def _sample(self, seen: Seen, chat: bool) -> list[dict[str, Any]]:
        body = seen.body
        if chat:
            seen.prompt_ids = encode_messages(body["messages"])
        else:
            prompt = body["prompt"]
            seen.prompt_ids = list(prompt) if isinstance(prompt, list) else encode_text(prompt)
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or self.tokens
        choices = []
        for index in range(body.get("n") or 1):
            scripted = self.replies.popleft() if self.replies else self.decide(seen) if self.decide else {}
            if "content" in scripted or "tool_calls" in scripted:
                ids = [*encode_text(scripted.get("content") or ""), END]
                for call in scripted.get("tool_calls") or []:
                    ids[-1:-1] = encode_text(call["function"]["name"] + " " + call["function"]["arguments"])
                finish = scripted.get("finish_reason") or ("tool_calls" if scripted.get("tool_calls") else "stop")
                if finish == "length" and len(ids) > 1:
                    ids.pop()  # it did not come to its end
            elif "token_ids" in scripted:
                ids, finish = list(scripted["token_ids"]), scripted.get("finish_reason", "stop")
            else:
                ids, finish, _ = self._ids(asked, body.get("stop_token_ids") or [END])
            seen.completion_ids.append(ids)
            choices.append(
                {
                    "index": index,
                    "ids": ids,
                    "logprobs": [logprob_of(i) for i in ids],
                    "content": scripted.get("content", None if scripted.get("tool_calls") else decode_ids(ids)),
                    "reasoning_content": scripted.get("reasoning_content"),
                    "tool_calls": scripted.get("tool_calls"),
                    "finish": finish,
                    "stop": scripted.get("stop"),
                }
            )
        return choices

    def _sampled(self, seen: Seen, prompt: str, limit: str) -> list[tuple[list[int], str, str | None]]:
        """Sample the reply of a route that takes token ids. ``prompt`` and ``limit`` are the route's names for them."""
        sampling = seen.body["sampling_params"]
        seen.prompt_ids = list(seen.body[prompt])
        sampled = []
        for _ in range(sampling.get("n") or 1):
            if not self.replies and self.decide is not None:
                self.replies.append(self.decide(seen))
            sampled.append(self._ids(sampling.get(limit) or self.tokens, sampling.get("stop_token_ids") or [END]))
            seen.completion_ids.append(sampled[-1][0])
        return sampled

    def _ids(self, limit: int, stops: Sequence[int]) -> tuple[list[int], str, str | None]:
        """Ids, finish reason and the stop string that ended them: scripted, or made up."""
        scripted = self.replies.popleft() if self.replies else {}
        if "token_ids" in scripted:
            return list(scripted["token_ids"]), scripted.get("finish_reason", "stop"), scripted.get("stop")
        ids = [self._random.randrange(self.first_id, self.last_id) for _ in range(min(limit, self.tokens))]
        if self.tokens <= limit:
            ids[-1] = stops[0]
            return ids, "stop", None
        return ids, "length", None

    def _answered(self, seen: Seen, choices: list[dict[str, Any]]) -> SampledReply:
        return SampledReply(
            seen=seen,
            choices=choices,
            number=len(self.requests),
            model=self.model,
            weight_version=self.weight_version,
            gives_tokens=self.gives_tokens,
            step=self.stream_step,
        )

    async def _events(self, writer: asyncio.StreamWriter, events: Iterable[dict[str, Any]], fault: Fault) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        sent = 0
        for event in events:
            if fault.edit is not None:
                event = fault.edit(event) or event
            data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
            sent += len(data)
            if fault.drop_after is not None and sent > fault.drop_after:
                await writer.drain()
                await asyncio.sleep(0.01)
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
            if self.token_s:
                await asyncio.sleep(self.token_s)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return True
