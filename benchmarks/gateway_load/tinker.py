"""Sampling at Tinker's service: the rehearsal service as a process, and the same calls through Tinker's own SDK.

python -m gateway_load.tinker serve
python -m gateway_load.tinker sample URL AGENTS CALLS      prints CPU seconds of all its calls
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

PROMPT_IDS = [300 + i % 200 for i in range(400)]
TOKENS = 1024
BASE_MODEL = "scripted/model"


async def serve() -> None:
    from agentcore_rl_toolkit.policy.tinker.service import ScriptedModel, TinkerServer

    model = ScriptedModel(base_model=BASE_MODEL, tokens=TOKENS)
    model.first_id, model.last_id = 300, 500
    async with TinkerServer(model) as running:
        print(running.url, flush=True)
        await asyncio.Event().wait()


async def sample(url: str, agents: int, calls: int) -> float:
    """CPU seconds of the calls: without a gateway, a chat template, a store, or anybody to answer."""
    import tinker

    client = await asyncio.to_thread(tinker.ServiceClient, base_url=url, api_key="tml-benchmark")
    sampler = await client.create_sampling_client(base_model=BASE_MODEL)
    prompt = tinker.ModelInput.from_ints(PROMPT_IDS)
    params = tinker.SamplingParams(max_tokens=TOKENS, temperature=1.0)

    async def agent() -> None:
        for _ in range(calls):
            await sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)

    before = time.process_time()
    await asyncio.gather(*(agent() for _ in range(agents)))
    return time.process_time() - before


if __name__ == "__main__":
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        print(asyncio.run(sample(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)
        os._exit(0)  # its background thread may still talk to the service
