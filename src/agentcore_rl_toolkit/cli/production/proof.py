"""The proof of a promoted model: it answers, its logprobs are the run's, and the agent handles rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...contract import REFERENCE_FIELD
from ...deploy.calls import Calls
from ...deploy.models.bedrock import ImportedModel
from ...deploy.models.sagemaker import SageMakerEndpoint
from ...errors import AgentCoreRLError, ConfigError

QUESTION = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 32}
ANSWER_S = 300.0
ROWS = 3  # that are sent through the agent
SEQUENCES = 8  # rollouts whose logprobs are compared


def of_model(host: SageMakerEndpoint | ImportedModel, model: Path, calls: Calls) -> dict[str, Any]:
    """Ask a promoted model a question, and compare its logprobs with those of the run. Returns their mean difference.

    An endpoint that fails serves its earlier model again, if it had one. Raises: ConfigError.
    """
    if isinstance(host, ImportedModel):
        _check_answer(host.chat(QUESTION), calls)
        calls.say("logprobs: not compared, because Bedrock documents no token ids for imported models")
        return {}
    try:
        _check_answer(_post(host.address["base_url"], str(calls.region)), calls)
        found = _compare_logprobs(host, model, calls)
    except ConfigError:
        host.reject()
        raise
    host.accept()
    return found


def _check_answer(reply: Any, calls: Calls) -> None:
    message = (reply.get("choices") or [{}])[0].get("message")
    if message is None:
        raise ConfigError(f"the model is in service, but sent no message: {json.dumps(reply)[:500]}")
    calls.say(f"the model answered: {json.dumps(message.get('content') or message.get('tool_calls'))[:200]}")


def _post(url: str, region: str) -> Any:
    import httpx

    from ...app.model import bearer_token

    headers = {"authorization": f"Bearer {bearer_token('sagemaker', region)}"}
    try:
        reply = httpx.post(f"{url}/chat/completions", json={"model": "", **QUESTION}, headers=headers, timeout=ANSWER_S)
        reply.raise_for_status()
        return reply.json()
    except (httpx.HTTPError, ValueError) as e:
        raise ConfigError(f"the endpoint is in service, but does not answer at {url}: {e}") from e


def _compare_logprobs(host: SageMakerEndpoint, model: Path, calls: Calls) -> dict[str, Any]:
    """Compare the endpoint's logprobs with those of the run's last rollouts. Raises: ConfigError for other weights."""
    from ...weights.arrival import MAX_MEAN_GAP

    recorded = list(_recorded(model.parent)) if model.name == "policy" else []
    if not recorded:
        calls.say(f"logprobs: not compared, because there is no run that trained {model} at temperature 1")
        return {}
    gaps: list[float] = []
    try:
        for ids, logprobs in recorded:
            now = [0.0, *host.logprobs(ids)]
            gaps += [abs(now[place] - before) for place, before in logprobs.items()]
    except AgentCoreRLError as e:
        calls.say(f"logprobs: the model returned none: {e}")
        return {}
    mean = sum(gaps) / len(gaps)
    calls.say(
        f"logprobs of {len(gaps)} tokens in {len(recorded)} sequences differ by {mean:.2g} on average from the run's"
    )
    if not mean <= MAX_MEAN_GAP:  # also NaN, of a model that overflows
        raise ConfigError(
            f"the endpoint does not serve the weights of the run: the logprobs differ by {mean:.2g} on average, and rounding "
            f"explains at most {MAX_MEAN_GAP:g}"
        )
    return {"logprob_gap_mean": mean}


def _recorded(run: Path) -> Iterator[tuple[list[int], dict[int, float]]]:
    """Yield the ids of rollouts of a run's last step, and the trainer's logprobs by place, or the sampler's if there are none.

    They are those of the weights before the last update, which moves them by less than `MAX_MEAN_GAP`. Held-out rollouts would be
    of the last weights, but agents may evaluate at another temperature, which the run does not record.
    """
    from ...runs import Query, RunReader, TokenSequence, read_config
    from ...runs.folder import ROLLOUTS

    recorded = (run / ROLLOUTS).is_file()
    if not recorded or (read_config(run).get("sampling_params") or {}).get("temperature", 1) != 1:
        return
    with RunReader(run) as reader:
        last = Query(phase="train", usable=True, sort="step", descending=True)
        for rollout in reader.ids(last, limit=SEQUENCES):
            for each in (reader.rollout(rollout) or {}).get("sequences") or []:
                sequence = TokenSequence.decoded(each)
                given = enumerate(sequence.trainer_logprobs or sequence.logprobs or ())
                logprobs = {place: value for place, value in given if sequence.mask[place] and value is not None}
                if logprobs:
                    yield list(sequence.ids), logprobs


def of_agent(rows: Path, agent: str, endpoint: str, baggage: str | None, calls: Calls) -> None:
    """Call the agent as its users do, with the first rows of a file. Raises: ConfigError if it refuses one."""
    from ...client.evaluation import read_rows
    from ...contract import new_session_id

    for row in read_rows(rows)[:ROWS]:
        payload = {name: value for name, value in row.payload.items() if name != REFERENCE_FIELD}
        which: dict[str, Any] = {"agentRuntimeArn": agent, "qualifier": endpoint, "baggage": baggage}
        which |= {"runtimeSessionId": new_session_id(), "payload": json.dumps(payload).encode()}
        reply = calls("bedrock-agentcore", "InvokeAgentRuntime", **which)
        status, text = reply.get("statusCode", 200), reply["response"].read().decode("utf-8", "replace")
        calls.say(f"{row.input_id}: {status} {text[:200]}")
        if status >= 400:
            raise ConfigError(f"the agent refused {row.input_id}: {text[:500]}")
