"""The settings that a session's calls must keep, checked when the session is opened: a later error would fail the agent."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...contract import check_train
from ...errors import ConfigError
from ...messages.errors import RequestError
from ...messages.wire import ModelRequest, passthrough
from ...messages.wire.chat import parse_parameters
from ...messages.wire.passthrough import Fields

# Of a request, but no sampling parameters: field -> whose it is.
_NOT_SAMPLING = {
    **dict.fromkeys(("messages", "prompt", "input", "system"), "the conversation is the agent's"),
    **dict.fromkeys(("stream", "stream_options"), "how a reply is written is the agent's choice"),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "echo"), "the gateway asks for what it records"),
    **dict.fromkeys(
        ("best_of", "use_beam_search", "logits_processors"), "only samples of the policy can be trained on"
    ),
    "request_id": "all calls of the session would have it",
    "model": "use model_id",
}


class SessionSettings(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """The settings that a session's calls must keep.

    ``sampling_params`` win over the agent's; ``max_tokens`` is an upper bound on what it asks for. ``train`` is the trainer's
    rule of which conversations train (`trajectory.selection`); None leaves it to agent and client.
    """

    sampling_params: dict[str, Any] = {}
    model_id: Annotated[str, Meta(min_length=1)] | None = None
    max_turns: Annotated[int, Meta(ge=0)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    train: str | None = None
    metadata: dict[str, Any] = {}

    def overrides(self) -> Fields:
        """The sampling parameters as JSON, without nulls. A whole number is written without a fraction, as engines want `n`."""
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        whole = {name: int(v) for name, v in given.items() if isinstance(v, float) and v.is_integer()}
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in (given | whole).items()}

    def check(self) -> ModelRequest:
        """Check the settings. Returns the sampling parameters as a request of chat completions has them.

        Raises: RequestError that names the field.
        """
        if self.train is not None:
            try:
                check_train(self.train)
            except ConfigError as e:
                raise RequestError(str(e), param="train") from e
        try:
            return self._parsed()
        except RequestError as e:
            raise RequestError(f"in sampling_params: {e}", kind=e.kind, param=f"sampling_params.{e.param}") from e

    def _parsed(self) -> ModelRequest:
        params = self.sampling_params
        for name, why in _NOT_SAMPLING.items():
            if name in params:
                raise RequestError(f"{name} is no sampling parameter: {why}", param=name)
        for names in (["max_tokens", "max_completion_tokens"], ["tool_choice", *passthrough.forms(self.overrides())]):
            given = [name for name in names if params.get(name) not in (None, "auto", "none")]
            if len(given) > 1:
                raise RequestError(f"{given[1]} and {given[0]} have one purpose: give one of them", param=given[1])
        return parse_parameters(params)
