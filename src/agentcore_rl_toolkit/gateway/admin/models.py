"""What agents ask about models besides calling them: which there are, and how many tokens a prompt has."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...errors import AgentCoreRLError
from ..dialects.anthropic import encode_count, parse_request
from ..engines.errors import upstream_error
from ..errors import NOT_JSON, RequestError
from ..http.connection import AgentConnection
from ..http.messages import Request, reply
from ..http.structure import check_structure
from ..sessions.registry import Session
from ..upstreams.requests import get, post
from .answers import Answers
from .parts import Parts

log = logging.getLogger(__name__)

_to_json = msgspec.json.Encoder().encode


class ModelRoutes:
    """`/models` and `/messages/count_tokens` of a session."""

    def __init__(self, parts: Parts, answers: Answers) -> None:
        self._parts = parts
        self._answers = answers

    async def models(self, conn: AgentConnection, request: Request, session: Session, wanted: str | None) -> None:
        """`GET /sessions/{id}/v1/models`, or one of them: what this session may ask for, or what its server lists.

        Members of OpenAI's and of Anthropic's shape stand side by side.
        """
        dialect = "anthropic" if b"anthropic-version" in request.headers else "chat"
        try:
            settings = session.settings
            names = settings.allowed_models or ([settings.model_id] if settings.model_id else [])
            listed = [{"id": n, "created": int(session.created_s), "owned_by": "gateway"} for n in names]
            listed = [_described(model) for model in listed or await self._served()]
            if wanted is None:
                whole = {"object": "list", "data": listed, "has_more": False}
                whole |= {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
                self._answers.answer(conn, request, 200, whole)
                return
            found = next((model for model in listed if model["id"] == wanted), None)
            if found is None:
                raise RequestError(f"there is no model {wanted[:100]!r} here", kind="model_not_found", param="model")
            self._answers.answer(conn, request, 200, found)
        except RequestError as e:
            self._answers.refuse(conn, request, e, dialect=dialect)

    async def _served(self) -> list[dict[str, Any]]:
        """What the servers have. Raises: RequestError."""
        if self._parts.tinker is not None:
            return [{"id": name, "owned_by": "tinker"} for name in self._parts.tinker.models()]
        worker = self._parts.router.pick(None)
        if worker is None:
            raise RequestError("the gateway has no inference server", kind="overloaded")
        try:
            status, body = await get(worker, b"/v1/models", timeout_s=10.0)
        except (OSError, TimeoutError) as e:
            log.warning("%s did not list its models: %s", worker.config.url, e)
            raise RequestError("the inference server did not list its models", kind="upstream") from e
        if status != 200:
            raise upstream_error(status, body)
        try:
            return [model for model in msgspec.json.decode(body)["data"] if isinstance(model["id"], str)]
        except (*NOT_JSON, KeyError, TypeError) as e:
            raise RequestError(f"the inference server's list of models cannot be read: {e}", kind="upstream") from e

    async def count_tokens(self, conn: AgentConnection, request: Request, session: Session) -> None:
        """Anthropic's count_tokens: the prompt as the engine would see it, counted and not sampled."""
        try:
            check_structure(request.body)
            asked = parse_request(request.body, counting=True)
            mode = self._parts.token_mode
            if mode is not None:
                count = await asyncio.get_running_loop().run_in_executor(
                    mode.executor,
                    mode.renderer.count,
                    asked.messages,
                    asked.tools or None,
                    asked.template_options() or None,
                )
            else:
                said = asked.to_chat_body()
                if options := asked.template_options():
                    said["chat_template_kwargs"] = options
                count = await self._engine_count(said, session)
        except RequestError as e:
            self._answers.refuse(conn, request, e, dialect="anthropic")
            return
        except AgentCoreRLError as e:
            error = RequestError(f"the prompt cannot be rendered: {e}")
            self._answers.refuse(conn, request, error, dialect="anthropic")
            return
        conn.task = None
        conn.write(reply(200, encode_count(count), keep_alive=request.keep_alive))
        conn.done(keep_alive=request.keep_alive)

    async def _engine_count(self, body: dict[str, Any], session: Session) -> int:
        worker = self._parts.router.pick(session.worker)
        if worker is None:
            raise RequestError("the gateway has no inference server", kind="overloaded")
        if session.settings.model_id is not None:
            body["model"] = session.settings.model_id
        asked = _to_json({k: body[k] for k in ("model", "messages", "tools", "chat_template_kwargs") if k in body})
        try:
            status, told = await post(worker, b"/tokenize", asked, timeout_s=30.0)
        except (OSError, TimeoutError) as e:
            log.warning("%s did not count tokens: %s", worker.config.url, e)
            raise RequestError("the inference server did not count", kind="upstream") from e
        if status != 200:
            raise RequestError("this inference server cannot count tokens (no /tokenize)", kind="unsupported")
        try:
            return int(msgspec.json.decode(told)["count"])
        except (*NOT_JSON, KeyError, TypeError, ValueError) as e:
            raise RequestError(f"the inference server's count cannot be read: {e}", kind="upstream") from e


def _described(model: dict[str, Any]) -> dict[str, Any]:
    created = model.get("created")
    at = datetime.fromtimestamp(created if isinstance(created, int) and 0 <= created < 2**32 else 0, UTC)
    more = {"object": "model", "type": "model", "display_name": model["id"], "created_at": at.isoformat()}
    return {**model, **more, "created": int(at.timestamp())}
