"""verl settings: the published guide's keys, what they become, and what is refused. No verl needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.rllm.main import main as rllm
from agentcore_rl_toolkit.backends.settings import hydra_value
from agentcore_rl_toolkit.backends.verl.main import main as verl
from agentcore_rl_toolkit.backends.verl.settings import PACKAGE, plan, tokenizer_folder, translate
from agentcore_rl_toolkit.errors import ConfigError

PREFIX = "actor_rollout_ref.rollout.agentcore."
ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math"
NEEDED = [f"{PREFIX}agent_runtime_arn={ARN}", f"{PREFIX}s3_bucket=my-bucket"]


def test_our_keys_leave_verls_rollout_section_alone() -> None:
    """verl makes a dataclass of that section, which refuses keys it does not know."""
    _, theirs = translate([*NEEDED, "data.train_files=a.jsonl"], environ={})
    assert not any(a.lstrip("+").startswith(PREFIX) for a in theirs)
    assert f"+agentcore.agent_runtime_arn='{ARN}'" in theirs
    assert "data.train_files=a.jsonl" in theirs
    manager = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    assert f"{manager}={PACKAGE}.manager.AgentCoreManager" in theirs
    assert "transfer_queue.enable=true" in theirs


def test_the_tokenizer_of_a_model_on_the_hub_is_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway, the check of a teacher, and the texts of a run's tokens read it."""

    def fetched(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert (name, "*.json" in allow_patterns, "*.safetensors" in allow_patterns) == ("Qwen/Qwen3-4B", True, False)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert tokenizer_folder("Qwen/Qwen3-4B") == tokenizer_folder(str(tmp_path)) == str(tmp_path)


def test_a_list_on_the_command_line_is_a_list() -> None:
    lists = [f"{PREFIX}gateway_url=['http://a:9090', http://b:9090]", f"{PREFIX}judge_price=[1,2.5]"]
    config, _ = translate([*NEEDED, *lists], environ={})
    assert config.gateway_url == ("http://a:9090", "http://b:9090")
    assert config.judge_price == (1.0, 2.5)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "missing `agent_runtime_arn`, `s3_bucket`"),
        ([*NEEDED, f"{PREFIX}req_per_sec=3"], "did you mean `reqs_per_sec`"),
        ([*NEEDED, f"{PREFIX}reqs_per_sec=fast"], "`tps_limit` must be a valid integer"),
        ([*NEEDED, "trainer.use_v1=False"], "V1 trainer"),
        ([*NEEDED, "actor_rollout_ref.rollout.calculate_log_probs=false"], "sampled logprobs"),
        ([*NEEDED, "data.custom_cls.name=Mine"], "this backend sets it"),
        ([*NEEDED, "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"], "at the rollouts' temperature"),
        ([*NEEDED, "actor_rollout_ref.rollout.temperature=0.0"], "cannot train at temperature 0"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        translate(arguments, environ={})


# Texts whose quoting hydra's grammar decides. What they become was read back with hydra 1.3's own parser.
@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain-name_1.x/y", "plain-name_1.x/y"),
        ("2026", "'2026'"),
        ("1e5", "'1e5'"),
        ("true", "'true'"),
        ("Null", "'Null'"),
        ("it's", "'it\\'s'"),
        ("back\\slash", "'back\\slash'"),
        ("ends\\", "'ends\\\\'"),
        ("\\'\\\\", "'\\\\\\'\\\\\\\\'"),
        ("run-ö", "'run-ö'"),
        ("a#b;c&d!e~f", "'a#b;c&d!e~f'"),
        ("", "''"),
        (7, "7"),
        (0.5, "0.5"),
        (True, "true"),
        (None, "null"),
        ({"a": 1, "b": "2"}, "{a:1,b:'2'}"),
        (["x", None, "3"], "[x,null,'3']"),
    ],
)
def test_values_keep_their_kind_in_hydras_words(value: Any, written: str) -> None:
    assert hydra_value(value) == written
    if isinstance(value, str):
        assert translate([*NEEDED, f"agentcore.model_id={written}"], environ={})[0].model_id == value


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        (verl, [*NEEDED, "agentcore.nonsense=1"], "unknown setting `nonsense`"),
        (verl, NEEDED, "cannot start verl"),
        (rllm, ["rllm/backend=fsdp"], "only verl and tinker"),
    ],
)
def test_a_trainers_command_ends_with_2_if_it_cannot_start(
    run: Any, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["main", *words])
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_admin_key_reaches_the_run_and_no_screen() -> None:
    made = plan([*NEEDED, "agentcore.gateway_admin_key=hush", "agentcore.gateway_url=http://gateway:9090"])
    assert made.environment == {"AGENTCORE_RL_GATEWAY_ADMIN_KEY": "hush"}
    assert "hush" not in made.render()
