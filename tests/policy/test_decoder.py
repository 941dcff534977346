"""The written-out forward pass against transformers'."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.errors import ConfigError, PolicyError
from agentcore_rl_toolkit.policy import loading
from agentcore_rl_toolkit.policy.batch import Batch, Generation
from agentcore_rl_toolkit.policy.decoder import Decoder, DecoderShape
from agentcore_rl_toolkit.policy.engine import Engine
from agentcore_rl_toolkit.policy.loading import Sizes, load_decoder, sizes_of
from agentcore_rl_toolkit.policy.model import WEIGHTS_DIR, load_policy, save_policy
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.policy.transformers_decoder import TransformersDecoder


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 300,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, a head for each, tied": (
        "Qwen3",
        {"head_dim": 32, "num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "llama": ("Llama", {}),
    "llama 3 with biases": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64},
        },
    ),
    "llama by oneDNN": ("Llama", {"hidden_size": 256, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with yarn": ("Qwen2", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
}


def small_model(family: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # norms start at one and would hide a swap of theirs
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers_for_prompts_and_steps(name: str) -> None:
    family, changes = FAMILIES[name]
    model = small_model(family, **changes)
    decoder = Decoder(DecoderShape.from_config(model.config), model.state_dict(), rows=4)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (135, 7, 40)]
    wanted = [reference(model, row) for row in rows]
    read = [120, 5, 39]  # tokens of each row read at once; the rest follows one by one, and the cache grows at 128
    width = max(read)
    ids_NQ = torch.tensor([row[:n] + [0] * (width - n) for row, n in zip(rows, read, strict=True)])
    starts_N = torch.zeros(3, dtype=torch.long)
    logits_NV = decoder.forward(ids_NQ, starts_N, first_row=1, width=width, last_N=torch.tensor(read) - 1)
    for k in range(3):
        torch.testing.assert_close(logits_NV[k], wanted[k][read[k] - 1], atol=1e-4, rtol=1e-5)
    lengths_N = torch.tensor(read)
    for step in range(15):
        k = 0
        token = rows[k][read[k] + step]
        step_ids = torch.tensor([[token], [rows[1][5]], [rows[2][39]]])
        logits_NV = decoder.forward(step_ids, lengths_N, first_row=1, width=int(lengths_N.max()) + 1)
        torch.testing.assert_close(logits_NV[0], wanted[0][read[0] + step], atol=1e-4, rtol=1e-5)
        if step == 0:
            torch.testing.assert_close(logits_NV[1], wanted[1][5], atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(logits_NV[2], wanted[2][39], atol=1e-4, rtol=1e-5)
        lengths_N += 1


def test_bfloat16_gives_the_logits_of_transformers_in_bfloat16(hf: tuple[Any, Any], prompts: list[list[int]]) -> None:
    decoder = load_decoder(rows=2, dtype=torch.bfloat16)
    with Engine(decoder, seed=1) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=40))
    assert (engine.dtype, decoder.keys[0].dtype) == ("bfloat16", torch.bfloat16)
    gaps: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for dtype, found in gaps.items():
        model = copy.deepcopy(hf[0]).to(dtype)
        for g in done:
            ids = g.prompt_ids + g.token_ids
            whole = reference(model, ids).float().log_softmax(-1)[len(g.prompt_ids) - 1 : -1]
            own = whole.gather(1, torch.tensor(g.token_ids)[:, None])[:, 0]
            found += (own - torch.tensor(g.logprobs)).abs().tolist()
        assert 1e-4 < sum(found) / len(found) < 0.03, "rounding, and no more"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_pass_takes_no_tensor_from_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On "meta", which computes shapes alone, and refuses tensors of another device as a GPU does."""
    family, changes = FAMILIES[name]
    config = small_model(family, **changes).config
    monkeypatch.setattr(Decoder, "load", lambda self, state: None)
    decoder = Decoder(DecoderShape.from_config(config), {}, rows=4, device="meta", dtype=torch.bfloat16)
    ids_NQ, starts_N = (torch.zeros(*dims, dtype=torch.long, device="meta") for dims in ((3, 7), (3,)))
    for columns, last_N in ((7, starts_N + 6), (1, None)):
        logits_NV = decoder.forward(ids_NQ[:, :columns], starts_N, first_row=1, width=9, last_N=last_N)
        assert (logits_NV.shape, logits_NV.device.type, logits_NV.dtype) == ((3, 97), "meta", torch.float32)
    decoder.move_row(1, 2, 5)


