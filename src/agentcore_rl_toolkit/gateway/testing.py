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
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

START, END = 1, 2
_ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6, "developer": 3}
_FIRST_WORD = 1000
VOCABULARY = 50_000


def encode_text(text: str) -> list[int]:
    """Toy tokenizer: the word ``w17`` is token 17, any other word a token made from its checksum."""
    return [
        int(word[1:])
        if word[:1] == "w" and word[1:].isdigit()
        else _FIRST_WORD + zlib.crc32(word.encode()) % VOCABULARY
        for word in text.split()
    ]


def decode_ids(ids: Iterable[int]) -> str:
    return " ".join(f"w{i}" for i in ids if i != END)


def encode_messages(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Toy chat template. It ends with the opening of the assistant's reply, so a prompt extends the earlier prompt
    and reply.
    """
    ids: list[int] = []
    for message in messages:
        ids += [START, _ROLES.get(message.get("role", "user"), 7)]
        content = message.get("content") or ""
        if isinstance(content, list):
            content = " ".join(part.get("text", "") for part in content)
        ids += encode_text(content)
        for call in message.get("tool_calls") or []:
            ids += encode_text(call["function"]["name"] + " " + call["function"]["arguments"])
        ids.append(END)
    return [*ids, START, _ROLES["assistant"]]


def logprob_of(token: int) -> float:
    """The logprob this engine gives a token: made up, and exact in 32 bits."""
    return -(token % 97) / 64 - 0.015625


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one call.

    ``status`` answers with an error body; ``drop_after`` cuts the connection after so many body bytes (0: before the
    head); ``body`` replaces the answer's body; ``delay_s`` waits first; ``edit`` changes the reply (or each chunk).
    """

    status: int = 200
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    drop_after: int | None = None
    delay_s: float = 0.0
    edit: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None


@dataclass
class Seen:
    """One request as the engine saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    cancelled: bool = False
    finished: bool = False


class ScriptedEngine:
    """One server on a free loopback port. ``requests`` lists what it was asked, ``replies`` may hold texts to answer
    with.

    ``tokens`` is the length of a reply (the end token included) unless the request's max_tokens is smaller;
    ``token_s`` the time per streamed token; ``weight_version`` is put into replies when it is not None;
    ``gives_tokens`` False makes it a plain OpenAI endpoint.
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
    ) -> None:
        self.tokens = tokens
        self.token_s = token_s
        self.weight_version = weight_version
        self.gives_tokens = gives_tokens
        self.model = model
        self.first_id, self.last_id = 10, 900  # range of the ids it samples
        self.url = ""
        self.requests: list[Seen] = []
        self.replies: deque[dict[str, Any]] = deque()
        self.faults: deque[Fault] = deque()
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
            self._server.close()
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
        return [r for r in self.requests if r.method == "POST"]

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
        fault = self.faults.popleft() if self.faults and method == "POST" else Fault()
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
        if fault.drop_after == 0:
            return False
        if fault.status != 200 or fault.body is not None:
            body = fault.body if fault.body is not None else _error(fault.status)
            return await self._whole(writer, fault.status, body, fault)
        path = seen.path.removeprefix("/v1/")
        if seen.method == "GET":
            listed = {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "scripted"}]}
            return await self._whole(writer, 200, json.dumps(listed).encode() if path == "models" else b"{}", fault)
        if path in ("/inference/v1/generate", "/generate"):
            return await self._generate(seen, writer, fault)
        if path == "/tokenize" and self.gives_tokens:
            seen.prompt_ids = encode_messages(seen.body["messages"])
            counted = {"count": len(seen.prompt_ids), "max_model_len": VOCABULARY, "tokens": seen.prompt_ids}
            return await self._whole(writer, 200, json.dumps(counted).encode(), fault)
        if path not in ("chat/completions", "completions"):
            return await self._whole(writer, 404, _error(404), fault)
        chat = path == "chat/completions"
        choices = self._sample(seen, chat)
        if not seen.body.get("stream"):
            reply = self._reply(seen, chat, choices)
            if fault.edit is not None:
                reply = fault.edit(reply) or reply
            return await self._whole(writer, 200, json.dumps(reply, separators=(",", ":")).encode(), fault)
        return await self._stream(seen, chat, choices, writer, fault)

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
            scripted = self.replies.popleft() if self.replies else {}
            if "content" in scripted or "tool_calls" in scripted:
                ids = [*encode_text(scripted.get("content") or ""), END]
                for call in scripted.get("tool_calls") or []:
                    ids[-1:-1] = encode_text(call["function"]["name"] + " " + call["function"]["arguments"])
                finish = "tool_calls" if scripted.get("tool_calls") else "stop"
            elif "token_ids" in scripted:
                ids, finish = list(scripted["token_ids"]), scripted.get("finish_reason", "stop")
            else:
                ids, finish = self._ids(asked, body.get("stop_token_ids") or [END])
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
                }
            )
        return choices

    # -- token endpoints

    async def _generate(self, seen: Seen, writer: asyncio.StreamWriter, fault: Fault) -> bool:
        """vLLM's ``/inference/v1/generate`` and SGLang's ``/generate``."""
        sglang = seen.path == "/generate"
        sampling = seen.body["sampling_params"]
        seen.prompt_ids = list(seen.body["input_ids" if sglang else "token_ids"])
        limit = sampling.get("max_new_tokens" if sglang else "max_tokens") or self.tokens
        answers = []
        for index in range(sampling.get("n") or 1):
            ids, finish = self._ids(limit, sampling.get("stop_token_ids") or [END])
            seen.completion_ids.append(ids)
            answers.append(self._sglang(index, ids, finish) if sglang else self._vllm(index, ids, finish))
        if not sglang:
            reply: dict[str, Any] = {"request_id": "generate-1", "choices": answers, "prompt_logprobs": None}
            if self.weight_version is not None:
                reply["weight_version"] = self.weight_version
            reply = (fault.edit(reply) if fault.edit is not None else None) or reply
            return await self._whole(writer, 200, json.dumps(reply).encode(), fault)
        if not seen.body.get("stream"):
            whole = answers if len(answers) > 1 else answers[0]
            if fault.edit is not None:
                whole = fault.edit(answers[0]) or whole
            return await self._whole(writer, 200, json.dumps(whole).encode(), fault)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = 0
        for count in range(1, max(len(i) for i in seen.completion_ids) + 1):
            for index, ids in enumerate(seen.completion_ids):
                if count > len(ids):
                    continue
                last = count == len(ids)
                reason: str | None = answers[index]["meta_info"]["finish_reason"]["type"] if last else None
                data = b"data: " + json.dumps(self._sglang(index, ids[:count], reason)).encode() + b"\n\n"
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

    def _ids(self, limit: int, stops: Sequence[int]) -> tuple[list[int], str]:
        scripted = self.replies.popleft() if self.replies else {}
        if "token_ids" in scripted:
            return list(scripted["token_ids"]), scripted.get("finish_reason", "stop")
        ids = [self._random.randrange(self.first_id, self.last_id) for _ in range(min(limit, self.tokens))]
        if self.tokens <= limit:
            ids[-1] = stops[0]
            return ids, "stop"
        return ids, "length"

    def _vllm(self, index: int, ids: list[int], finish: str) -> dict[str, Any]:
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{i}", "logprob": logprob_of(i), "bytes": None, "top_logprobs": []} for i in ids
        ]
        return {
            "index": index,
            "logprobs": {"content": content},
            "finish_reason": finish,
            "token_ids": ids,
            "routed_experts": None,
        }

    def _sglang(self, index: int, ids: list[int], finish: str | None) -> dict[str, Any]:
        meta = {
            "id": f"rid-{len(self.requests)}",
            "finish_reason": None
            if finish is None
            else {"type": finish, "matched": ids[-1] if finish == "stop" else None},
            "prompt_tokens": len(self.requests[-1].prompt_ids),
            "completion_tokens": len(ids),
            "weight_version": "default" if self.weight_version is None else str(self.weight_version),
            "output_token_logprobs": [[logprob_of(i), i, None] for i in ids],
        }
        return {"index": index, "text": "", "output_ids": ids, "meta_info": meta}

    def _logprobs(self, chat: bool, ids: list[int], values: list[float]) -> dict[str, Any]:
        if not chat:
            words = [f"w{i}" for i in ids]
            return {"tokens": words, "token_logprobs": values, "top_logprobs": None, "text_offset": [0] * len(ids)}
        return {
            "content": [
                {"token": f" w{i}", "logprob": v, "bytes": list(f" w{i}".encode()), "top_logprobs": []}
                for i, v in zip(ids, values, strict=True)
            ]
        }

    def _usage(self, seen: Seen, choices: list[dict[str, Any]]) -> dict[str, int]:
        prompt, completion = len(seen.prompt_ids), sum(len(c["ids"]) for c in choices)
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def _top(self, seen: Seen, kind: str) -> dict[str, Any]:
        top: dict[str, Any] = {
            "id": f"cmpl-{len(self.requests)}",
            "object": kind,
            "created": 1_700_000_000,
            "model": seen.body.get("model", self.model),
        }
        if self.weight_version is not None:
            top["weight_version"] = self.weight_version
        return top

    def _reply(self, seen: Seen, chat: bool, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = seen.body
        ids_wanted = body.get("return_token_ids") and self.gives_tokens
        reply = self._top(seen, "chat.completion" if chat else "text_completion")
        reply["choices"] = []
        for c in choices:
            choice: dict[str, Any] = {"index": c["index"], "finish_reason": c["finish"], "stop_reason": None}
            if chat:
                message = {"role": "assistant", "content": c["content"], "tool_calls": c["tool_calls"] or []}
                if c["reasoning_content"]:
                    message["reasoning_content"] = c["reasoning_content"]
                choice["message"] = message
            else:
                choice["text"] = c["content"]
            choice["logprobs"] = self._logprobs(chat, c["ids"], c["logprobs"]) if body.get("logprobs") else None
            if ids_wanted:
                choice["token_ids"] = c["ids"]
                if not chat:
                    choice["prompt_token_ids"] = seen.prompt_ids
            reply["choices"].append(choice)
        reply["usage"] = self._usage(seen, choices)
        if ids_wanted and chat:
            reply["prompt_token_ids"] = seen.prompt_ids
        return reply

    async def _stream(
        self, seen: Seen, chat: bool, choices: list[dict[str, Any]], writer: asyncio.StreamWriter, fault: Fault
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        sent = 0
        for chunk in self._chunks(seen, chat, choices):
            if fault.edit is not None:
                chunk = fault.edit(chunk) or chunk
            data = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
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

    def _chunks(self, seen: Seen, chat: bool, choices: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        body = seen.body
        kind = "chat.completion.chunk" if chat else "text_completion"
        ids_wanted = body.get("return_token_ids") and self.gives_tokens
        if chat:
            for c in choices:
                first = self._top(seen, kind)
                delta = {"role": "assistant", "content": ""}
                first["choices"] = [{"index": c["index"], "delta": delta, "logprobs": None, "finish_reason": None}]
                if ids_wanted:
                    first["prompt_token_ids"] = seen.prompt_ids
                yield first
        longest = max(len(c["ids"]) for c in choices)
        for i in range(longest):
            for c in choices:
                ids = c["ids"]
                if i >= len(ids):
                    continue
                last = i == len(ids) - 1
                delta = self._delta(c, i, last)
                choice: dict[str, Any] = {"index": c["index"], "finish_reason": c["finish"] if last else None}
                choice["delta" if chat else "text"] = delta if chat else delta.get("content", "")
                if body.get("logprobs"):
                    choice["logprobs"] = self._logprobs(chat, [ids[i]], [c["logprobs"][i]])
                if ids_wanted:
                    choice["token_ids"] = [ids[i]]
                    if not chat and i == 0:
                        choice["prompt_token_ids"] = seen.prompt_ids
                chunk = self._top(seen, kind)
                chunk["choices"] = [choice]
                yield chunk
        if (body.get("stream_options") or {}).get("include_usage"):
            final = self._top(seen, kind)
            final["choices"] = []
            final["usage"] = self._usage(seen, choices)
            yield final

    def _delta(self, choice: dict[str, Any], i: int, last: bool) -> dict[str, Any]:
        calls = choice["tool_calls"]
        if calls and i == 0:
            return {
                "tool_calls": [
                    {
                        "index": k,
                        "id": c["id"],
                        "type": "function",
                        "function": {"name": c["function"]["name"], "arguments": ""},
                    }
                    for k, c in enumerate(calls)
                ]
            }
        if calls and last:
            return {
                "tool_calls": [
                    {"index": k, "function": {"arguments": c["function"]["arguments"]}} for k, c in enumerate(calls)
                ]
            }
        if calls:
            return {}
        words = (choice["content"] or "").split()
        word = words[i] if i < len(words) else ""
        delta: dict[str, Any] = {"content": (" " if i and word else "") + word}
        if i == 0 and choice["reasoning_content"]:
            delta["reasoning_content"] = choice["reasoning_content"]
        return delta


def _error(status: int) -> bytes:
    return json.dumps(
        {"error": {"message": f"scripted failure {status}", "type": "X", "param": None, "code": status}}
    ).encode()
