"""The training client of this process: a causal LM in torch, on a GPU if there is one.

Weights, gradients and optimizer are float32. Shapes: _B sequences of a batch, _T tokens of a sequence, _N sampled tokens of a
batch, _D width of the model, _V tokens of the vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError
from ...policy import load_policy, save_policy
from ...policy.linear import use_onednn
from ...policy.loading import placement
from ...policy.losses import token_losses
from ...weights import EngineAddress, Publisher
from ...weights.publishing import MAX_GAP, MAX_GAP_OF_BFLOAT16
from .batch import Datum
from .client import Adam, Loss, Passed
from .settings import TorchSettings

HEAD_TOKENS = 512  # tokens whose logits are in memory at once
T = TypeVar("T")


class TorchClient:
    """A `TrainingClient`. All work on the model runs on one thread, in the order of the calls.

    ``engine`` is the agents' engine, whose weights `publish` replaces. ``run_dir`` keeps weights and
    checkpoints.
    """

    service = "this process"

    def __init__(
        self, model: Any, pad_id: int, settings: TorchSettings, *, run_dir: Path, engine: EngineAddress | None = None
    ) -> None:
        self.model, self.settings = model, settings
        self.max_logprob_gap: float | None = MAX_GAP if settings.dtype == "float32" else MAX_GAP_OF_BFLOAT16
        self.penalizes = settings.kl_penalty > 0
        self._pad_id, self._run_dir, self._engine = pad_id, run_dir, engine
        self._start: Any = None  # the loaded model, if the loss needs it and there are no adapters to turn off
        if settings.kl_penalty and not settings.lora_rank:
            self._start = load_model(settings)[0].requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, weight_decay=settings.weight_decay)
        self._publisher: Publisher | None = None
        self._worker = ThreadPoolExecutor(1, "agentcore-rl-train")

    @classmethod
    def open(
        cls, settings: TorchSettings, state: str | None, *, run_dir: Path, engine: EngineAddress | None = None
    ) -> TorchClient:
        """Load the model, and a saved state. Takes seconds. Raises: ConfigError if the state is not there."""
        torch.manual_seed(settings.seed)
        torch.set_num_threads(settings.threads or os.cpu_count() or 2)
        model, tokenizer = load_model(settings)
        client = cls(model, pad_id_of(tokenizer), settings, run_dir=run_dir, engine=engine)
        if state is not None:
            file = run_dir / state
            if not file.is_file():
                raise ConfigError(f"{file} is missing: the run cannot be resumed without its checkpoint")
            saved = torch.load(file, weights_only=True, map_location=model.device)
            model.load_state_dict({**model.state_dict(), **saved["model"]})
            client.optimizer.load_state_dict(saved["optimizer"])
        return client

    # -- the interface of `TrainingClient`

    def forward_backward(self, data: Sequence[Datum], loss: Loss, tokens: float) -> Awaitable[Passed]:
        return self._do(lambda: self.compute(data, loss, tokens))

    def step(self, adam: Adam) -> Awaitable[Mapping[str, float]]:
        return self._do(lambda: self.apply(adam))

    async def publish(self, version: int, gateway: Any, probe: Sequence[int] | None) -> None:
        if self._publisher is None:
            assert self._engine is not None
            self._publisher = Publisher(
                [self._engine],
                self._run_dir / "weights",
                announce=gateway.set_weight_version,
                in_flight="keep",  # none runs if `hold_calls` paused the gateway
                temperature=self.settings.temperature,
            )
        publisher = self._publisher
        await self._do(lambda: publisher.publish(self.model, version, prompt_ids=probe))

    @property
    def proved(self) -> int | None:
        """The newest version that the engine is proved to have. None before the first change that is large enough for a proof."""
        return self._publisher.proved if self._publisher is not None else None

    async def save(self, steps: int) -> str:
        return await self._do(lambda: self._save(steps))

    async def close(self, status: str) -> None:
        await asyncio.to_thread(self._worker.shutdown)

    def save_policy(self) -> None:
        """Write the trained model to ``policy`` in the run's folder, as transformers and engines load it."""
        model = self.model.merge_and_unload() if self.settings.lora_rank else self.model
        save_policy(model, self._run_dir / "policy", tokenizer_from=self.settings.model)

    # -- on the worker's thread

    def _do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._worker.submit(work))

    def compute(self, data: Sequence[Datum], loss: Loss, tokens: float, *, backward: bool = True) -> Passed:
        """Do the work of `forward_backward` on this thread. Without ``backward``, gradients do not change."""
        device, total, divergence = next(self.model.parameters()).device, 0.0, 0.0
        logprobs: list[list[float]] = [[] for _ in data]
        entropies: list[list[float]] = [[] for _ in data]
        for places in at_once([len(datum.tokens) for datum in data], self.settings.tokens_at_once):
            piece = [data[place] for place in places]
            batch = Batch.of(piece, self._pad_id, device)
            with torch.set_grad_enabled(backward):
                logprobs_BT, entropies_BT = token_logprobs(self.model, batch, self.settings.temperature)
            terms_BT = token_losses(
                loss.name, logprobs_BT, batch.sampled_logprobs_BT, batch.advantages_BT, loss.options
            )
            if self.settings.kl_penalty:
                kl_BT = self._divergence_from_start(batch, logprobs_BT)
                terms_BT = terms_BT + self.settings.kl_penalty * kl_BT
                divergence += (kl_BT.detach() * batch.mask_BT).sum().item()
            value = (terms_BT * batch.mask_BT).sum() / tokens
            if backward:
                value.backward()  # type: ignore[no-untyped-call]  # torch
            total += value.item()
            for b, place in enumerate(places):
                length = len(data[place].tokens)
                logprobs[place] = logprobs_BT[b, :length].tolist()
                entropies[place] = entropies_BT[b, :length].tolist()
        metrics = {"loss": total}
        if self.settings.kl_penalty:
            metrics["kl_start"] = divergence / max(1, sum(datum.trained_tokens for datum in data))
        return Passed(metrics=metrics, logprobs=logprobs, entropies=entropies)

    def _divergence_from_start(self, batch: Batch, logprobs_BT: torch.Tensor) -> torch.Tensor:
        """Estimate KL(policy || model at the start) for each token (k3, joschu.net/blog/kl-approx.html). Shapes: (B, T)."""
        adapters = self.model.disable_adapter() if self._start is None else contextlib.nullcontext()
        with torch.no_grad(), adapters:
            start_BT, _ = token_logprobs(self._start or self.model, batch, self.settings.temperature)
        log_ratio_BT = start_BT - logprobs_BT
        return log_ratio_BT.exp() - 1 - log_ratio_BT

    def apply(self, adam: Adam) -> dict[str, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = adam.learning_rate
            if "betas" in group:
                group["betas"] = (adam.beta1, adam.beta2)
        limit = adam.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm.item(), "peak_memory_gb": peak_memory_gb()}

    def _save(self, steps: int) -> str:
        """Write a checkpoint. Keep the previous one too: the run's state names it until the new name is written."""
        name = f"checkpoint-{steps:06d}.pt"
        found = sorted(self._run_dir.glob("checkpoint-*.pt"))
        earlier = [file for file in found if file.name < name]  # a resumed run may repeat steps that were saved
        state = {"model": changed_by_training(self.model), "optimizer": self.optimizer.state_dict()}
        unfinished = self._run_dir / "checkpoint.new"
        torch.save(state, unfinished)
        unfinished.replace(self._run_dir / name)
        for old in found:
            if old.name != name and old not in earlier[-1:]:
                old.unlink()
        return name


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded sequences. Position t holds the inputs that predict the token after it. Shapes: (B, T)."""

    token_ids_BT: torch.Tensor
    targets_BT: torch.Tensor
    mask_BT: torch.Tensor  # 1.0 where the target was sampled by the policy and is trained
    sampled_logprobs_BT: torch.Tensor  # 0.0 where the mask is 0
    advantages_BT: torch.Tensor  # 0.0 where the mask is 0

    @classmethod
    def of(cls, data: Sequence[Datum], pad_id: int, device: Any = "cpu") -> Batch:
        T = max(len(datum.tokens) for datum in data)

        def padded(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
            found_BT = torch.full((len(data), T), fill, dtype=dtype)
            for b, row in enumerate(rows):
                found_BT[b, : len(row)] = torch.tensor(row, dtype=dtype)
            return found_BT.to(device)

        return cls(
            token_ids_BT=padded([d.tokens for d in data], pad_id, torch.long),
            targets_BT=padded([d.target_tokens for d in data], pad_id, torch.long),
            mask_BT=padded([d.mask for d in data], 0.0, torch.float32),
            sampled_logprobs_BT=padded([d.logprobs for d in data], 0.0, torch.float32),
            advantages_BT=padded([d.advantages for d in data], 0.0, torch.float32),
        )


def token_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log pi(target | earlier tokens), and pi's entropy: (B, T) -> 2 x (B, T), 0.0 where the mask is 0.

    pi is the policy at this temperature, as agents sample it. Padding is right: it needs no mask. The output head works only at
    these positions, `HEAD_TOKENS` at a time, and again in the backward pass, because the logits of a large vocabulary fill
    memory first.
    """
    wanted_BT = batch.mask_BT > 0
    head = model.get_output_embeddings()
    hidden: list[Any] = []

    def keep(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden.append(inputs[0][wanted_BT])
        return (inputs[0][:, :0], *inputs[1:])  # the model itself computes no logits

    hook = head.register_forward_pre_hook(keep)
    try:
        model(input_ids=batch.token_ids_BT, use_cache=False)
    finally:
        hook.remove()
    chosen_N = batch.targets_BT[wanted_BT]
    pieces = zip(torch.split(hidden[0], HEAD_TOKENS), torch.split(chosen_N, HEAD_TOKENS), strict=True)
    found: list[Any] = [
        checkpoint(of_head, head, model.config, *piece, temperature, use_reentrant=False) for piece in pieces
    ]
    logprobs_N, entropies_N = (torch.cat(parts) for parts in zip(*found, strict=True))
    empty_BT = torch.zeros(wanted_BT.shape, device=logprobs_N.device)
    return empty_BT.masked_scatter(wanted_BT, logprobs_N), empty_BT.masked_scatter(wanted_BT, entropies_N)


def of_head(
    head: Any, config: Any, hidden_ND: torch.Tensor, chosen_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of the chosen tokens, and entropies, from the input of the output head."""
    logits_NV = head(hidden_ND).float()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    logits_NV = logits_NV * scale if scale != 1.0 else logits_NV  # Cohere, Granite
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits_NV = cap * torch.tanh(logits_NV / cap)
    logits_NV = logits_NV / temperature if temperature != 1.0 else logits_NV
    logprobs_NV = torch.log_softmax(logits_NV, -1)
    probabilities_NV = logprobs_NV.detach()
    entropies_N = -(probabilities_NV.exp() * probabilities_NV).sum(-1)
    return logprobs_NV.gather(1, chosen_N[:, None])[:, 0], entropies_N


def at_once(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield places of sequences of similar length, as many as ``tokens`` hold with their padding."""
    piece: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if piece and (len(piece) + 1) * lengths[place] > tokens:
            yield piece
            piece = []
        piece.append(place)
    if piece:
        yield piece


def load_model(settings: TorchSettings) -> tuple[Any, Any]:
    model, tokenizer = load_policy(settings.model)
    device, _ = placement(model.num_parameters())
    model = model.to(device)
    compute_in(model, settings.dtype)
    if settings.gradient_checkpointing:
        from transformers.modeling_layers import GradientCheckpointingLayer

        # The name in newer versions of transformers.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for module in model.modules():  # only these layers: others might use dropout in training mode
            module.training = isinstance(module, GradientCheckpointingLayer)
    if settings.lora_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=settings.lora_rank, lora_alpha=settings.alpha, target_modules="all-linear")
        )
    return model, tokenizer


def compute_in(model: Any, dtype: str) -> None:
    """Let a model, and its output head when it is called by itself, multiply matrices in this type."""
    if dtype == "float32":
        use_onednn(model)
        return
    for part in (model, model.get_output_embeddings()):
        part.forward = torch.autocast(model.device.type, torch.bfloat16)(part.forward)


def pad_id_of(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def changed_by_training(model: Any) -> dict[str, torch.Tensor]:
    """Return the state of a model without its frozen base, which is in the model's own folder."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def peak_memory_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
