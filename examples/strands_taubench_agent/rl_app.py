"""The agent of `basic_app.py`, made trainable: another app class, another decorator, a model per rollout, a reward."""

from customer_agent import work_on
from request import Request
from reward import BenchmarkReward
from strands.models.openai import OpenAIModel
from wording import MAX_TOKENS

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure

app = AgentCoreRLApp()
reward = BenchmarkReward()


@app.rollout_entrypoint(on_policy_failure=0.0)
async def invoke_agent(payload):
    request, rollout = Request.of(payload), payload["_rollout"]
    model = OpenAIModel(
        client_args={"base_url": rollout["base_url"], "api_key": rollout.get("api_key", "none")},
        model_id=rollout["model_id"],
        params={"max_tokens": MAX_TOKENS[request.rendering], "extra_body": rollout.get("sampling_params")},
    )
    work = await work_on(request, model)
    PolicyFailure.check_stop(work.stop_reason)  # out of turns: 0, as in the benchmark
    scores = work.episode.scores()
    return {
        "rewards": reward(scores=scores, partial_credit=request.partial_credit),
        "metrics": {
            "published": scores.published,
            "actions": scores.actions,
            "share": scores.share,
            "state": scores.state,
            "tool_calls": work.episode.calls,
        },
        "answer": work.answer,
    }


if __name__ == "__main__":
    app.run()
