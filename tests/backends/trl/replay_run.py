"""Run by real_runs.py in an environment that has TRL: real GRPO steps over the recorded episodes.

`cases` returns what TRL was given and made of it; the assertions are in test_real_trl.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.recording import open_recording
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.training.loop import probe_of, update
from agentcore_rl_toolkit.backends.training.settings import LoopSettings
from agentcore_rl_toolkit.backends.training.torch_client import (
    TorchClient,
    TorchSettings,
    changed_by_training,
    load_model,
)
from agentcore_rl_toolkit.backends.trl.adapter import AgentCoreGRPOTrainer, StepMetrics, _lora, make_trainer
from agentcore_rl_toolkit.backends.trl.settings import TrlConfig
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.runs import RunReader
from agentcore_rl_toolkit.trajectory import Turn
from agentcore_rl_toolkit.weights import EngineAddress, write_checkpoint

sys.path.append(str(Path(__file__).parents[1]))
from objectives import batch, gradient
from recorded import Episode, Replay, recorded_episodes, requests_for

VOCABULARY = 512
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


class WeightServer(ThreadingHTTPServer):
    """Takes POST /update_weights as the policy server does, remembers what it was told to load, and samples from it.

    ``keeps`` is a tensor that it never replaces.
    """

    keeps: str | None = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), WeightHandler)
        self.posts: list[dict[str, Any]] = []
        self.tensors: list[dict[str, torch.Tensor]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class WeightHandler(BaseHTTPRequestHandler):
    server: WeightServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "prompt_logprobs" in body:
            self.answer({"choices": [{"prompt_logprobs": self.read(body["prompt"])}]})
            return
        if self.path == "/v1/completions":
            self.answer({"choices": self.sampled(body["prompt"], body["n"], body["max_tokens"], body["temperature"])})
            return
        self.server.posts.append(body)
        tensors = load_file(body["path"])
        if self.server.keeps is not None and self.server.tensors:
            tensors[self.server.keeps] = self.server.tensors[-1][self.server.keeps]
        self.server.tensors.append(tensors)
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"weight_version": self.server.posts[-1]["version"]})

    def answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def read(self, prompt: list[int]) -> list[Any]:
        model = tiny_model()
        model.load_state_dict(self.server.tensors[-1], strict=False)  # the head is the embedding
        with torch.inference_mode():
            logprobs_TV = model(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        return [None, *({str(i): {"logprob": float(row[i])}} for i, row in zip(prompt[1:], logprobs_TV, strict=True))]

    def sampled(self, prompt: list[int], n: int, max_tokens: int, temperature: float) -> list[dict[str, Any]]:
        model = tiny_model()
        model.load_state_dict(self.server.tensors[-1], strict=False)  # the head is the embedding
        ids_BT, first = torch.tensor([prompt] * n), len(prompt)
        with torch.inference_mode():
            for _ in range(max_tokens):
                chances_BV = (model(input_ids=ids_BT).logits[:, -1] / temperature).softmax(-1)
                ids_BT = torch.cat([ids_BT, torch.multinomial(chances_BV, 1)], dim=1)
            logprobs_BTV = (model(input_ids=ids_BT).logits / temperature).log_softmax(-1)[:, first - 1 : -1]
        chosen_BT = logprobs_BTV.gather(2, ids_BT[:, first:, None])[..., 0]
        return [
            {"token_ids": ids, "logprobs": {"token_logprobs": values}}
            for ids, values in zip(ids_BT[:, first:].tolist(), chosen_BT.tolist(), strict=True)
        ]

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCABULARY - 1)} | {"<end>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="w0")


def settings(policy_url: str | None, out: Path, **more: Any) -> TrlConfig:
    training = {
        "per_device_train_batch_size": 64,
        "learning_rate": 1e-2,
        "max_steps": 1,
        "disable_tqdm": True,
        **more.pop("training", {}),
    }
    return TrlConfig(
        agent_runtime_arn="arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/replayed",
        s3_bucket="memory://records",
        exp_id="trl",
        model="tiny",
        gateway_url="http://replay",
        policy_url=policy_url,
        output_dir=out,
        training=training,
        **{"max_mean_logprob_gap": None, **more},  # no model sampled the recorded episodes
    )


def trainer_for(config: TrlConfig, replay: Replay, seen: list[dict[str, Any]], **more: Any) -> AgentCoreGRPOTrainer:
    trainer = make_trainer(
        config,
        client=replay.client,
        gateway=replay.gateway,
        rows=[{"prompt": f"task {i}", "answer": str(i)} for i in range(8)],
        model=tiny_model(),
        tokenizer=tiny_tokenizer(),
        **more,
    )
    inner = trainer._generate_and_score_completions

    def record(inputs: Any) -> Any:
        output = inner(inputs)
        seen.append({k: v.tolist() for k, v in output.items() if isinstance(v, torch.Tensor)})
        return output

    trainer._generate_and_score_completions = record
    return trainer


def plain_step(server: WeightServer, out: Path) -> dict[str, Any]:
    replay, seen = Replay(recorded_episodes(), by_input=False), []
    recording = open_recording(out / "run", {"trainer": "trl"})
    callbacks = [StepMetrics(recording)]
    trainer = trainer_for(settings(server.url, out), replay, seen, recording=recording, callbacks=callbacks)
    trainer.train()
    recording.run.close()
    rows, stats = trainer.rollouts.groups, trainer.rollouts.stats
    return {
        "output": seen[0],
        "run": str(out / "run"),
        "pad": trainer.processing_class.pad_token_id,
        "sessions": [[r.session_id for r in g.rollouts] for g in rows],
        "stats": {name: getattr(stats, name) for name in type(stats).__dataclass_fields__},
        "log": [entry for entry in trainer.state.log_history if "loss" in entry or "reward" in entry],
        "versions": [post["version"] for post in server.posts],
        "names": [sorted(tensors) for tensors in server.tensors],
        "moved": max(
            float((after - server.tensors[0][name]).abs().max()) for name, after in server.tensors[-1].items()
        ),
        "in_sync": max(
            float((server.tensors[-1][name] - p.detach()).abs().max()) for name, p in trainer.model.named_parameters()
        ),
        "gateway_version": replay.weight_version,
    }


def tokens_step(
    server: WeightServer, out: Path, kinds: Sequence[str] = ("single", "multi_turn", "truncated"), **more: Any
) -> dict[str, Any]:
    """A step of whose tokens each has an advantage of its own, by the returns of turns. Some rollouts are too long."""
    episodes = [
        dataclasses.replace(e, record={"status_code": 200, "rewards": [len(t.completion_ids) / 8 for t in e.turns]})
        for e in recorded_episodes(640)
        if e.kind in kinds
    ]
    replay, seen = Replay(episodes, by_input=False), []
    recording = open_recording(out / "run", {"trainer": "trl"})
    config = settings(server.url, out, credit="turn", discount=0.9, **{"max_tokens": 48, **more})
    trainer = trainer_for(config, replay, seen, recording=recording)
    trainer.train()
    recording.run.close()
    fitting = [group.within(config.max_tokens) for group in trainer.rollouts.groups]
    known = {sample.session_id: sample.advantages for sample in to_samples(fitting, credit=config)}
    return {
        "output": seen[0],
        "run": str(out / "run"),
        "wanted": [[session, known.get(session, [])] for session, _ in trainer.rollouts.rows],
        "log": trainer.state.log_history,
        "longer": sum(len(g.usable) for g in trainer.rollouts.groups) - sum(len(g.usable) for g in fitting),
        "moved": max(float((a - server.tensors[0][n]).abs().max()) for n, a in server.tensors[-1].items()),
    }


def short_rows_step(server: WeightServer, out: Path) -> dict[str, Any]:
    """The same with a row of each forked rollout, which may be shorter than its other sequences."""
    return tokens_step(server, out, ("multi_turn", "rewritten"), max_tokens=28)


def lora_step(server: WeightServer, out: Path) -> dict[str, Any]:
    replay, seen = Replay(recorded_episodes(192), by_input=False), []
    config = settings(server.url, out, lora=LORA, training={"max_steps": 3})
    trainer = trainer_for(config, replay, seen)
    trainer.train()
    base = {name for name, _ in tiny_model().named_parameters()}
    first, last = server.tensors[0], server.tensors[-1]
    return {
        "names_are_the_models_own": set(last) == base,
        "versions": [post["version"] for post in server.posts],
        "proved": trainer.rollouts.publisher.proved,
        "changed": sorted({n.split(".")[-2] for n in last if not torch.equal(last[n], first[n])}),
        "merge_gap": max(float((last[n] - w).abs().max()) for n, w in merged_by_hand(trainer.model).items()),
        "moved": max(float((last[n] - first[n]).abs().max()) for n in last),
        "trained": sorted({n.split(".")[-3] for n, p in trainer.model.named_parameters() if p.requires_grad}),
    }


def merged_by_hand(model: Any) -> dict[str, torch.Tensor]:
    """W + B A alpha / r of every adapted matrix, from the adapter's own tensors."""
    tensors = dict(model.named_parameters())
    merged = {}
    for name, weight in tensors.items():
        if name.endswith(".base_layer.weight"):
            stem = name.removesuffix(".base_layer.weight")
            down, up = tensors[f"{stem}.lora_A.default.weight"], tensors[f"{stem}.lora_B.default.weight"]
            plain = stem.removeprefix("base_model.model.") + ".weight"
            merged[plain] = (weight + up @ down * (LORA["lora_alpha"] / LORA["r"])).detach()
    return merged


