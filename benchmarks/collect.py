"""CPU per episode from the last byte to training samples: decode, merge, judge, convert for every trainer.

Workload: 1,000 episodes of 20 turns, 500 sampled tokens a turn and 50 tokens of tool results between turns, in groups of 8, as
the gateway sends them (binary records in which each prompt refers to the one before). Sampling, runtime and network are not in
it. `--quick` runs 128 episodes. Prints CPU milliseconds per episode: the mean, and the batch of 64 that took least, which other
load on the machine touches least. The first two rows are parts of what `collect` does, the total is what a trainer pays.

    python benchmarks/collect.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentcore_rl_toolkit.backends import CollectConfig, Group, GroupRequest, collect_async, to_samples
from agentcore_rl_toolkit.backends.slime.convert import to_slime
from agentcore_rl_toolkit.backends.training.batch import to_data
from agentcore_rl_toolkit.backends.trl.convert import to_trl
from agentcore_rl_toolkit.backends.verl.convert import to_verl
from agentcore_rl_toolkit.gateway.capture.record import (
    OK,
    Base,
    CallRecord,
    ChoiceRecord,
    decode,
    encode,
    pack_ids,
    pack_logprobs,
)
from agentcore_rl_toolkit.gateway.capture.turns import expand
from agentcore_rl_toolkit.trajectory import build_trajectory

sys.path.append(str(Path(__file__).parents[1] / "tests" / "backends"))
from recorded import Episode, Replay, ReplayCapture, ReplayGateway

GROUP = 8
BATCH = 64  # episodes alive at once, so that memory does not decide the figures
TARGET_MS = 15.0


def recorded(rng: random.Random, turns: int, tokens: int, between: int) -> list[bytes]:
    """One episode as the gateway's records."""
    frames, length = [], 0
    for k in range(turns):
        fresh = [rng.randrange(150_000) for _ in range(800 if k == 0 else between)]
        record = CallRecord(
            call_id=f"call-{k}",
            index=k,
            status=OK,
            dialect="chat",
            model="policy",
            started_s=float(k),
            first_token_s=float(k),
            finished_s=k + 0.5,
            weight_version_first=3,
            weight_version_last=3,
            prompt_base=Base(f"call-{k - 1}", 0, length) if k else Base(),
            prompt_ids=pack_ids(fresh),
            messages_base=Base(),
            messages=b"[]",
            choices=[
                ChoiceRecord(
                    index=0,
                    ids=pack_ids([rng.randrange(150_000) for _ in range(tokens)]),
                    logprobs=pack_logprobs([-rng.random() for _ in range(tokens)]),
                    finish_reason="stop",
                    parse_status="none",
                    message=b'{"role":"assistant","content":"x"}',
                )
            ],
        )
        frames.append(encode(record))
        length += len(fresh) + tokens
    return frames


class BytesGateway(ReplayGateway):
    """Hands out captures from record bytes, decoded as `GatewayClient` decodes them."""

    def __init__(self, replay: Replay, frames: Sequence[list[bytes]]) -> None:
        super().__init__(replay)
        self.frames = list(frames)
        self.of: dict[str, list[bytes]] = {}

    async def fetch_async(self, session_ids: Sequence[str], *, close: bool = True) -> dict[str, ReplayCapture]:
        found = {}
        for session_id in session_ids:
            whole = expand([decode(frame) for frame in self.of.setdefault(session_id, self.frames.pop())])
            found[session_id] = ReplayCapture(session_id=session_id, turns=whole.turns, dialogue=whole.dialogue)
        return found


@dataclass
class SlimeSample:
    """The fields of slime's Sample that conversion touches."""

    index: int
    group_index: int
    rollout_id: int | None = None
    metadata: Any = None

    class Status:
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        FAILED = "failed"


def slime(groups: list[Group]) -> Any:
    return [
        to_slime(r, SlimeSample(index=i, group_index=0, metadata={})) for g in groups for i, r in enumerate(g.rollouts)
    ]


CONVERTERS: dict[str, Callable[[list[Group]], Any]] = {
    "slime": slime,
    "verl": lambda groups: [to_verl(r) for g in groups for r in g.rollouts],
    "tinker": lambda groups: to_data(to_samples(groups)),
    "trl": lambda groups: to_trl(groups, num_generations=GROUP, filler_id=0),
}


