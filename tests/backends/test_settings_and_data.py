"""Configuration files, data files and plans that all backends share."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentcore_rl_toolkit.backends.rllm import RllmConfig
from agentcore_rl_toolkit.backends.sagemaker.settings import SageMakerConfig
from agentcore_rl_toolkit.backends.service import AgentSettings, GatewaySettings
from agentcore_rl_toolkit.backends.settings import Settings, SettingsGroup, read_settings
from agentcore_rl_toolkit.backends.slime import SlimeRunner
from agentcore_rl_toolkit.backends.slime.settings import SlimeSettings
from agentcore_rl_toolkit.backends.tinker.settings import TinkerConfig
from agentcore_rl_toolkit.backends.trl import TrlConfig
from agentcore_rl_toolkit.backends.verl.settings import AgentCoreConfig, VerlConfig, translate
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.gateway.client import gateway_urls
from examples.loading import load

TRAINERS = [SlimeRunner, AgentCoreConfig, TrlConfig, RllmConfig, TinkerConfig, SageMakerConfig]


@pytest.mark.parametrize(
    ("make", "service"),
    [
        (SlimeSettings, lambda config: config),
        (AgentCoreConfig, lambda config: config.service("models/small")),
    ],
)
def test_what_backends_share_reaches_the_rollouts_whole(make: Any, service: Any, tmp_path: Path) -> None:
    (tmp_path / "rubric.md").write_text("good")
    judge = {"judge": str(tmp_path / "rubric.md"), "judge_url": "http://h/v1", "judge_model": "m", "judge_weight": 0.5}
    judge |= {"judge_timeout_s": 5.0, "judge_price": (1.0, 2.0)}
    credit = {"teacher_url": "http://t", "reward_weight": 0.5}
    numbers = {"gateway_port": 4711, "gateways": 2, "max_turns": 3, "policy_failures": "mask"}
    texts = [
        *AgentSettings.model_fields,
        *(n for n in GatewaySettings.model_fields if n.endswith(("url", "model", "key"))),
    ]
    given = {name: f"value of {name}" for name in texts} | numbers | judge | credit
    reply = service(make(**given))
    assert {name: getattr(reply, name) for name in given} == given
    assert reply.collect_config().policy_failures == "mask"


SEVERAL = ("http://a:9090", "http://b:9090")


@pytest.mark.parametrize("urls", [list(SEVERAL), ",".join(SEVERAL)], ids=["list", "commas"])
def test_every_trainer_takes_several_gateways(urls: Any, tmp_path: Path) -> None:
    common = {
        "agent_runtime_arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math",
        "s3_bucket": "b",
        "gateway_url": urls,
    }
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    here = {"exp_id": "e", "data_path": str(tmp_path / "rows.jsonl")}

    def file(**values: Any) -> Path:
        path = tmp_path / "settings.json"
        path.write_text(json.dumps({**common, **values}))
        return path

    tinker = TinkerConfig.from_file(file(**here, base_model="m", model_dir=str(tmp_path)))
    trl = TrlConfig.from_file(file(**here, model="m", policy_url="http://p"))
    slime = SlimeSettings.from_args(SimpleNamespace(**common, exp_id="e"))
    config, _ = translate([], {}, common)
    for given in (tinker.gateway_url, tinker.services().gateway_url, trl.gateway_url, slime.gateway_url):
        assert given is not None
        assert gateway_urls(given) == SEVERAL
    assert gateway_urls(config.service("m").gateway_url or "") == SEVERAL
    for plan in (tinker.plan(), trl.plan(), VerlConfig(agentcore=common).plan()):
        assert "http://b:9090" in dict(plan.facts)["gateway_url"]


class _Numbers(SettingsGroup):
    steps: int = 1
    rate: float = 1.0


def test_a_number_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    texts = [("c.json", f'{{"NAME": {value}}}') for value in ("1e999", "NaN", "9" * 5_000, "[" * 100_000)]
    texts += [("c.toml", f"NAME = {value}\n") for value in ("inf", "nan")]
    for name in ("steps", "rate"):
        for file, text in texts:
            (tmp_path / file).write_text(text.replace("NAME", name))
            with pytest.raises(ConfigError):
                _Numbers.from_values(read_settings(tmp_path / file), where="c")


ONE = {"agent_runtime_arn": "a", "s3_bucket": "b", "exp_id": "e", "model_dir": "m", "data_path": "d", "model_type": "t"}


def test_a_setting_has_one_name_and_the_published_ones_besides() -> None:
    published = SlimeRunner(**ONE, acr_timeout=5, rollout_batch_size=4, n_samples_per_prompt=2, lr="1e-5")
    shared = SlimeRunner(**ONE, rollout_timeout_s=5, groups=4, rollouts=2, learning_rate=1e-5)
    nested = SlimeRunner(**ONE, limits={"rollout_timeout_s": 5}, training={"groups": 4, "rollouts": 2, "lr": 1e-5})
    assert published == shared == nested
    assert (published.acr_timeout, published.limits.rollout_timeout_s, published.lr) == (5.0, 5.0, 1e-5)
    assert published.replace(lr=1e-3).training.learning_rate == 1e-3
    with pytest.raises(ConfigError, match="`acr_timeout` and `rollout_timeout_s` are names of one setting"):
        SlimeRunner(**ONE, rollout_timeout_s=5, acr_timeout=6)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_group_of_settings_is_larger_than_a_reader_can_keep_in_mind(trainer: type[Settings]) -> None:
    sizes = Counter(group for group, _ in trainer.known().values())
    assert max(sizes.values()) <= 40


@pytest.mark.parametrize("trainer", TRAINERS)
def test_other_names_are_those_of_settings(trainer: type[Settings]) -> None:
    assert all(place in trainer.known() for place in trainer.ALIASES.values())


def test_the_docs_have_the_settings_of_all_trainers_side_by_side() -> None:
    root = Path(__file__).parents[2]
    made = load(root / "scripts/settings_table.py").page()
    assert (root / "docs/settings.md").read_text() == made, "python scripts/settings_table.py --write"
