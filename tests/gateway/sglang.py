"""A scripted engine that speaks SGLang's ``/generate`` as well."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from agentcore_rl_toolkit.gateway.testing import Fault, ScriptedEngine, Seen, logprob_of


def sglang_answer(
    index: int,
    ids: list[int],
    finish: str | None,
    *,
    rid: str,
    prompt_tokens: int,
    weight_version: int | None,
    stop: str | None = None,
) -> dict[str, Any]:
    """``stop`` is the stop string that ended it; else the last token is what matched."""
    reason: dict[str, Any] | None = None
    if finish is not None:
        reason = {"type": finish, "matched": (stop or ids[-1]) if finish == "stop" else None}
    meta = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids),
        "weight_version": "default" if weight_version is None else str(weight_version),
        "output_token_logprobs": [[logprob_of(i), i, None] for i in ids],
    }
    return {"index": index, "text": "", "output_ids": ids, "meta_info": meta}


class TokenEngine(ScriptedEngine):
    async def _at_other_paths(self, seen: Seen, http: web.BaseRequest, fault: Fault) -> web.StreamResponse:
        if seen.path != "/generate":
            return await super()._at_other_paths(seen, http, fault)
        sampled = self._sampled(seen, seen.body["input_ids"], seen.body["sampling_params"])
        rid = seen.body.get("rid") or f"rid-{len(self.requests)}"

        def answer(index: int, count: int | None = None) -> dict[str, Any]:
            ids, finish, stop = sampled[index].ids, sampled[index].finish, sampled[index].stop
            last = count is None or count >= len(ids)
            return sglang_answer(
                index,
                ids[:count],
                finish if last else None,
                rid=rid,
                prompt_tokens=len(seen.prompt_ids),
                weight_version=self.weight_version,
                stop=stop,
            )

        if not seen.body.get("stream"):
            answers = [answer(i) for i in range(len(sampled))]
            response = answers if len(answers) > 1 else answers[0]
            if fault.edit is not None:
                response = fault.edit(answers[0]) or response
            return await self._whole(http, 200, json.dumps(response).encode(), fault)
        step = self.stream_step
        longest = max(len(each.ids) for each in sampled)
        events = (
            answer(index, count)
            for count in range(step, longest + step, step)
            for index, each in enumerate(sampled)
            if count < len(each.ids) + step
        )
        return await self._events(http, events, fault)
