"""verl settings: the published guide's keys, what they become, and what is refused. No verl needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.hydra import hydra_value, unquoted
from agentcore_rl_toolkit.backends.verl.settings import PACKAGE, VerlConfig, plan, translate
from agentcore_rl_toolkit.errors import ConfigError

PREFIX = "actor_rollout_ref.rollout.agentcore."
ARN = "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math"
NEEDED = [f"{PREFIX}agent_runtime_arn={ARN}", f"{PREFIX}s3_bucket=my-bucket"]


def test_the_published_keys_are_taken_with_their_defaults() -> None:
    config, _ = translate(NEEDED, environ={})
    assert (config.reqs_per_sec, config.max_pool_connections, config.max_rollout_time) == (25, 10, 1800)
    assert (config.gateway_port, config.gateway_store) == (9090, "memory")
    assert (config.gateway_cumulative_token_mode, config.gateway_renderer_model_family) == (False, "auto")


def test_our_keys_leave_verls_rollout_section_alone() -> None:
    """verl makes a dataclass of that section, which refuses keys it does not know."""
    _, theirs = translate([*NEEDED, "data.train_files=a.jsonl"], environ={})
    assert not any(a.lstrip("+").startswith(PREFIX) for a in theirs)
    assert f"+agentcore.agent_runtime_arn='{ARN}'" in theirs
    assert "data.train_files=a.jsonl" in theirs
    manager = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    assert f"{manager}={PACKAGE}.manager.AgentCoreManager" in theirs
    assert "transfer_queue.enable=true" in theirs


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "missing `agent_runtime_arn`, `s3_bucket`"),
        ([*NEEDED, f"{PREFIX}req_per_sec=3"], "did you mean `reqs_per_sec`"),
        ([*NEEDED, f"{PREFIX}reqs_per_sec=fast"], "`reqs_per_sec` must be int"),
        ([*NEEDED, "trainer.use_v1=False"], "V1 trainer"),
        ([*NEEDED, "actor_rollout_ref.rollout.calculate_log_probs=false"], "sampled logprobs"),
        ([*NEEDED, "data.custom_cls.name=Mine"], "set by this backend"),
        ([*NEEDED, "trainer.v1.trainer_mode=one_step_off"], "sync, colocate_async, separate_async"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        translate(arguments, environ={})


def test_a_file_becomes_the_same_arguments(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    section = {"agent_runtime_arn": ARN, "s3_bucket": "my-bucket", "max_rollout_time": 60}
    path.write_text(json.dumps({"agentcore": section, "overrides": {"actor_rollout_ref.rollout.n": 4}}))
    made = VerlConfig.from_file(path).plan()
    assert made.command is not None
    assert "actor_rollout_ref.rollout.n=4" in made.command
    assert "+agentcore.max_rollout_time=60.0" in made.command


def test_main_prints_the_command_or_the_mistake() -> None:
    main = [sys.executable, "-m", f"{PACKAGE}.main"]
    done = subprocess.run([*main, "--dry-run", *NEEDED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "verl.trainer.main_ppo" in done.stdout
    wrong = subprocess.run([*main, *NEEDED, "trainer.use_v1=false"], capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: trainer.use_v1")


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
        ("ends in \\", "'ends in \\\\'"),
        ("back\\slash", "'back\\slash'"),
        ("run-ö", "'run-ö'"),
        ("a#b;c&d!e~f", "'a#b;c&d!e~f'"),
        ("", "''"),
        (7, "7"),
        (0.5, "0.5"),
        (True, "true"),
        (None, "null"),
        ({"a": 1, "b c": "2"}, "{a:1,b\\ c:'2'}"),
        (["x", None, "3"], "[x,null,'3']"),
    ],
)
def test_values_keep_their_kind_in_hydras_words(value: Any, written: str) -> None:
    assert hydra_value(value) == written
    if isinstance(value, str):
        assert unquoted(written) == value


def test_text_that_looks_like_a_number_stays_text() -> None:
    config, theirs = translate([*NEEDED, "agentcore.exp_id=2026", "agentcore.model_id='17'"], environ={})
    assert (config.exp_id, config.model_id) == ("2026", "17")
    assert "+agentcore.exp_id='2026'" in theirs


def test_the_admin_key_reaches_the_run_and_no_screen() -> None:
    made = plan([*NEEDED, "agentcore.gateway_admin_key=hush", "agentcore.gateway_url=http://gateway:9090"])
    assert made.environment == {"AGENTCORE_RL_GATEWAY_ADMIN_KEY": "hush"}
    assert "hush" not in made.render()


@pytest.mark.parametrize(("given", "written"), [(None, "0.2"), ("0.05", "0.05"), ("null", "null")])
def test_how_far_logprobs_may_differ_reaches_the_run_also_as_without_limit(given: str | None, written: str) -> None:
    key = "agentcore.max_mean_logprob_gap"
    _, theirs = translate([*NEEDED, *([] if given is None else [f"{key}={given}"])], environ={})
    assert [a for a in theirs if key in a] == [f"+{key}={written}"]
    with pytest.raises(ConfigError, match="max_mean_logprob_gap"):
        plan([*NEEDED, f"{key}=0"])
