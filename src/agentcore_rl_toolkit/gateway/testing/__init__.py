"""A scripted engine for tests: speaks the wire formats of the engines exactly, samples nothing."""

from .engine import ScriptedEngine
from .model import Cut, ScriptedModel, ToolCall
from .tokens import END, START, VOCABULARY, Fault, Seen, decode_ids, encode_messages, encode_text, logprob_of

__all__ = [
    "END",
    "START",
    "VOCABULARY",
    "Cut",
    "Fault",
    "ScriptedEngine",
    "ScriptedModel",
    "Seen",
    "ToolCall",
    "decode_ids",
    "encode_messages",
    "encode_text",
    "logprob_of",
]