def cool_steps(server: WeightServer, out: Path) -> dict[str, Any]:
    """Two steps at temperature 0.7, on tokens that the built-in engine sampled at it."""
    tiny_model().save_pretrained(out / "given")
    tiny_tokenizer().save_pretrained(out / "given")
    prompt, how = [5, 6, 7, 8], {"temperature": 0.7}
    with Engine.from_directory(out / "given") as engine:
        generations = engine.generate([prompt] * 128, SamplingParams(max_tokens=8, ignore_eos=True, **how))
    turns = [
        Turn(
            turn_id=f"t{i}",
            index=0,
            prompt_ids=prompt,
            completion_ids=g.token_ids,
            logprobs=g.logprobs,
            finish_reason="length",
            sampling=how,
        )
        for i, g in enumerate(generations)
    ]
    episodes = [Episode(input_id=f"i{i}", turns=(t,), record={"rewards": i % 2}) for i, t in enumerate(turns)]
    training = {**how, "max_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 32}
    recording = open_recording(out / "run", {"trainer": "trl"})
    config = settings(server.url, out, training=training)
    more: dict[str, Any] = {"recording": recording, "callbacks": [StepMetrics(recording)]}
    trainer = trainer_for(config, Replay(episodes, by_input=False), [], **more)
    trainer.train()
    recording.run.close()
    log = trainer.state.log_history
    return {
        "published": trainer.rollouts.publisher.gap,
        "gaps": [entry["agentcore/logprob_gap"] for entry in log if "agentcore/logprob_gap" in entry],
        "trained_tokens": trainer.rollouts.stats.trained_tokens,
        "clipped": [entry["clip_ratio/region_mean"] for entry in log if "clip_ratio/region_mean" in entry],
        "events": RunReader(out / "run").metrics(),
    }


def resumed(server: WeightServer, out: Path) -> dict[str, Any]:
    """A run that was killed after its second step, before this step was saved, and continues from the first."""
    for steps, saved in ((2, None), (3, out / "trl" / "checkpoint-1")):
        recording = open_recording(out / "run", {"trainer": "trl"})
        config = settings(server.url, out, training={"max_steps": steps, "save_steps": 1})
        replay = Replay(recorded_episodes(192), by_input=False)
        trainer = trainer_for(config, replay, [], recording=recording, callbacks=[StepMetrics(recording)])
        trainer.train(resume_from_checkpoint=saved and str(saved))
        recording.run.close()
    with RunReader(out / "run") as run:
        return {"rollouts": [step["rollouts"] for step in run.steps() if step["phase"] == "train"]}


def adapters(out: Path) -> dict[str, Any]:
    """Published adapters leave a base in bfloat16 as it is; what a run goes on from leaves it out."""
    tiny_model().save_pretrained(out / "given")
    tiny_tokenizer().save_pretrained(out / "given")
    scales = {}
    for alpha in (None, 4):
        model, _ = load_model(TorchSettings(model=out / "given", lora_rank=4, lora_alpha=alpha))
        scales[str(alpha)] = {layer.scaling["default"] for layer in model.modules() if hasattr(layer, "lora_A")}
    whole, kept = model.state_dict(), changed_by_training(model)
    lora = _lora({"r": 4, "target_modules": ["q_proj"]})
    model = get_peft_model(tiny_model().bfloat16(), LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    try:
        write_checkpoint(get_peft_model(tiny_model(), LoraConfig(target_modules=["lm_head"])), out / "tied")
        tied = "written"
    except ConfigError as e:
        tied = str(e)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = [load_file(write_checkpoint(model, out / "weights") / "model.safetensors") for _ in range(10)]
    now = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.merge_adapter()
    merged = {
        n.removeprefix("base_model.model.").replace(".base_layer.", "."): t for n, t in model.state_dict().items()
    }
    return {
        "scales": {name: sorted(found) for name, found in scales.items()},
        "trl_alpha": lora.lora_alpha,
        "tied": tied,
        "kept": sorted({name.split(".")[-3] for name in kept}),
        "left_out": len(whole) - len(kept),
        "base_changed": [name for name, tensor in before.items() if not torch.equal(tensor, now[name])],
        "files_differ": [n for n, t in files[0].items() if not all(torch.equal(t, file[n]) for file in files)],
        "merged_differently": [n for n, t in files[0].items() if not torch.equal(t, merged[n])],
        "moved": max(float((t - tiny_model().bfloat16().state_dict()[n]).abs().max()) for n, t in files[0].items()),
    }


def never_works(server: WeightServer, out: Path) -> dict[str, Any]:
    """How a run ends whose agent never works."""
    episodes = [e for e in recorded_episodes(640) if e.kind in ("lost", "agent_error", "no_tokens")]
    replay = Replay(episodes, by_input=False)
    config = settings(server.url, out, training={"max_steps": 5, "per_device_train_batch_size": 16})
    try:
        trainer_for(config, replay, []).train()
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}
    return {"error": None}


def keeps_a_tensor(server: WeightServer, out: Path) -> dict[str, Any]:
    """How a run ends whose engine leaves one tensor as it was, and answers 200."""
    server.keeps = "model.layers.1.mlp.down_proj.weight"
    try:
        trainer_for(settings(server.url, out), Replay(recorded_episodes(), by_input=False), []).train()
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}
    return {"error": None}