def decoded(frames: Sequence[list[bytes]]) -> list[Any]:
    return [expand([decode(frame) for frame in episode]).turns for episode in frames]


def merged(episodes: list[Any]) -> int:
    return sum(len(build_trajectory("s", turns).sequences) for turns in episodes)


def timed(spent: dict[str, list[float]], name: str, work: Callable[..., Any], *arguments: Any) -> Any:
    began_s = time.process_time()
    result = work(*arguments)
    spent.setdefault(name, []).append((time.process_time() - began_s) / BATCH * 1000)
    return result


def run_batch(rng: random.Random, spent: dict[str, list[float]], turns: int, tokens: int, between: int) -> int:
    frames = [recorded(rng, turns, tokens, between) for _ in range(BATCH)]
    rewards = [rng.random() for _ in range(BATCH)]
    episodes = [Episode(input_id=f"i{i // GROUP}", record={"rewards": r}) for i, r in enumerate(rewards)]
    requests = [GroupRequest(input_id=f"i{g}", payload={}, n=GROUP) for g in range(BATCH // GROUP)]
    timed(spent, "merge", merged, timed(spent, "decode", decoded, frames))
    replay = Replay(episodes)
    gateway = BytesGateway(replay, frames)
    collected = collect_async(
        requests,
        client=replay.client,
        gateway=gateway,
        config=CollectConfig(max_concurrent=BATCH),
        weight_version=3,
    )
    groups = timed(spent, "collect", asyncio.run, collected)
    assert all(r.usable for g in groups for r in g.rollouts)
    timed(spent, "advantages + samples", to_samples, groups)
    for name, convert in CONVERTERS.items():
        timed(spent, name, convert, groups)
    return BATCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 episodes instead of 1,000")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=500, help="sampled tokens a turn")
    parser.add_argument("--between", type=int, default=50, help="tokens of tool results between turns")
    parser.add_argument("--json", type=Path, help="write rows and checks here")
    a = parser.parse_args()
    rng, spent, done = random.Random(0), dict[str, list[float]](), 0
    wanted = 2 * BATCH if a.quick else a.episodes
    while done < wanted:
        done += run_batch(rng, spent, a.turns, a.tokens, a.between)
        gc.collect()
    length = 800 + a.turns * a.tokens + (a.turns - 1) * a.between
    print(f"{done} episodes, {a.turns} turns x {a.tokens} sampled tokens, {length} tokens each, groups of {GROUP}\n")
    rows = []
    for name in ("decode", "merge", "collect", "advantages + samples", *CONVERTERS):
        rows.append({"stage": name, "mean_ms": sum(spent[name]) / len(spent[name]), "best_ms": min(spent[name])})
    slowest = max(CONVERTERS, key=lambda name: sum(spent[name]))
    totals = [a + b for a, b in zip(spent["collect"], spent[slowest], strict=True)]
    rows.append({"stage": "total, slowest trainer", "mean_ms": sum(totals) / len(totals), "best_ms": min(totals)})
    print(f"{'CPU ms per episode':<28}{'mean':>10}{'best batch':>12}")
    for row in rows:
        part = "  " if row["stage"] in ("decode", "merge") else ""
        note = " (part of collect)" if part else ""
        print(f"{part + str(row['stage']) + note:<28}{row['mean_ms']:>10.2f}{row['best_ms']:>12.2f}")
    value = rows[-1]["best_ms" if a.quick else "mean_ms"]
    check = {
        "name": f"CPU ms per episode of {a.turns} x {a.tokens} tokens, slowest trainer ({slowest})",
        "value": value,
        "target": TARGET_MS,
        "ok": value <= TARGET_MS,
    }
    print(
        f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB with {BATCH} episodes at once"
    )
    print(f"\n{'ok  ' if check['ok'] else 'FAIL'} {check['name']}: {value:.2f} (target <= {TARGET_MS:g})")
    if a.json:
        found = {"quick": a.quick, "episodes": done, "rows": rows, "checks": [check]}
        a.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(0 if check["ok"] else 1)


if __name__ == "__main__":
    main()
