"""Requests of the policy server, checked field by field. Wrong ones become OpenAI's error object, which names the field.

Field names and meanings are OpenAI's and, beyond them, vLLM's. What the policy cannot honour is refused, never ignored; fields
that are unknown altogether are ignored, as OpenAI-compatible servers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import PolicyError
from ..sampling import SamplingParams
from ..tokens import ChatTokenizer
from .fields import RequestError, check_length, flag, integer, logit_bias, number, text, token_ids

Kind = Literal["chat", "completion", "generate"]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_N = 64
_MAX_TOP_LOGPROBS = 20
_DEFAULT_MAX_TOKENS = 16  # of completions and of vLLM's generate; a chat may use what the context leaves

# Values under which a field asks for nothing that would have to be done.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_tokens": (None, 0),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "functions": (None, []),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "use_beam_search": (None, False),
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked request. ``prompt_ids`` and ``params`` are what the engine needs, the rest shapes the reply."""

    kind: Kind
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    token_ids_as_text: bool = False
    parse_tools: bool = False
    one_call_only: bool = False
    request_id: str | None = None

    def params_of(self, k: int) -> SamplingParams:
        """Settings of the k-th of ``n`` completions of a prompt: with a seed, each gets one of its own."""
        seed = self.params.seed
        return self.params if seed is None or k == 0 else replace(self.params, seed=seed + k)


def read_chat(body: Mapping[str, Any], tokenizer: ChatTokenizer, *, context: int) -> Call:
    """Check a body of ``/v1/chat/completions`` and render its messages. Raises: RequestError."""
    choice = body.get("tool_choice")
    prompt = encode_messages(body, tokenizer)
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"this policy can be offered tools, not made to call one: tool_choice must be 'auto' or 'none', got {choice!r}",
            param="tool_choice",
            code="unsupported_value",
        )
    wants_logprobs = flag(body, "logprobs")
    top = integer(body, "top_logprobs", low=0, high=_MAX_TOP_LOGPROBS) or 0
    if top and not wants_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    limit = integer(body, "max_completion_tokens", low=1)
    if limit is None:
        limit = integer(body, "max_tokens", low=1)
    stream, include_usage = _stream(body)
    return Call(
        kind="chat",
        prompts=(tuple(prompt),),
        params=_sampling(
            body,
            [prompt],
            tokenizer,
            context=context,
            limit=context if limit is None else limit,
            top=top,
            param="messages",
        ),
        n=integer(body, "n", low=1, high=_MAX_N) or 1,
        stream=stream,
        include_usage=include_usage,
        logprobs=wants_logprobs,
        return_token_ids=flag(body, "return_token_ids"),
        token_ids_as_text=flag(body, "return_tokens_as_token_ids"),
        parse_tools=bool(body.get("tools")) and choice != "none",
        one_call_only=not flag(body, "parallel_tool_calls", default=True),
        request_id=text(body, "request_id"),
    )


def read_completion(body: Mapping[str, Any], tokenizer: ChatTokenizer, *, context: int) -> Call:
    """Check a body of ``/v1/completions``: a text, a list of token ids, or a list of either. Raises: RequestError."""
    _refuse_unsupported(body)
    prompts = _prompts(body, tokenizer)
    top = integer(body, "logprobs", low=0, high=_MAX_TOP_LOGPROBS)
    limit = integer(body, "max_tokens", low=1)
    stream, include_usage = _stream(body)
    return Call(
        kind="completion",
        prompts=tuple(map(tuple, prompts)),
        params=_sampling(
            body,
            prompts,
            tokenizer,
            context=context,
            limit=limit or _DEFAULT_MAX_TOKENS,
            top=top or 0,
            param="prompt",
        ),
        n=integer(body, "n", low=1, high=_MAX_N) or 1,
        stream=stream,
        include_usage=include_usage,
        logprobs=top is not None,
        return_token_ids=flag(body, "return_token_ids"),
        token_ids_as_text=flag(body, "return_tokens_as_token_ids"),
        request_id=text(body, "request_id"),
    )


def read_generate(body: Mapping[str, Any], tokenizer: ChatTokenizer, *, context: int) -> Call:
    """Check a body of ``/inference/v1/generate`` (vLLM): ``token_ids`` in, token ids out. Raises: RequestError."""
    ids = token_ids(body.get("token_ids"), "token_ids", tokenizer)
    settings = body.get("sampling_params", {})
    if not isinstance(settings, Mapping):
        raise RequestError("sampling_params must be an object", param="sampling_params")
    try:
        _refuse_unsupported(settings)
        top = integer(settings, "logprobs", low=0, high=_MAX_TOP_LOGPROBS)
        limit = integer(settings, "max_tokens", low=1)
        n = integer(settings, "n", low=1, high=_MAX_N) or 1
        params = _sampling(
            settings,
            [ids],
            tokenizer,
            context=context,
            limit=limit or _DEFAULT_MAX_TOKENS,
            top=top or 0,
            param="token_ids",
        )
    except RequestError as e:
        if e.param not in (None, "token_ids"):
            e.param = f"sampling_params.{e.param}"
        raise
    stream, include_usage = _stream(body)
    return Call(
        kind="generate",
        prompts=(tuple(ids),),
        params=params,
        n=n,
        stream=stream,
        include_usage=include_usage,
        logprobs=top is not None,
        return_token_ids=True,
        token_ids_as_text=True,
        request_id=text(body, "request_id"),
    )


