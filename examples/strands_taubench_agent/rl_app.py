"""The agent of `basic_app.py` for production and training: another app class, `app.model`, and a function for rollouts."""

import os

from customer_agent import work_on
from request import Request
from reward import BenchmarkReward
from wording import MAX_TOKENS

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()
reward = BenchmarkReward()


async def work(request):
    given = app.model(default=os.environ.get("MODEL_ID"))
    return await work_on(request, given.strands_model(max_tokens=MAX_TOKENS[request.rendering]))


@app.entrypoint
async def invoke_agent(payload):
    done = await work(Request.of(payload))
    return {"answer": done.answer, "tool_calls": done.episode.calls}


@app.rollout_entrypoint(on_policy_failure=0.0)
async def rollout(payload):
    request = Request.of(payload)
    done = await work(request)
    PolicyFailure.check_stop(done.stop_reason)  # out of turns: 0, as in the benchmark
    scores = done.episode.scores()
    return {
        "rewards": reward(scores=scores, partial_credit=request.partial_credit),
        "metrics": {
            "published": scores.published,
            "actions": scores.actions,
            "share": scores.share,
            "state": scores.state,
            "tool_calls": done.episode.calls,
        },
        "answer": done.answer,
    }


if __name__ == "__main__":
    app.run()
