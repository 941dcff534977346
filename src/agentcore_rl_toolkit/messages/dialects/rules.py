"""The rules for fields, tools and blocks that agents send beside the common ones: one table per dialect.

The gateway takes parts of a request that cannot change which tokens are trained. Parts that the model cannot take become text, or
are left out and counted. It refuses only what would make the record, or the agent's reading of the answer, wrong; the reason
names the way out. A field in no table is ignored and counted; ``--allow-field NAME`` passes it to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

TAKEN: Final = "taken"
IGNORED: Final = "ignored"
AS_TEXT: Final = "as text"
REFUSED: Final = "refused"


@dataclass(frozen=True)
class Rule:
    """``names`` are fields, separated by blanks; with ``where`` types of tools, blocks, items or parts instead.

    ``unless`` are values under which a field asks for nothing.
    """

    names: str
    action: Literal["taken", "ignored", "as text", "refused"]
    why: str
    where: str = "field"
    unless: tuple[Any, ...] = ()


_NO_EFFECT = "it is for the provider's own accounts and caches"
_ENGINES_OWN = Rule(
    """bootstrap_host bootstrap_port bootstrap_room custom_logit_processor data_parallel_rank disagg_prefill_dp_rank
    ec_transfer_params kv_transfer_params lora_path rid routed_dp_rank session_params""",
    REFUSED,
    "it reaches beyond this call, into the engine's own affairs; set it where the engine is started",
)
_OUTPUTS = (
    Rule("audio", IGNORED, "there is no audio output, the answer is text"),
    Rule("modalities", IGNORED, "the answer is text", unless=(["text"],)),
    Rule("prediction", IGNORED, "it would only make the answer come sooner"),
    Rule("web_search_options", IGNORED, "there is no web search here"),
    Rule("verbosity", IGNORED, "the model has no such setting", unless=("medium",)),
    Rule("suffix", REFUSED, "there is no insertion; put the text into the prompt"),
    Rule("echo", REFUSED, "it would repeat the prompt inside the answer; leave it out", unless=(False,)),
    Rule("best_of", REFUSED, "every sample is returned; use n", unless=(1,)),
    Rule(
        "use_beam_search",
        REFUSED,
        "beams are no samples of the policy, nothing could be trained on them; use n",
        unless=(False,),
    ),
    Rule("prompt_embeds", REFUSED, "a prompt without token ids cannot be recorded; send text"),
    Rule("prompt_logprobs", REFUSED, "logprobs are given for sampled tokens only; leave it out", unless=(False,)),
    _ENGINES_OWN,
)
_ASKED_ANYWAY = """return_token_ids return_prompt_token_ids return_tokens_as_token_ids return_routed_experts return_meta_info
    request_id cache_salt include_reasoning separate_reasoning"""
_OPENAI = "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options"

CHAT = (
    Rule(f"{_OPENAI} store {_ASKED_ANYWAY} add_special_tokens", TAKEN, _NO_EFFECT),
    *_OUTPUTS,
    Rule("functions", REFUSED, "use tools instead"),
    Rule("function_call", REFUSED, "use tool_choice instead", unless=("auto", "none")),
    Rule(
        "continue_final_message", REFUSED, "an answer always starts a new message; end with the user's", unless=(False,)
    ),
    Rule("add_generation_prompt", REFUSED, "an answer always starts a new message; leave it out", unless=(True,)),
    Rule("chat_template", REFUSED, "the template of the model is used; give another to the gateway (--template)"),
    Rule("(any other)", AS_TEXT, "a line that says that the model cannot read it", "part"),
    Rule("custom", REFUSED, "use a function with one string, or the Responses API", "tool"),
    Rule("(any other)", IGNORED, "a hosted tool is left out", "tool"),
)
COMPLETIONS = (Rule(f"{_OPENAI} {_ASKED_ANYWAY}", TAKEN, _NO_EFFECT), *_OUTPUTS)
RESPONSES = (
    Rule(f"{_OPENAI} store stream_options max_tool_calls client_metadata", TAKEN, _NO_EFFECT),
    Rule("truncation", IGNORED, "input is never cut", unless=("disabled",)),
    Rule("context_management", IGNORED, "the gateway does not edit the input"),
    Rule("text.verbosity", IGNORED, "the model has no such setting", unless=("medium",)),
    Rule("reasoning.summary reasoning.generate_summary reasoning.context", TAKEN, "the reasoning is given as it is"),
    Rule("include", IGNORED, "what does not exist here cannot be added"),
    Rule("previous_response_id", REFUSED, "responses are not kept; send the whole input"),
    Rule("conversation", REFUSED, "conversations are not kept; send the whole input"),
    Rule("prompt", REFUSED, "there are no stored prompts; send the text as instructions or input"),
    Rule("background", REFUSED, "answers are given at once; leave it out", unless=(False,)),
    Rule("namespace", AS_TEXT, "each of its functions, under the name `namespace__function`", "tool"),
    Rule("custom", AS_TEXT, "a function with one string `input`; the grammar is described and not enforced", "tool"),
    Rule("local_shell shell apply_patch", AS_TEXT, "a function with the members of the call", "tool"),
    Rule("(any other)", IGNORED, "a hosted tool is left out: web_search, image_generation, mcp, ...", "tool"),
    Rule("compaction", AS_TEXT, "the gateway's own summary; another provider's is sealed and left out", "item"),
    Rule("(any other)", IGNORED, "left out: item_reference, web_search_call, ...", "item"),
    Rule("(any other)", AS_TEXT, "a line that says that the model cannot read it", "part"),
)
ANTHROPIC = (
    Rule("metadata service_tier inference_geo cache_control betas diagnostics", TAKEN, _NO_EFFECT),
    Rule("thinking.budget_tokens thinking.display", TAKEN, "an engine would write the end of the thinking itself"),
    Rule("container", IGNORED, "there are no server-side containers"),
    Rule("mcp_servers", IGNORED, "the gateway does not call MCP servers: the model is not given their tools"),
    Rule("fallbacks", IGNORED, "there is one model"),
    Rule("context_management", IGNORED, "edits that keep all of the history edit nothing"),
    Rule(
        "context_management",
        REFUSED,
        "the gateway does not edit the history: leave out edits that clear it, or clear it in the agent",
        "edit",
    ),
    Rule("thread", REFUSED, "the gateway holds no conversation of the agent's; send all messages"),
    Rule("x-anthropic-billing-header", IGNORED, "the line changes from call to call, no prompt would go on", "system"),
    Rule("(any other than custom)", IGNORED, "a hosted tool is left out: web_search_*, bash_*, ...", "tool"),
    Rule("tool_reference", AS_TEXT, "the name of the tool", "block"),
    Rule(
        "document search_result", AS_TEXT, "its text; of a PDF a line that says that the model cannot read it", "block"
    ),
    Rule("tool_result", AS_TEXT, "a failed one without text says that it failed", "block"),
    Rule("redacted_thinking", IGNORED, "it is sealed", "block"),
    Rule("(any other, of the assistant)", IGNORED, "left out: server_tool_use, web_search_tool_result, ...", "block"),
    Rule("(any other, of the user)", AS_TEXT, "a line that says that the model cannot read it", "block"),
)
RULES: dict[str, tuple[Rule, ...]] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "anthropic": ANTHROPIC,
}


def fields_of(rules: Iterable[Rule]) -> dict[str, Rule]:
    """The rules of a dialect's top-level fields, by name."""
    return {name: rule for rule in rules if rule.where == "field" for name in rule.names.split() if "." not in name}


BY_FIELD = {name: fields_of(rules) for name, rules in RULES.items()}


def markdown(dialect: str) -> str:
    """The dialect's table for the docs."""
    lines = ["| what | becomes | why, or the way out |", "|---|---|---|"]
    for rule in RULES[dialect]:
        names = [rule.names] if rule.names.startswith("(") else [f"`{name}`" for name in rule.names.split()]
        what = ("" if rule.where == "field" else f"{rule.where}: ") + ", ".join(names)
        lines.append(f"| {what} | {rule.action} | {rule.why} |")
    lines.append("| any other field | ignored | `--allow-field NAME` hands it on to the engine |")
    return "\n".join(lines) + "\n"
