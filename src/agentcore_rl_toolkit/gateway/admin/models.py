"""Agents' requests besides model calls: the list of models, and the number of tokens of a prompt."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...errors import GatewayError
from ...messages.errors import NOT_JSON, RequestError
from ...messages.wire.anthropic import encode_count, parse_request
from ..engines.errors import upstream_error
from ..http.messages import Request
from ..sessions.session import Session
from .state import Parts

log = logging.getLogger(__name__)

_to_json = msgspec.json.Encoder().encode


class ModelRoutes:
    """`/models` and `/messages/count_tokens` of a session."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def models(self, session: Session, wanted: str | None) -> dict[str, Any]:
        """`GET /sessions/{id}/v1/models`, or one of them: what this session may ask for, or what its server lists.

        Members of OpenAI's and of Anthropic's shape stand side by side.
        """
        own = session.settings.model_id
        held = {"id": own, "created": int(session.created_s), "owned_by": "gateway"}
        listed = [_described(model) for model in ([held] if own else await self._served())]
        if wanted is None:
            ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
            return {"object": "list", "data": listed, "has_more": False, **ends}
        found = next((model for model in listed if model["id"] == wanted), None)
        if found is None:
            raise RequestError(f"there is no model {wanted[:100]!r} here", kind="model_not_found", param="model")
        return found

    async def _served(self) -> list[dict[str, Any]]:
        """The servers' models. Raises: RequestError."""
        if self._parts.samplers is not None:
            return [{"id": name, "owned_by": self._parts.config.kind} for name in self._parts.samplers.models()]
        worker = self._parts.router.pick(None)
        if worker is None:
            raise RequestError("the gateway has no inference server", kind="overloaded")
        try:
            status, body = await worker.ask(b"/v1/models", timeout_s=10.0)
        except GatewayError as e:
            log.warning("%s did not list its models: %s", worker.config.url, e)
            raise RequestError("the inference server did not list its models", kind="upstream") from e
        if status != 200:
            raise upstream_error(status, body)
        try:
            return [model for model in msgspec.json.decode(body)["data"] if isinstance(model["id"], str)]
        except (*NOT_JSON, KeyError, TypeError) as e:
            raise RequestError(f"the inference server's list of models cannot be read: {e}", kind="upstream") from e

    async def count_tokens(self, request: Request, session: Session) -> bytes:
        """Anthropic's count_tokens: the prompt as the engine would see it, counted and not sampled."""
        asked = parse_request(request.body, counting=True)
        options, mode = asked.template_options() or None, self._parts.token_mode
        if mode is None:
            body = asked.to_chat_body() | ({} if options is None else {"chat_template_kwargs": options})
            return encode_count(await self._engine_count(body, session))
        loop, count = asyncio.get_running_loop(), mode.renderer.count
        history = mode.histories.pin(session)
        try:
            async with history.order:  # one thread per session, so that no session has them all
                counted = loop.run_in_executor(mode.executor, count, asked.messages, asked.tools or None, options)
                return encode_count(await counted)
        finally:
            mode.histories.unpin(history)

    async def _engine_count(self, body: dict[str, Any], session: Session) -> int:
        worker = self._parts.router.pick(session.worker)
        if worker is None:
            raise RequestError("the gateway has no inference server", kind="overloaded")
        if session.settings.model_id is not None:
            body["model"] = session.settings.model_id
        asked = _to_json({k: body[k] for k in ("model", "messages", "tools", "chat_template_kwargs") if k in body})
        try:
            status, answer = await worker.ask(b"/tokenize", asked, timeout_s=30.0)
        except GatewayError as e:
            log.warning("%s did not count tokens: %s", worker.config.url, e)
            raise RequestError("the inference server did not count", kind="upstream") from e
        if status != 200:
            raise RequestError("this inference server cannot count tokens (no /tokenize)", kind="unsupported")
        try:
            return int(msgspec.json.decode(answer)["count"])
        except (*NOT_JSON, KeyError, TypeError, ValueError) as e:
            raise RequestError(f"the inference server's count cannot be read: {e}", kind="upstream") from e


def _described(model: dict[str, Any]) -> dict[str, Any]:
    created = model.get("created")
    at = datetime.fromtimestamp(created if isinstance(created, int) and 0 <= created < 2**32 else 0, UTC)
    more = {"object": "model", "type": "model", "display_name": model["id"], "created_at": at.isoformat()}
    return {**model, **more, "created": int(at.timestamp())}