def encode_messages(body: Mapping[str, Any], tokenizer: ChatTokenizer) -> list[int]:
    """The token ids of a body's messages and tools, as a chat's prompt has them. Raises: RequestError."""
    _refuse_unsupported(body)
    messages, tools = _messages(body), _tools(body)
    begin = flag(body, "add_generation_prompt", default=True)
    try:
        return tokenizer.encode_chat(messages, tools=tools, add_generation_prompt=begin)
    except PolicyError as e:
        raise RequestError(e.message, param="messages") from e


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name in body.keys() & _NEUTRAL.keys():
        if body[name] not in _NEUTRAL[name]:
            raise RequestError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")


def _sampling(
    body: Mapping[str, Any],
    prompts: list[list[int]],
    tokenizer: ChatTokenizer,
    *,
    context: int,
    limit: int,
    top: int,
    param: str,
) -> SamplingParams:
    # a prompt that fills the context leaves no room for a token
    check_length(max(map(len, prompts)), context - 1, context=context, param=param)
    top_k = integer(body, "top_k", low=-1)
    stop = body.get("stop")
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (tuple, list)) or len(stops) > 16 or any(not isinstance(s, str) or not s for s in stops):
        raise RequestError("stop must be a non-empty string or a list of at most 16 of them", param="stop")
    stop_ids = body.get("stop_token_ids") or ()
    if not isinstance(stop_ids, (tuple, list)) or any(type(s) is not int for s in stop_ids):
        raise RequestError("stop_token_ids must be a list of integers", param="stop_token_ids")
    temperature = number(body, "temperature", low=0.0)
    top_p = number(body, "top_p", low=0.0, high=1.0)
    if top_p == 0.0:
        raise RequestError("top_p must be above 0 and at most 1, got 0", param="top_p", code="invalid_value")
    repetition = number(body, "repetition_penalty", low=0.0)
    if repetition == 0.0:
        raise RequestError(
            "repetition_penalty must be above 0, got 0", param="repetition_penalty", code="invalid_value"
        )
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(0, top_k or 0),
        min_p=number(body, "min_p", low=0.0, high=1.0) or 0.0,
        presence_penalty=number(body, "presence_penalty", low=-2.0, high=2.0) or 0.0,
        frequency_penalty=number(body, "frequency_penalty", low=-2.0, high=2.0) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=logit_bias(body, tokenizer),
        max_tokens=limit,  # the engine ends a completion with "length" where the context does
        stop=tuple(stops),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=flag(body, "ignore_eos"),
        include_stop=flag(body, "include_stop_str_in_output"),
        seed=integer(body, "seed"),
        top_logprobs=top,
    )


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list", param="messages")
    for k, message in enumerate(messages):
        here = f"messages[{k}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{here} must be an object", param=here)
        role = message.get("role")
        if role not in _ROLES:
            raise RequestError(f"{here}.role must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{here}.role")
        _check_content(message.get("content"), f"{here}.content", needed=role in ("user", "tool"))
        calls = message.get("tool_calls")
        if calls is not None and (role != "assistant" or not isinstance(calls, list)):
            raise RequestError(f"{here}.tool_calls must be a list in an assistant message", param=f"{here}.tool_calls")
        for i, call in enumerate(calls or []):
            function = call.get("function") if isinstance(call, Mapping) else None
            if (
                not isinstance(function, Mapping)
                or not isinstance(function.get("name"), str)
                or not isinstance(function.get("arguments"), (str, Mapping))
            ):
                raise RequestError(
                    f"{here}.tool_calls[{i}].function needs a name and arguments",
                    param=f"{here}.tool_calls[{i}].function",
                )
    return messages


def _check_content(content: Any, here: str, *, needed: bool) -> None:
    if content is None and not needed:
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(f"{here} must be a string or a list of text parts", param=here)
    for k, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{here}[{k}] must be a part of type 'text': this policy reads text", param=f"{here}[{k}]"
            )


def _tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError("tools must be a list", param="tools")
    for k, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("parameters", {}), Mapping)
        ):
            raise RequestError(
                f"tools[{k}] must be of type 'function', with a name and, as an object, its parameters",
                param=f"tools[{k}]",
            )
    return tools


def _prompts(body: Mapping[str, Any], tokenizer: ChatTokenizer) -> list[list[int]]:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    many: list[Any] = prompt if isinstance(prompt, list) and several else [prompt]
    if len(many) > _MAX_N:
        raise RequestError(f"at most {_MAX_N} prompts in one request", param="prompt")
    read: list[list[int]] = []
    for one in many:
        ids = tokenizer.encode(one) if isinstance(one, str) else token_ids(one, "prompt", tokenizer)
        if not ids:
            raise RequestError("prompt must not be empty", param="prompt")
        read.append(ids)
    return read


def _stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    stream = flag(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, Mapping) or not stream:
        raise RequestError("stream_options must be an object, and needs stream to be true", param="stream_options")
    return stream, flag(options, "include_usage")
