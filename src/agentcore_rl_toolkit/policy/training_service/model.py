"""A causal LM behind the verbs of a training service: forward_backward, optim_step, save, load, publish, sample.

All weights are trained (no LoRA); samples come from what was published. The losses are the sums of `policy.losses` over tokens,
each times its weight (1 if a request has none). The option ``temperature``, which Tinker does not have, divides the logits.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ...errors import ConfigError
from ..decoder import Decoder, DecoderShape
from ..engine import Engine
from ..loading import load_decoder
from ..losses import LOSSES, token_losses
from ..model import TOKENIZER_FILE, check_directory, load_policy
from ..sampling import SamplingParams
from .interface import Completion, Example

SAMPLERS = 3  # published weights that stay loaded; older ones are loaded again when a request names them
State = dict[str, torch.Tensor]


@dataclass
class _Run:
    model: Any
    optimizer: torch.optim.AdamW


class PolicyModel:
    """Runs in training and saved weights, by their paths; None is the base model. Training calls come one at a time; samples
    from any thread.

    ``checkpoint_dir`` keeps what `save` and `publish` write, so that a service that is started again still has it.
    Raises: ConfigError on unknown paths or losses.
    """

    def __init__(
        self,
        *,
        base_model: str = "builtin/policy",
        weights: Path | None = None,
        checkpoint_dir: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.base_model = base_model
        self._weights = check_directory(weights)
        self._tokenizer = Tokenizer.from_file(str(self._weights / TOKENIZER_FILE))
        self._base, _ = load_policy(self._weights)
        self._directory = checkpoint_dir
        self._seed = seed
        self._runs: dict[str, _Run] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        self._engines: OrderedDict[str | None, Engine] = OrderedDict()
        self._lock = threading.Lock()
        if checkpoint_dir is not None:
            checkpoint_dir.mkdir(parents=True, exist_ok=True)
            for file in sorted(checkpoint_dir.glob("*.pt")):
                kept = torch.load(file, weights_only=True)
                self._saved[kept["path"]] = kept

    @property
    def paths(self) -> list[str]:
        """Everything saved or published."""
        return list(self._saved)

    def close(self) -> None:
        """End the sampling threads."""
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()

    # -- training

    def create(self, run: str) -> None:
        """A fresh copy of the base weights, and an optimizer."""
        model = copy.deepcopy(self._base)
        self._runs[run] = _Run(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0))

    def forward_backward(
        self,
        run: str,
        data: Sequence[Example],
        loss_fn: str,
        config: Mapping[str, float | str],
        forward_only: bool,
    ) -> tuple[list[list[float]], dict[str, float]]:
        """Add the gradient of the summed loss. Returns the logprobs of the target tokens, and ``loss:sum``.

        Raises: ConfigError on a loss that is not known.
        """
        model = self._runs[run].model
        if loss_fn not in LOSSES:
            raise ConfigError(f"loss {loss_fn!r} is not known here; there are {', '.join(LOSSES)}")
        T = max(len(example.tokens) for example in data)
        token_ids_BT = torch.zeros(len(data), T, dtype=torch.long)
        targets_BT = torch.zeros(len(data), T, dtype=torch.long)
        for b, example in enumerate(data):
            t = len(example.tokens)
            token_ids_BT[b, :t] = torch.tensor(example.tokens)
            targets_BT[b, :t] = torch.tensor(example.inputs["target_tokens"])
        # Padding is on the right, so a causal model needs no mask.
        with torch.set_grad_enabled(not forward_only):
            logits_BTV = model(input_ids=token_ids_BT).logits.float() / float(config.get("temperature", 1.0))
            logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(2, targets_BT[..., None])[..., 0]
            losses = [
                _loss(loss_fn, logprobs_BT[b, : len(example.tokens)], example.inputs, config)
                for b, example in enumerate(data)
            ]
            total = torch.stack(losses).sum()
            if not forward_only:
                total.backward()  # type: ignore[no-untyped-call]  # torch
        rows = [row[: len(e.tokens)].tolist() for row, e in zip(logprobs_BT.detach(), data, strict=True)]
        return rows, {"loss:sum": total.item()}

    def optim_step(self, run: str, adam: Mapping[str, float]) -> dict[str, float]:
        """One step of AdamW on what `forward_backward` has added up."""
        optimizer = self._runs[run].optimizer
        for group in optimizer.param_groups:
            group["lr"] = adam["learning_rate"]
            group["betas"] = (adam.get("beta1", 0.9), adam.get("beta2", 0.95))
            group["eps"] = adam.get("eps", 1e-12)
            group["weight_decay"] = adam.get("weight_decay", 0.0)
        clip = adam.get("grad_clip_norm", 0.0) or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._runs[run].model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return {"grad_norm:mean": norm.item()}

    def save(self, run: str, path: str) -> None:
        """Keep weights and optimizer under a path."""
        self._keep(path, optimizer=self._runs[run].optimizer.state_dict(), run=run)

    def publish(self, run: str, path: str) -> None:
        """Keep weights for sampling under a path."""
        self._keep(path, optimizer=None, run=run)

    def load(self, run: str, path: str, optimizer: bool) -> None:
        """Go on from saved weights; with ``optimizer`` also from where the optimizer was."""
        saved, state = self._kept_at(path), self._runs[run]
        state.model.load_state_dict(saved["weights"])
        if optimizer:
            if saved["optimizer"] is None:
                raise ConfigError(f"{path} was saved for sampling: it has no optimizer state")
            state.optimizer.load_state_dict(saved["optimizer"])

    def _keep(self, path: str, *, optimizer: Any, run: str) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in self._runs[run].model.state_dict().items()}
        kept = self._saved[path] = {"path": path, "weights": weights, "optimizer": optimizer}
        if self._directory is not None:
            name = path.removeprefix("tinker://").replace("/", "_").replace(":", "_")
            unfinished = self._directory / f"{name}.new"
            torch.save(kept, unfinished)
            unfinished.replace(self._directory / f"{name}.pt")

    def _kept_at(self, path: str) -> dict[str, Any]:
        if path not in self._saved:
            raise ConfigError(f"there are no weights {path!r}")
        return self._saved[path]

    # -- sampling

    def sample(self, path: str | None, prompt_ids: list[int], n: int, params: Mapping[str, Any]) -> list[Completion]:
        """Completions of one prompt; ``params`` are named as in the service's requests. Ends at stop ids and end of text."""
        engine = self._engine(path)
        limit = engine.context - len(prompt_ids)
        if limit < 1:
            raise ConfigError(
                f"the prompt has {len(prompt_ids)} tokens, the model's maximum context length is {engine.context}"
            )
        asked = params.get("stop")
        stops = [asked] if isinstance(asked, str) else list(asked or ())
        sampling = SamplingParams(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(0, int(params.get("top_k", 0))),
            max_tokens=min(limit, int(params.get("max_tokens") or limit)),
            stop=tuple(s for s in stops if isinstance(s, str)),
            stop_token_ids=tuple(s for s in stops if isinstance(s, int)),
            ignore_eos=asked is not None and not stops,
        )
        seed = params.get("seed")
        if seed is None:
            done = engine.generate([prompt_ids] * n, sampling)
        else:
            seeds = range(int(seed), int(seed) + n)
            done = [g for s in seeds for g in engine.generate([prompt_ids], replace(sampling, seed=s))]
        for generation in done:
            if generation.finish_reason not in ("stop", "length"):
                raise ConfigError(f"sampling ended as {generation.finish_reason}: {generation.error}")
        return [Completion(ids=g.token_ids, logprobs=g.logprobs, stop_reason=str(g.finish_reason)) for g in done]

    def logprobs(self, path: str | None, ids: list[int]) -> list[float]:
        """Those of all tokens but the first. Shapes: (T,) -> (T - 1,)."""
        [done] = self._engine(path).generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        return done.prompt_logprobs

    def _engine(self, path: str | None) -> Engine:
        with self._lock:
            engine = self._engines.get(path)
            if engine is None:
                if path is None:
                    decoder = load_decoder(self._weights, dtype=torch.float32)
                else:
                    decoder = Decoder(DecoderShape.from_config(self._base.config), self._kept_at(path)["weights"])
                engine = self._engines[path] = Engine(decoder, self._tokenizer, seed=self._seed).start()
            self._engines.move_to_end(path)
            old = [p for p, e in self._engines.items() if e.idle]
            for name in old[: max(0, len(self._engines) - SAMPLERS)]:
                if name != path:
                    self._engines.pop(name).close()
            return engine


def _loss(
    name: str, logprobs_T: torch.Tensor, inputs: Mapping[str, list[float]], config: Mapping[str, float | str]
) -> torch.Tensor:
    """The weighted sum over one example."""
    nothing = [0.0] * len(logprobs_T)  # cross entropy has no such inputs
    sampled_T, advantages_T = (torch.tensor(inputs.get(name, nothing)) for name in ("logprobs", "advantages"))
    losses_T = token_losses(name, logprobs_T, sampled_T, advantages_T, config)
    return (losses_T * torch.tensor(inputs["weights"])).sum() if "weights" in inputs else losses_T.sum()
