"""A scripted model for tests of agents: it has the wire format of vLLM's chat completions, and samples nothing."""

from .engine import ScriptedEngine, Seen
from .model import Cut, ScriptedModel, ToolCall
from .tokens import END, START, VOCABULARY, decode_ids, encode_messages, encode_text, logprob_of

__all__ = [
    "END",
    "START",
    "VOCABULARY",
    "Cut",
    "ScriptedEngine",
    "ScriptedModel",
    "Seen",
    "ToolCall",
    "decode_ids",
    "encode_messages",
    "encode_text",
    "logprob_of",
]
