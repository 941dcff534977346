"""The fields that each dialect refuses.

They would make the record, or the agent's reading of the answer, wrong; the reason names the way out. Other fields that nothing
here reads are left out, because they cannot change which tokens are trained; ``--set allow_fields=NAME`` passes one on.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """The reason why a field is refused. A field with one of the values in ``unless`` is not refused."""

    why: str
    unless: tuple[Any, ...] = ()


_ENGINES_OWN = """bootstrap_host bootstrap_port bootstrap_room custom_logit_processor data_parallel_rank disagg_prefill_dp_rank
    ec_transfer_params kv_transfer_params lora_path request_id rid routed_dp_rank session_params"""
_OUTPUTS = {
    "echo": Refusal("it would repeat the prompt inside the answer; leave it out", (False,)),
    "best_of": Refusal("every sample is returned; use n", (1,)),
    "use_beam_search": Refusal("beams are no samples of the policy, nothing could be trained on them; use n", (False,)),
    "prompt_embeds": Refusal("a prompt without token ids cannot be recorded; send text"),
    "prompt_logprobs": Refusal("logprobs are given for sampled tokens only; leave it out", (False,)),
    **dict.fromkeys(
        _ENGINES_OWN.split(),
        Refusal("it reaches beyond this call, into the engine's own affairs; set it where the engine is started"),
    ),
}
# Variables of a chat template that are made from the request.
NOT_FOR_TEMPLATES = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "return_dict", "strftime_now"}
)
REFUSED: dict[str, dict[str, Refusal]] = {
    "chat": {
        **_OUTPUTS,
        "functions": Refusal("use tools instead"),
        "function_call": Refusal("use tool_choice instead", ("auto", "none")),
        "continue_final_message": Refusal("an answer always starts a new message; end with the user's", (False,)),
        "add_generation_prompt": Refusal("an answer always starts a new message; leave it out", (True,)),
        "chat_template": Refusal("the template of the model is used; give another to the gateway (--template)"),
    },
    "responses": {
        "previous_response_id": Refusal("responses are not kept; send the whole input"),
        "conversation": Refusal("conversations are not kept; send the whole input"),
        "prompt": Refusal("there are no stored prompts; send the text as instructions or input"),
        "background": Refusal("answers are given at once; leave it out", (False,)),
    },
    "anthropic": {},
}
