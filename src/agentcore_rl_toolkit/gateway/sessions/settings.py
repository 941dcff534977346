"""The settings that a session's calls must keep, checked when the session is opened: a later error would fail the agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...contract import check_train
from ...errors import ConfigError
from ...messages.dialects.chat import check_response_format, forced_tools
from ...messages.dialects.fields import Fields
from ...messages.dialects.passthrough import MAX_N
from ...messages.errors import RequestError

# Of a request, but no sampling parameters: field -> whose it is.
_NOT_SAMPLING = {
    **dict.fromkeys(("messages", "prompt", "input", "system"), "the conversation is the agent's"),
    **dict.fromkeys(("stream", "stream_options"), "how a reply is written is the agent's choice"),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "echo"), "the gateway asks for what it records"),
    **dict.fromkeys(("best_of", "use_beam_search"), "only samples of the policy can be trained on"),
    "model": "use model_id",
}


class SessionSettings(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """The settings that a session's calls must keep.

    ``sampling_params`` win over the agent's; ``max_tokens`` is an upper bound on what it asks for. ``train`` is the trainer's
    rule of which conversations train (`trajectory.selection`); None leaves it to agent and client.
    """

    sampling_params: dict[str, Any] = {}
    model_id: str | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    train: str | None = None
    metadata: dict[str, Any] = {}

    def check(self) -> None:
        """Raises: RequestError that names the field."""
        check_sampling(self.sampling_params)
        for name, value, least in (("max_turns", self.max_turns, 0), ("max_tokens", self.max_tokens, 1)):
            if value is not None and value < least:
                raise RequestError(f"{name} must be at least {least}, got {value}", param=name)
        if self.train is not None:
            try:
                check_train(self.train)
            except ConfigError as e:
                raise RequestError(str(e), param="train") from e
        if self.model_id == "":
            raise RequestError("model_id must name a model, or be left out", param="model_id")


def check_sampling(params: Mapping[str, Any]) -> None:
    """Look at the parameters that are understood here. Raises: RequestError."""
    fields = Fields(dict(params), "sampling_params")
    for name, why in _NOT_SAMPLING.items():
        if name in params:
            raise RequestError(f"{fields.name(name)} is no sampling parameter: {why}", param=fields.name(name))
    if params.get("max_tokens") is not None and params.get("max_completion_tokens") is not None:
        why = "sampling_params.max_completion_tokens is max_tokens under another name: give one of them"
        raise RequestError(why, param="sampling_params.max_completion_tokens")
    fields.sampling(("max_tokens", "max_completion_tokens"))
    fields.integer("n", 1, MAX_N)
    fields.either("logprobs", bool, int)
    if fields.integer("top_logprobs", 0, 20) and not params.get("logprobs"):
        why = "sampling_params.top_logprobs needs sampling_params.logprobs to be true"
        raise RequestError(why, param="sampling_params.top_logprobs")
    fields.take("reasoning_effort", str)
    fields.template_kwargs()
    try:
        check_response_format(fields.take("response_format", dict), "response_format")
        forced_tools(params)
    except RequestError as e:
        raise RequestError(f"in sampling_params: {e}", kind=e.kind, param=f"sampling_params.{e.param}") from e
    fields.settle("chat")
