"""Engines that take and return token ids: writes their requests and reads their answers. Sans-I/O."""

from .base import Piece as Piece
from .base import TokenRequest as TokenRequest
from .sglang import SGLANG, SGLANG_EXPERTS
from .vllm import POLICY, VLLM

TOKEN_ENGINES = {"vllm": VLLM, "policy": POLICY, "sglang": SGLANG, "sglang-experts": SGLANG_EXPERTS}