def loop_lora(server: WeightServer, out: Path) -> dict[str, Any]:
    """Adapters in the loop of `agentcore-rl train`: a step over the recorded episodes, published before and after."""
    given = out / "given"
    tiny_model().save_pretrained(given)
    tiny_tokenizer().save_pretrained(given)
    episodes = recorded_episodes()
    replay = Replay(episodes)
    groups = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway)
    how = LoopSettings(steps=1, learning_rate=1e-2, beta2=0.99, max_grad_norm=1.0, minibatches=4)

    async def step() -> dict[str, Any]:
        model = TorchSettings(model=given, lora_rank=4)
        training = TorchClient.open(model, None, run_dir=out, engine=EngineAddress(url=server.url))
        training.max_logprob_gap = None  # another model sampled the recorded episodes
        probe = probe_of(groups)
        await training.publish(0, replay.gateway, probe)
        found = await update(training, groups, how, 0)
        await training.publish(
            1, replay.gateway, probe
        )  # the engine's answers to the probe have the adapters' logprobs
        training.save_policy()
        await training.close("success")
        return found

    metrics = asyncio.run(step())
    first, last, saved = (server.tensors[0], server.tensors[-1], load_file(out / "policy" / "model.safetensors"))
    return {
        "trained_tokens": metrics["gradient_tokens"],
        "versions": [post["version"] for post in server.posts],
        "moved": max(float((last[n] - first[n]).abs().max()) for n in last),
        "given": {n: list(t.shape) for n, t in load_file(given / "model.safetensors").items()},
        "saved": {n: list(t.shape) for n, t in saved.items()},
        "saved_gap": max(float((saved[n] - last[n]).abs().max()) for n in saved),
    }


