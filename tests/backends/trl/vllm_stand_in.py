"""vLLM's server and its side of weight transfer, as far as TRL 1.16 talks to them, on a CPU.

`VllmServer` answers the routes of ``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1`` that TRL calls and keeps the weights it is sent.
`install` makes TRL find a package named vllm. Tensors travel through a queue of this process where vLLM would use NCCL, which is
also why TRL's demand for a CUDA device is lifted; the requests around them are TRL's own.
"""

from __future__ import annotations

import importlib
import json
import queue
import sys
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

VERSION = "0.27.0"  # of those that TRL 1.16 supports, the last with static transfer functions
_sent: queue.Queue[tuple[str, torch.Tensor]] = queue.Queue()


class VllmServer(ThreadingHTTPServer):
    """`calls` are the requests in order, `updates` the complete weights of every finished update."""

    logprobs_mode = "processed_logprobs"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[str] = []
        self.updates: list[dict[str, torch.Tensor]] = []
        self.under_way: dict[str, torch.Tensor] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: VllmServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/get_world_size": {"world_size": 1},
            "/server_info": {
                "vllm_config": {
                    "weight_transfer_config": {"backend": "nccl"},
                    "model_config": {"logprobs_mode": self.server.logprobs_mode},
                }
            },
        }
        self.answer(answers[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        server = self.server
        server.calls.append(self.path)
        if self.path == "/start_weight_update":
            assert server.under_way is None
            server.under_way = {}
        elif self.path == "/update_weights":
            assert server.under_way is not None
            info = body["update_info"]
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                sent_name, tensor = _sent.get(timeout=30)
                assert (sent_name, str(tensor.dtype), list(tensor.shape)) == (name, f"torch.{dtype}", shape)
                server.under_way[name] = tensor
        elif self.path == "/finish_weight_update":
            assert server.under_way
            server.updates.append(server.under_way)
            server.under_way = None
        self.answer({"success": True})

    def answer(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class _Engine:
    """vLLM's NCCLWeightTransferEngine, the trainer's side."""

    @staticmethod
    def trainer_send_weights(*, iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        for name, tensor in iterator:
            _sent.put((name, tensor.detach().clone()))


def install(folder: Path) -> None:
    """Make ``import vllm`` work in this process, before TRL is imported."""
    info = folder / f"vllm-{VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(
        f"__version__ = {VERSION!r}\nclass LLM: ...\nclass SamplingParams: ...\nclass RequestOutput: ...\n"
    )
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    modules = {
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.distributed.weight_transfer.nccl_engine": {
            "NCCLTrainerSendWeightsArgs": lambda **arguments: arguments,
            "NCCLWeightTransferEngine": _Engine,
        },
        "vllm.sampling_params": {"StructuredOutputsParams": type("StructuredOutputsParams", (), {})},
    }
    for name, members in modules.items():
        parts = name.split(".")
        for depth in range(2, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        vars(sys.modules[name]).update(members)


def join_without_cuda(client: Any, device: Any = 0) -> None:
    """TRL's `VLLMClient.init_communicator` without NCCL: the same question to the server, the same request, no process group."""
    assert client.get_server_info()["weight_transfer_config"] is not None
    init_info = {"world_size": client.get_world_size() + 1, "rank_offset": 1}
    client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": init_info})
