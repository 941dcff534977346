"""The built-in policy with the API of a training service, in this process: for rehearsals and tests.

All weights are trained (no LoRA). A service has a path for saved weights, and samples from them. The path None is the base model.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ...errors import ConfigError
from ...policy.batch import Generation
from ...policy.engine import Engine
from ...policy.loading import load_decoder
from ...policy.model import TOKENIZER_FILE, WEIGHTS_DIR
from ...policy.sampling import SamplingParams
from .batch import Datum
from .client import Adam, Loss, Passed
from .settings import TorchSettings
from .torch_client import TorchClient, load_model, pad_id_of

SAMPLERS = 3  # saved weights that stay loaded; older ones are loaded again when a request names them


class LocalModel:
    """Models in training, by the name of their run, and saved weights, by path.

    Training calls come one at a time, samples from any thread. ``checkpoint_dir`` keeps saved weights for a later process.
    Raises: ConfigError on unknown paths or losses.
    """

    def __init__(self, *, checkpoint_dir: Path | None = None) -> None:
        self.folder = WEIGHTS_DIR
        self._tokenizer = Tokenizer.from_file(str(self.folder / TOKENIZER_FILE))
        self._directory = checkpoint_dir
        self._runs: dict[str, TorchClient] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        self._engines: OrderedDict[str | None, Engine] = OrderedDict()
        self._lock = threading.Lock()
        if checkpoint_dir is not None:
            checkpoint_dir.mkdir(parents=True, exist_ok=True)
            for file in sorted(checkpoint_dir.glob("*.pt")):
                saved = torch.load(file, weights_only=True)
                self._saved[saved["path"]] = saved

    @property
    def paths(self) -> list[str]:
        return list(self._saved)

    def close(self) -> None:
        with self._lock:
            while self._engines:
                self._engines.popitem()[1].close()

    def create(self, run: str, *, temperature: float = 1.0) -> None:
        """Start a run with a fresh copy of the base weights. Its losses divide the logits by ``temperature``."""
        settings = TorchSettings(model=self.folder, temperature=temperature)
        model, tokenizer = load_model(settings)
        self._runs[run] = TorchClient(model, pad_id_of(tokenizer), settings, run_dir=self.folder)

    def forward_backward(self, run: str, data: Sequence[Datum], loss: Loss, *, backward: bool = True) -> Passed:
        """Compute the loss, summed over tokens and weighted by each datum's mask. Add its gradient with ``backward``."""
        return self._runs[run].compute(data, loss, 1.0, backward=backward)

    def step(self, run: str, adam: Adam) -> Mapping[str, float]:
        return self._runs[run].apply(adam)

    def save(self, run: str, path: str, *, optimizer: bool) -> None:
        """Keep the weights of a run under a path, with the optimizer's state or for sampling only."""
        client = self._runs[run]
        weights = {name: tensor.detach().clone() for name, tensor in client.model.state_dict().items()}
        # A copy: torch's state has the tensors that later steps change.
        moments = copy.deepcopy(client.optimizer.state_dict()) if optimizer else None
        saved = {"path": path, "weights": weights, "optimizer": moments}
        self._saved[path] = saved
        if self._directory is not None:
            name = path.removeprefix("tinker://").replace("/", "_").replace(":", "_")
            unfinished = self._directory / f"{name}.new"
            torch.save(saved, unfinished)
            unfinished.replace(self._directory / f"{name}.pt")

    def load(self, run: str, path: str, *, optimizer: bool) -> None:
        """Continue a run from saved weights, and with ``optimizer`` from the optimizer's state."""
        saved, client = self._saved_at(path), self._runs[run]
        if optimizer and saved["optimizer"] is None:
            raise ConfigError(f"{path} was saved for sampling: it has no optimizer state")
        client.model.load_state_dict(saved["weights"])
        if optimizer:
            client.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))

    def sample(self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]) -> list[Generation]:
        """Return completions of one prompt. ``params`` have the names of Tinker's `SamplingParams`."""
        engine = self._engine(path)
        limit = engine.context - len(prompt_ids)
        if limit < 1:
            raise ConfigError(
                f"the prompt has {len(prompt_ids)} tokens, the model's maximum context length is {engine.context}"
            )
        given, seed = params.get("stop"), params.get("seed")
        stops = [given] if isinstance(given, str) else list(given or ())
        sampling = SamplingParams(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(0, int(params.get("top_k") or 0)),
            max_tokens=min(limit, int(params.get("max_tokens") or limit)),
            stop=tuple(s for s in stops if isinstance(s, str)),
            stop_token_ids=tuple(s for s in stops if isinstance(s, int)),
            ignore_eos=given is not None and not stops,
        )
        if seed is None:
            generations = engine.generate([prompt_ids] * n, sampling)
        else:
            each = (replace(sampling, seed=int(seed) + k) for k in range(n))
            generations = [engine.generate([prompt_ids], one)[0] for one in each]
        for generation in generations:
            if generation.finish_reason not in ("stop", "length"):
                raise ConfigError(f"sampling ended as {generation.finish_reason}: {generation.error}")
        return generations

    def logprobs(self, path: str | None, ids: list[int]) -> list[float]:
        [generation] = self._engine(path).generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        return generation.prompt_logprobs

    def _saved_at(self, path: str) -> dict[str, Any]:
        if path not in self._saved:
            raise ConfigError(f"there are no weights {path!r}")
        return self._saved[path]

    def _engine(self, path: str | None) -> Engine:
        with self._lock:
            if path not in self._engines:
                decoder = load_decoder(self.folder, dtype=torch.float32)
                if path is not None:
                    decoder.load(self._saved_at(path)["weights"])
                self._engines[path] = Engine(decoder, self._tokenizer, seed=0).start()
            self._engines.move_to_end(path)
            idle = [name for name, engine in self._engines.items() if engine.idle and name != path]
            for name in idle[: max(0, len(self._engines) - SAMPLERS)]:
                self._engines.pop(name).close()
            return self._engines[path]
