"""Answers of the endpoints that take and give token ids: vLLM's ``/inference/v1/generate``, SGLang's ``/generate``."""

from __future__ import annotations

from typing import Any

from .tokens import logprob_of


def vllm_choice(index: int, ids: list[int], finish: str) -> dict[str, Any]:
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