def objective(server: WeightServer, out: Path) -> dict[str, Any]:
    """The gradient of TRL's own loss on a recorded batch, and that of docs/algorithms.md."""
    rows, found = batch(), {}
    for name, training, low, high in (("default", {}, 0.2, 0.2), ("clip_higher", {"epsilon_high": 0.28}, 0.2, 0.28)):
        trainer = trainer_for(settings(server.url, out / name, training=training), Replay([]), [])
        new = rows.new.clone().requires_grad_()
        trainer._get_per_token_logps_and_entropies = lambda *_, logprobs=new, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        ids = torch.ones(rows.mask.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": ids,
            "tool_mask": rows.mask,
            "advantages": rows.advantages,
            "old_per_token_logps": rows.sampled,  # the adapter puts the recorded logprobs there
            "num_items_in_batch": rows.mask.sum(),
        }
        trainer._compute_loss(trainer.model, inputs).backward()
        expected = gradient(rows, against=rows.sampled, low=low, high=high)
        found[name] = float((new.grad - expected).abs().max())
    return found


def cases(folder: Path) -> dict[str, Any]:
    found = {}
    every = {
        "plain": plain_step,
        "tokens": tokens_step,
        "short_rows": short_rows_step,
        "lora": lora_step,
        "cool": cool_steps,
        "resumed": resumed,
        "loop_lora": loop_lora,
        "never_works": never_works,
        "keeps_a_tensor": keeps_a_tensor,
        "objective": objective,
    }
    for name, case in every.items():
        server = WeightServer()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found[name] = case(server, folder / name)
        server.shutdown()
        server.server_close()
    return {**found, "adapters": adapters(folder / "adapters")}
