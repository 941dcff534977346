"""Checks of an OpenAI request that is passed on to a chat endpoint without being read whole.

An unknown field is left out: an engine might do something with it that the record does not show. The gateway refuses
fields that would make the record wrong (beams instead of samples) and fields that reach beyond the
call (where the engine gets its cache from, which request an id belongs to). `chat.REFUSED` has both.

Source: request models of OpenAI's API and vLLM (entrypoints/openai), 2026-11. SGLang's endpoints get no such requests.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from ..errors import NOT_JSON, RequestError, unsupported
from .chat import MAX_N, REFUSED
from .fields import ENGINE_PARAMETERS, check_template_kwargs, refuse

Fields = dict[str, Any]  # the members of a request; the messages, and in a relayed request the tools, are JSON text
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value = msgspec.json.Decoder().decode

_OPENAI = """
    model messages frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens metadata n
    parallel_tool_calls presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort
    response_format safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools top_p
    user
"""
_VLLM = """
    add_special_tokens cache_salt chat_template_kwargs documents
    include_reasoning logprob_token_ids logits_processors media_io_kwargs min_p mm_processor_kwargs
    repetition_detection repetition_penalty return_prompt_text return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start session_id stream_interval structured_outputs
    top_k truncation_side vllm_xargs watermarking
"""
# What shapes a prompt or an answer at SGLang; vLLM passes over it without a word.
_SGLANG = frozenset(
    ["custom_params", "ebnf", "input_ids", "json_schema", "no_stop_trim", "regex", "stop_regex", "task"]
)
KNOWN = ENGINE_PARAMETERS | _SGLANG | frozenset(f"{_OPENAI} {_VLLM}".split())

_UNREAD = ("messages", "tools")
_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
_FORMS = frozenset({"response_format", "structured_outputs", "ebnf", "json_schema", "regex"})
_FORM_TYPES = ("json_object", "json_schema", "structural_tag")
_ABOUT_TOOLS = ("tool_choice", "parallel_tool_calls")  # they mean nothing in a call without tools
# Fields with one subject: any of them in a session's parameters replaces all of them in the agent's request.
_SUBJECTS = (
    frozenset({"max_tokens", "max_completion_tokens"}),
    frozenset({"reasoning_effort", "chat_template_kwargs"}),
    frozenset({"logprobs", "top_logprobs"}),
    _FORMS,
)


def read(body: bytes) -> Fields:
    """Read the members of a relayed request. Raises: one of NOT_JSON."""
    if not body.isascii():
        body.decode()  # members that are not read may be no UTF-8
    return {name: raw if name in _UNREAD else _value(raw) for name, raw in _members(body).items()}


def check(fields: Fields, *, more: Collection[str] | None) -> None:
    """Check a request, and remove unknown fields from ``fields``.

    Args: ``more`` are further fields that may pass. None lets all fields pass.

    Raises: RequestError that names the field.
    """
    if more is not None:
        for name in fields.keys() - KNOWN - set(more):
            value, refusal = fields.pop(name), REFUSED.get(name)
            if refusal is not None:
                refuse(name, value, refusal)
        given = fields.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
        if given:
            check_template_kwargs(given)
    if not isinstance(fields.get("stream"), bool | None):
        raise RequestError("stream must be true or false", param="stream")
    n = fields.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_N):
        raise RequestError(f"n must be a whole number between 1 and {MAX_N}", param="n")


def forms(fields: Fields) -> list[str]:
    """Return the fields that hold the answer to a form, without tool choices."""
    wanted = fields.get("response_format")
    names = [name for name in fields if name in _FORMS and name != "response_format" and fields[name] not in _NOTHING]
    return names + ["response_format"] * (isinstance(wanted, dict) and wanted.get("type") in _FORM_TYPES)


def asked_forms(fields: Fields) -> list[str]:
    """Return the fields that ask for a form: a forced tool, and schemas, also under the engines' own names.

    The logprobs of such a reply are those of the tokens that the form allows.
    """
    return ["tool_choice"] * _forces(fields.get("tool_choice")) + forms(fields)


def _forces(choice: Any) -> bool:
    return choice == "required" or isinstance(choice, dict)


def overlay(fields: Fields, own: Fields) -> None:
    """Put a session's parameters in place of the agent's. A tool choice applies only to calls that offer the tool."""
    given = {name: value for name, value in own.items() if name not in _ABOUT_TOOLS}
    for subject in _SUBJECTS:
        if not subject.isdisjoint(given):
            for name in subject & fields.keys():
                del fields[name]
    fields |= given
    for name in _ABOUT_TOOLS:
        if name in own and offers(fields, own[name]):
            fields[name] = own[name]
    choice = fields.get("tool_choice")
    if choice is None:
        return
    if ("tools" in own and not offers(fields, choice)) or (_forces(choice) and forms(own)):
        del fields["tool_choice"]
    elif _forces(choice) and choice is own.get("tool_choice"):
        for name in _FORMS & fields.keys():
            del fields[name]


def foreign(fields: Fields, more: Collection[str]) -> str | None:
    """Return the first field that asks for something and that vLLM does not take, except those in ``more``."""
    if _SGLANG.isdisjoint(fields):
        return None
    found = (name for name in fields if name in _SGLANG and name not in more)
    return next((name for name in found if fields[name] not in _NOTHING), None)


def check_session(params: Collection[str], more: Collection[str]) -> None:
    """Check the names of a session's sampling parameters for vLLM. Raises: RequestError."""
    for name in params:
        if name not in more and (name in _SGLANG or name not in KNOWN):
            why = "vLLM has no such parameter; leave it out, or start the gateway with --set allow_fields=" + name
            raise unsupported(f"sampling_params.{name}", why)


def offers(fields: Fields, choice: Any) -> bool:
    """Return True if a call offers tools, and the chosen tool's name."""
    given: Any = fields.get("tools")
    try:
        tools = msgspec.json.decode(given) if isinstance(given, msgspec.Raw) else given
        if tools in _NOTHING or not isinstance(choice, dict):
            return tools not in _NOTHING
        named = choice["function"]["name"]
        return any((tool.get("function") or {}).get("name") == named for tool in tools)
    except (*NOT_JSON, AttributeError, KeyError, TypeError):
        return True  # the engine names the fault
