"""The names of a model: folder, run, hub, GGUF."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from agentcore_rl_toolkit.cli.models import Model, model_folder, model_option
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR
from agentcore_rl_toolkit.policy.loading import load_decoder, read_state
from agentcore_rl_toolkit.runs import write_config
from serving import Asked, answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(contextlib.ExitStack):
    """A hub on this machine until it is closed, as much as a download needs: one model, its files those of the shipped policy."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.url = self.enter_context(answering(self._answer))

    def _answer(self, asked: Asked) -> tuple[Any, ...]:
        self.asked.append(asked.path)
        once = {"connection": "close"}  # no connection outlives the server
        parts = asked.path.partition("?")[0].strip("/").split("/")
        names = [file.name for file in WEIGHTS_DIR.iterdir() if file.is_file()]
        if parts[:4] == ["api", "models", "some", "small"]:
            if parts[4:6] == ["revision", "none"]:
                return 404, {}, {"X-Error-Code": "RevisionNotFound", **once}
            if "tree" in parts:
                files = [{"type": "file", "path": n, "size": (WEIGHTS_DIR / n).stat().st_size, "oid": n} for n in names]
                return 200, files, once
            siblings = [{"rfilename": name, "size": (WEIGHTS_DIR / name).stat().st_size} for name in names]
            return 200, {"id": "some/small", "sha": COMMIT, "siblings": siblings}, once
        if parts[:3] == ["some", "small", "resolve"] and parts[-1] in names:
            data = (WEIGHTS_DIR / parts[-1]).read_bytes()
            return 200, data, {"ETag": f'"{parts[-1]}"', "X-Repo-Commit": COMMIT, **once}
        return 404, {}, {"X-Error-Code": "RepoNotFound", **once}


def test_a_run_without_a_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=rf"train --resume --out {tmp_path}"):
        model_folder(tmp_path)
    write_config(tmp_path, {"kind": "eval"})
    with pytest.raises(ConfigError, match="is an evaluation"):
        model_folder(tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and a cache of its own."""
    from huggingface_hub import constants

    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"  # made of the address at import
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.chdir(tmp_path)
        yield hub


def test_a_hub_name_is_loaded_once_with_its_revision_and_found_again_offline(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("some/small@v2", weights=False)
    assert not (folder / "model.safetensors").exists()
    assert any("v2" in path for path in hub.asked)
    folder = model_folder("some/small@v2")
    assert (folder / "model.safetensors").stat().st_size == (WEIGHTS_DIR / "model.safetensors").stat().st_size
    hub.close()
    assert model_folder("some/small@v2") == folder


def test_what_is_wrong_with_a_name_is_said(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "m.txt").touch()
    (tmp_path / "m.gguf").write_text("no such thing")
    (tmp_path / "empty").mkdir()
    for name, why in (
        ("m.txt", "is a file; a model is a folder, run, hub name"),
        ("m.gguf", "cannot read this GGUF file"),
        ("empty", "holds no model: it lacks config.json"),
        ("nowhere", "there is no model folder nowhere"),
        ("some/small@none", "no model folder some/small here, and the hub gave none"),
        ("some/other", "no model folder some/other here, and the hub gave none.*hf auth login"),
    ):
        with pytest.raises(ConfigError, match=why):
            model_folder(name)
    hub.close()
    with pytest.raises(ConfigError, match=r"Without network, run `hf download some/small --revision v3` on another"):
        model_folder("some/small@v3")


def test_the_option_gives_a_folder(tmp_path: Path) -> None:
    @click.command()
    @model_option(type=Model(besides="none"))
    def command(model: Path | str | None) -> None:
        click.echo(f"{model}")

    for given, got in (([], "None"), (["--model", "none"], "none"), (["--model", str(WEIGHTS_DIR)], str(WEIGHTS_DIR))):
        assert CliRunner().invoke(command, given).output.strip() == got


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    import numpy as np
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS_DIR)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(words), max_position_embeddings=128))
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    )
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    }
    names |= {f"model.layers.0.self_attn.{x}_proj": f"blk.0.attn_{x}" for x in "qkv"}
    names |= {"model.layers.0.self_attn.o_proj": "blk.0.attn_output"}
    names |= {f"model.layers.0.mlp.{x}_proj": f"blk.0.ffn_{x}" for x in ("gate", "up", "down")}
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    folder = model_folder(tmp_path / "small.gguf")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    decoder = load_decoder(folder)
    assert (decoder.shape.layers, decoder.shape.vocabulary) == (1, len(words))
    loaded = read_state(folder)
    torch.testing.assert_close(loaded["model.embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"])
    assert "quantization_config" not in (folder / "config.json").read_text()
    assert model_folder(tmp_path / "small.gguf") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
