"""Text to tokens and back over HTTP: vLLM's ``/tokenize`` and ``/detokenize``, body to reply.

Source: vLLM's ``TokenizeCompletionRequest``, ``TokenizeChatRequest`` and ``DetokenizeRequest``. As there, more tokens than the
context holds are refused, and no token is left out of a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..tokens import ChatTokenizer
from .fields import RequestError, check_length, flag, token_ids
from .protocol import encode_messages


def tokenize(body: Mapping[str, Any], tokenizer: ChatTokenizer, *, context: int) -> dict[str, Any]:
    """The tokens of ``prompt``, a text, or of ``messages`` with ``tools``, as a completion or a chat would have them.

    ``token_strs`` are the names in the vocabulary, when asked for. Raises: RequestError.
    """
    flag(body, "add_special_tokens")  # this tokenizer has none to add: with and without it the tokens are the same
    param = "messages" if "messages" in body else "prompt"
    if param == "messages":
        ids = encode_messages(body, tokenizer)
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise RequestError("give a text as prompt, or messages", param="prompt")
        ids = tokenizer.encode(prompt)
    check_length(len(ids), context, context=context, param=param)
    names = [tokenizer.token_name(i) for i in ids] if flag(body, "return_token_strs") else None
    return {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": names}


def detokenize(body: Mapping[str, Any], tokenizer: ChatTokenizer, *, context: int) -> dict[str, Any]:
    """The text of ``tokens``, marks of messages included. Raises: RequestError."""
    tokens = body.get("tokens")
    ids = [] if tokens == [] else token_ids(tokens, "tokens", tokenizer)
    check_length(len(ids), context, context=context, param="tokens")
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False)}
