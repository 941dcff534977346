"""The written-out forward pass against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcore_rl_toolkit.errors import ConfigError, PolicyError
from agentcore_rl_toolkit.policy.decoder import Decoder, DecoderShape
from agentcore_rl_toolkit.policy.model import load_policy, save_policy


def reference(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def small_model(**changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    options = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 300,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**options, **changes}))
    for parameter in model.parameters():  # norms start at one and would hide a swap of theirs
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4, "tie_word_embeddings": True}])
def test_logits_equal_transformers_for_prompts_and_steps(changes: dict[str, Any]) -> None:
    model = small_model(**changes)
    decoder = Decoder(DecoderShape.from_config(model.config.to_dict()), model.state_dict(), rows=4)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (150, 7, 40)]
    wanted = [reference(model, row) for row in rows]
    read = [100, 5, 39]  # tokens of each row read at once; the rest follows one by one
    width = max(read)
    ids_NQ = torch.tensor([row[:n] + [0] * (width - n) for row, n in zip(rows, read, strict=True)])
    starts_N = torch.zeros(3, dtype=torch.long)
    logits_NV = decoder.forward(ids_NQ, starts_N, first_row=1, width=width, last_N=torch.tensor(read) - 1)
    for k in range(3):
        torch.testing.assert_close(logits_NV[k], wanted[k][read[k] - 1], atol=1e-4, rtol=1e-5)
    lengths_N = torch.tensor(read)
    for step in range(50):
        k = 0
        token = rows[k][read[k] + step]
        step_ids = torch.tensor([[token], [rows[1][5]], [rows[2][39]]])
        logits_NV = decoder.forward(step_ids, lengths_N, first_row=1, width=int(lengths_N.max()) + 1)
        torch.testing.assert_close(logits_NV[0], wanted[0][read[0] + step], atol=1e-4, rtol=1e-5)
        if step == 0:
            torch.testing.assert_close(logits_NV[1], wanted[1][5], atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(logits_NV[2], wanted[2][39], atol=1e-4, rtol=1e-5)
        lengths_N += 1


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
    with pytest.raises(ConfigError, match="does not hold a policy"):
        load_policy(tmp_path)
