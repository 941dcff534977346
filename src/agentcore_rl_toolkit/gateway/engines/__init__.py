"""Engines that take and return token ids: writes their requests and reads their answers. Sans-I/O."""

from .base import GenerationStream as GenerationStream
from .base import Piece as Piece
from .base import TokenEngine as TokenEngine
from .sglang import SGLangEngine
from .vllm import VLLMEngine

TOKEN_ENGINES: dict[str, TokenEngine] = {
    "vllm": VLLMEngine(),
    "policy": VLLMEngine(name="policy", constrains=False),
    "sglang": SGLangEngine(),
    "sglang-experts": SGLangEngine(name="sglang-experts", experts=True),
}