@pytest.mark.parametrize("parameters", [300_000, 10**7 - 1, 10**7, 135_000_000])
def test_models_that_are_not_small_go_to_a_gpu_where_there_is_one(
    parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loading.placement(parameters) == ("cpu", torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there = ("cuda", torch.bfloat16) if parameters >= 10**7 else ("cpu", torch.float32)
    assert loading.placement(parameters) == there


@pytest.mark.parametrize(("gpu", "copies"), [(False, (4 + 4, 4 * 4, 2 * 4)), (True, (2, 4 * 4, 4))])
def test_training_needs_memory_for_weights_gradients_and_two_moments_or_for_merged_weights(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, copies: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    sizes = Sizes(family="x", fast=True, parameters=10**7)
    engine, trainer, trainer_of_adapters = (10**7 * size for size in copies)
    found = (sizes.engine, sizes.training(False), sizes.training(True))
    assert found == (engine, engine + trainer, engine + trainer_of_adapters)


def test_a_number_of_parameters_has_decimals_below_a_million() -> None:
    texts = [Sizes(family="x", fast=True, parameters=n).text for n in (12_000_000, 10**6, 999_000, 300_000)]
    assert [text.removesuffix(" million parameters") for text in texts] == ["12", "1", "1.00", "0.30"]


def test_free_memory_is_that_of_the_machine_or_of_its_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 3 kB\n", "/sys/fs/cgroup/memory.current": "7000\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    for limit, free in (("9000\n", 2000), ("max\n", 3072)):
        files["/sys/fs/cgroup/memory.max"] = limit
        assert loading.free_memory() == free


def test_weights_that_do_not_fit_are_refused_and_change_nothing(decoder: Decoder, hf: tuple[Any, Any]) -> None:
    ids_NQ, starts_N = torch.tensor([[5, 6, 7]]), torch.tensor([0])
    before = decoder.forward(ids_NQ, starts_N, first_row=0, width=3)
    good = {name: tensor.clone() for name, tensor in hf[0].state_dict().items()}
    missing = {name: t for name, t in good.items() if name != "model.norm.weight"}
    wrong_shape = {**good, "model.norm.weight": torch.ones(3)}
    not_finite = {name: t * 2 for name, t in good.items()}
    not_finite["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    for state, message in ((missing, "lack"), (wrong_shape, "shape"), (not_finite, "NaN")):
        with pytest.raises(PolicyError, match=message):
            decoder.load(state)
        assert torch.equal(decoder.forward(ids_NQ, starts_N, first_row=0, width=3), before)


def test_weights_are_copied_not_shared(decoder: Decoder, hf: tuple[Any, Any]) -> None:
    state = {name: tensor.clone() for name, tensor in hf[0].state_dict().items()}
    decoder.load(state)
    ids_NQ, starts_N = torch.tensor([[5, 6, 7]]), torch.tensor([0])
    before = decoder.forward(ids_NQ, starts_N, first_row=0, width=3)
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(decoder.forward(ids_NQ, starts_N, first_row=0, width=3), before)


def test_saved_policy_loads_again(tmp_path: Path, hf: tuple[Any, Any]) -> None:
    save_policy(hf[0], tmp_path / "p")
    model, tokenizer = load_policy(tmp_path / "p")
    ids = tokenizer("Tom has 3 nuts.")["input_ids"]
    assert torch.equal(reference(model, ids), reference(hf[0], ids))
    assert tokenizer.chat_template == hf[1].chat_template
    with pytest.raises(ConfigError, match="does not contain a model"):
        load_policy(tmp_path)


OTHERS = {
    "mamba, without attention": ("Mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8}),
    "gemma3, with windows": ("Gemma3", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "mistral, with windows": ("Mistral", {"sliding_window": 8}),
    "lfm2, recurrent in part": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_run_by_transformers_and_sequences_come_and_go(name: str) -> None:
    family, changes = OTHERS[name]
    model = text_model(family, **changes)
    with pytest.raises(ConfigError, match="does not know"):
        DecoderShape.from_config(model.config)
    batch = Batch(TransformersDecoder(model, rows=3), seed=3)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in (20, 5, 11, 17, 3)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, prompt_logprobs=0) for n in (6, 3, 10, 5, 4)]
    waiting = [Generation(prompt_ids=ids, params=p) for ids, p in zip(rows, params, strict=True)]
    ended: list[Generation] = []
    while waiting or batch.running:
        while waiting and batch.has_room(waiting[-1]):
            batch.add(waiting.pop())
        ended += batch.step()
    for g in ended:
        whole = reference(model, g.prompt_ids + g.token_ids).log_softmax(-1)
        first = len(g.prompt_ids) - 1
        wanted = [float(whole[first + k, token]) for k, token in enumerate(g.token_ids)]
        assert g.logprobs == pytest.approx(wanted, abs=1e-4)
        read = [float(whole[k, token]) for k, token in enumerate(g.prompt_ids[1:])]
        assert g.prompt_logprobs == pytest.approx(read, abs=1e-4)
    state = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    name = next(iter(state))
    with pytest.raises(PolicyError, match="lack"):
        batch.load({n: t for n, t in state.items() if n != name}, 1)
    batch.load(state, 1)
    assert torch.equal(dict(model.named_parameters())[name], state[name])


def text_model(family: str, **changes: Any) -> Any:
    if family == "Gemma3":
        import transformers

        torch.manual_seed(1)
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**SMALL, **changes})).eval()
    return small_model(family, **changes)


def test_the_cache_bounds_how_many_sequences_run(decoder: Decoder) -> None:
    decoder.cache_tokens = 300
    batch = Batch(decoder, seed=1)
    long, short = SamplingParams(max_tokens=900), SamplingParams(max_tokens=90)
    assert batch.has_room(Generation(prompt_ids=[5] * 10, params=long))  # alone it always can
    for _ in range(3):
        assert batch.has_room(Generation(prompt_ids=[5] * 10, params=short))
        batch.add(Generation(prompt_ids=[5] * 10, params=short))
    assert not batch.has_room(Generation(prompt_ids=[5] * 10, params=short))
    for cache_tokens, rows in ((10_000, 4), (10_000, 3), (None, 4), (None, 3)):  # three run
        decoder.cache_tokens, decoder.rows = cache_tokens, rows
        assert batch.has_room(Generation(prompt_ids=[5], params=short)) is (rows == 4)


def test_a_model_in_several_files_and_too_large_a_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("Llama", max_position_embeddings=3000)
    model.generation_config.eos_token_id = [0, 7]
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "tokenizer.json").write_bytes((WEIGHTS_DIR / "tokenizer.json").read_bytes())
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    sizes = sizes_of(tmp_path)
    assert (sizes.family, sizes.fast, sizes.parameters) == ("llama", True, sum(p.numel() for p in model.parameters()))
    decoder = load_decoder(tmp_path, rows=2)
    assert decoder.shape.end_ids == {0, 7}
    logits_NV = decoder.forward(torch.tensor([[5, 6, 7]]), torch.tensor([0]), first_row=0, width=3)
    torch.testing.assert_close(logits_NV[0], reference(model, [5, 6, 7])[-1], atol=1e-4, rtol=1e-5)
    token_bytes = 4 * loading.cache_numbers(decoder.shape)
    for left, context, room in ((1500, 1500, 1500), (10_000, 3000, 3000), (20_000, 3000, 5000)):
        monkeypatch.setattr(loading, "free_memory", lambda left=left: sizes.engine + left * token_bytes)
        decoder = load_decoder(tmp_path)
        assert (decoder.shape.context, decoder.cache_tokens) == (context, room)
    for free in (1000, sizes.engine + 900 * token_bytes):
        monkeypatch.setattr(loading, "free_memory", lambda free=free: free)
        with pytest.raises(
            ConfigError, match=r"needs \d+ MB of memory, and this machine has \d MB free: use a smaller"
        ):
            load_decoder(tmp_path)
