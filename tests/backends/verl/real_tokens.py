"""Run by test_real_verl.py in an environment with verl 0.9.x: the rows that our manager writes, and verl's advantages of them,
where each token has its own. TransferQueue is left out: what it would get is kept here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from real_run import composed, tiny_model
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.verl import manager
from agentcore_rl_toolkit.backends.verl.settings import AgentCoreConfig

sys.path.append(str(Path(__file__).parents[1]))
from recorded import Replay, recorded_episodes, requests_for

RESPONSE = 46  # longer rollouts are left out, also of the comparison
out = Path(sys.argv[1])
lengths = [f"actor_rollout_ref.rollout.{name}_length={n}" for name, n in (("prompt", 256), ("response", RESPONSE))]
config = composed(tiny_model(out.parent / "model"), "agentcore.credit=turn", "agentcore.discount=0.9", *lengths)
credit = AgentCoreConfig.of(config)
episodes = [
    dataclasses.replace(e, input_id="x", record={"rewards": [len(t.completion_ids) / 8 for t in e.turns]})
    for e in recorded_episodes(640)
    if e.kind in ("multi_turn", "single", "rewritten")
][:8]
replay = Replay(episodes)
settings = credit.service("tiny").collect_config()
(group,) = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway, config=settings)
written: dict[str, Any] = {}
manager.tq.kv_batch_put = lambda **arguments: written.update(arguments)
made = manager.AgentCoreManager(config, None)
made._numbers = SimpleNamespace(left_out=lambda *_: None, wrote=lambda *_: None)  # no folder is kept
made._write(group, {"global_steps": 1, "uid": "u0"}, "u0", "train")
data = DataProto(batch=written["fields"].select("response_mask", "rm_scores").to_padded_tensor())
data.batch["token_level_rewards"] = data.batch["rm_scores"]
found = compute_advantage_for_multi_trajectories(
    data, written["keys"], adv_estimator=config.algorithm.adv_estimator, config=config.algorithm
)
sessions = {rollout.index: rollout.session_id for rollout in group.rollouts}
rows = found.batch["advantages"].tolist()
fitting = [
    r
    for r in group.rollouts
    if r.trajectory and all(len(s.token_ids) - s.prompt_length <= RESPONSE for s in r.trajectory.sequences)
]
out.write_text(
    json.dumps(
        {
            "rows": [
                [sessions[int(key.rsplit("_", 2)[1])], row] for key, row in zip(written["keys"], rows, strict=True)
            ],
            "wanted": [
                [s.session_id, s.advantages]
                for s in to_samples([dataclasses.replace(group, rollouts=fitting)], credit=credit)
            ],
        }
    )
)
