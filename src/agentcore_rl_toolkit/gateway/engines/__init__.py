"""Engines that take and give token ids: writes their requests and reads their answers. Sans-I/O."""

from .base import GenerationStream, Piece, TokenEngine
from .sglang import SGLangEngine
from .tinker import TinkerEngine
from .vllm import VLLMEngine

TOKEN_ENGINES: dict[str, TokenEngine] = {
    "vllm": VLLMEngine(),
    "policy": VLLMEngine(name="policy", constrains=False),
    "sglang": SGLangEngine(),
    "sglang-experts": SGLangEngine(name="sglang-experts", experts=True),
    "tinker": TinkerEngine(),
}

__all__ = [
    "TOKEN_ENGINES",
    "GenerationStream",
    "Piece",
    "SGLangEngine",
    "TinkerEngine",
    "TokenEngine",
    "VLLMEngine",
]
