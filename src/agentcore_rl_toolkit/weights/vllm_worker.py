"""The part that runs inside vLLM's workers: ``--worker-extension-cls agentcore_rl_toolkit.weights.vllm_worker.WorkerExtension``.

vLLM 0.32's own ``reload_weights`` does not replace one copy on CPUs: a matrix that is both embedding and output head (tied
weights) is packed a second time for the head, and that copy is not updated. The engine continues with the old head, and reports
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class WorkerExtension:
    """Methods that vLLM's ``/collective_rpc`` finds on every worker. Nothing of ours but this module is imported there."""

    model_config: Any
    model_runner: Any

    def agentcore_dtype(self) -> str:
        """Return the type of numbers in which the model computes, such as "bfloat16"."""
        return str(self.model_config.dtype).removeprefix("torch.")

    def agentcore_load_weights(self, folder: str) -> dict[str, int]:
        """Load the checkpoint in this folder in place, and pack again every weight that was packed from the old one.

        Raises: FileNotFoundError. vLLM gives the old weights up before it looks for new ones, and could not continue.
        """
        if not any(Path(folder).glob("*.safetensors")):
            raise FileNotFoundError(
                f"there are no weights in {folder}: check that the engine's machine has this folder"
            )
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]  # of vLLM's worker, which this is mixed into
        packed = 0
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            # Linear layers are packed again by vLLM itself: their unpacked weights are an empty tensor.
            if method is not None and hasattr(module, "cpu_linear") and hasattr(method, "embedding"):
                method.process_weights_after_loading(module)
                packed += 1
        return {"packed_again": packed}
