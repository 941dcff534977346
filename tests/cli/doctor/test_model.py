"""`agentcore-rl doctor --model`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from agentcore_rl_toolkit.cli.doctor import model
from agentcore_rl_toolkit.cli.doctor.command import command
from agentcore_rl_toolkit.cli.doctor.template import NO_TOOLS
from agentcore_rl_toolkit.cli.training.stack import MODEL, start
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, loading

PLAIN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.fixture
def without_tools(tmp_path: Path) -> Path:
    """The shipped policy with a template that knows no tools."""
    folder = tmp_path / "plain"
    shutil.copytree(WEIGHTS_DIR, folder)
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


def doctor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str, str]]:
    monkeypatch.setattr(model, "SPEED_S", 0.2)
    result = CliRunner().invoke(command, ["--model", str(folder), "--json"])
    return {f["name"]: (f["level"], f["text"], f["advice"]) for f in json.loads(result.output)}


def test_a_model_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor(WEIGHTS_DIR, monkeypatch)
    assert {level for level, _, _ in found.values()} == {"ok"}
    assert found["model"][1] == "weights: qwen3, 0.32 million parameters; the built-in engine runs it"
    assert found["memory"][1].startswith("engine 3 MB, with training 8 MB, with LoRA 5 MB, and activations")
    assert found["tool calls"][1] == "read as hermes"
    assert "tokens/s for 8 sequences at once; loaded in" in found["speed"][1]


def test_a_folder_without_weights_has_its_template_checked_and_ends_with_1_when_that_fails(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS_DIR / name, tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text((WEIGHTS_DIR / template.name).read_text())
    good = CliRunner().invoke(command, ["--model", str(tmp_path)])
    assert good.exit_code == 0, good.output
    assert "turn 2 = turn 1 +" in good.output
    assert "tokens/s" not in good.output
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    bad = CliRunner().invoke(command, ["--model", str(tmp_path), "--json"])
    assert bad.exit_code == 1
    assert {f["level"] for f in json.loads(bad.output) if f["name"] == "prefix extension, text"} == {"fail"}


def test_too_little_memory_and_a_template_without_tools_are_said(
    without_tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 4_800_000)
    found = doctor(without_tools, monkeypatch)
    assert found["tool calls"] == ("note", "none", NO_TOOLS)
    assert found["memory"][0] == "note"
    assert "--set lora_rank" not in found["memory"][2]  # adapters would not fit either
    assert found["speed"][0] == "ok"
    monkeypatch.setattr(loading, "free_memory", lambda: 1_000_000)
    level, text, _ = doctor(without_tools, monkeypatch)["speed"]
    assert (level, text[-19:]) == ("fail", "or a larger machine")


def test_weights_that_cannot_be_sampled_are_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(WEIGHTS_DIR, folder)
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"] *= 1e36  # finite, and the logits overflow
    state["model.embed_tokens.weight"] *= 1e4
    save_file(state, folder / "model.safetensors")
    level, text, _ = doctor(folder, monkeypatch)["speed"]
    assert level == "fail"
    assert "not finite" in text


def test_a_stack_says_before_its_first_rollout_that_the_template_drops_tools(
    without_tools: Path, tmp_path: Path
) -> None:
    class StoppedError(Exception):
        pass

    def report(name: str, text: str) -> None:
        assert (name, text) == (MODEL, NO_TOOLS)
        raise StoppedError

    with pytest.raises(StoppedError):
        start(None, tmp_path / "agent.py", folder=tmp_path, admin_key="k", model=without_tools, report=report)  # type: ignore[arg-type]
