"""Engines that take and give token ids: writes their requests and reads their answers. Sans-I/O."""

from .base import GenerationStream, Piece, TokenEngine
from .sampling_service import ServiceEngine
from .sglang import SGLangEngine
from .vllm import VLLMEngine

TOKEN_ENGINES: dict[str, TokenEngine] = {
    "vllm": VLLMEngine(),
    "policy": VLLMEngine(name="policy", constrains=False),
    "sglang": SGLangEngine(),
    "sglang-experts": SGLangEngine(name="sglang-experts", experts=True),
    "tinker": ServiceEngine("tinker"),
    "sagemaker": ServiceEngine("sagemaker"),
}

__all__ = [
    "TOKEN_ENGINES",
    "GenerationStream",
    "Piece",
    "SGLangEngine",
    "ServiceEngine",
    "TokenEngine",
    "VLLMEngine",
]
