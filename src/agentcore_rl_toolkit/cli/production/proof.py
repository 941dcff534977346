"""The proof of a promoted model: it answers, its logprobs are the run's, and the agent handles rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import AgentCoreRLError, ConfigError

if TYPE_CHECKING:
    from ...deploy.calls import Calls
    from ...deploy.models import ImportedModel, SageMakerEndpoint

QUESTION = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 32}
ANSWER_S = 300.0
ROWS = 3  # that are sent through the agent
SEQUENCES = 8  # rollouts whose logprobs are compared


class Proof:
    """Asks a promoted model. ``say`` takes one line for each result.

    Raises (all its methods): ConfigError, RefusedError.
    """

    def __init__(self, host: SageMakerEndpoint | ImportedModel, calls: Calls, say: Callable[[str], None]) -> None:
        self._host, self._call, self._say = host, calls, say

    def ask(self) -> None:
        """Ask the model a question, as an agent does."""
        from ...deploy.models import ImportedModel

        reply = self._host.chat(QUESTION) if isinstance(self._host, ImportedModel) else self._post(QUESTION)
        try:
            message = reply["choices"][0]["message"]
        except (LookupError, TypeError) as e:
            raise ConfigError(f"the model is in service, but sent no message: {json.dumps(reply)[:500]}") from e
        self._say(f"the model answered: {json.dumps(message.get('content') or message.get('tool_calls'))[:200]}")

    def _post(self, body: Mapping[str, Any]) -> Any:
        import httpx

        from ...app.model import bearer_token

        url = self._host.address["base_url"]
        headers = {"authorization": f"Bearer {bearer_token('sagemaker', str(self._call.region))}"}
        try:
            reply = httpx.post(f"{url}/chat/completions", json={"model": "", **body}, headers=headers, timeout=ANSWER_S)
            reply.raise_for_status()
            return reply.json()
        except (httpx.HTTPError, ValueError) as e:
            text = e.response.text[:500] if isinstance(e, httpx.HTTPStatusError) else ""
            raise ConfigError(f"the endpoint is in service, but does not answer at {url}: {e} {text}".rstrip()) from e

    def compare_logprobs(self, model: Path) -> dict[str, Any]:
        """Compare the model's logprobs of the run's last rollouts with those that the run recorded.

        Return the mean difference in nats, if both have logprobs. Raises: ConfigError if it is that of other weights.
        """
        from ...deploy.models import ImportedModel
        from ...weights.arrival import MAX_MEAN_GAP

        if isinstance(self._host, ImportedModel):
            self._say("logprobs: not compared, because Bedrock documents no token ids for imported models")
            return {}
        recorded = list(_recorded(model.parent)) if model.name == "policy" else []
        if not recorded:
            self._say(f"logprobs: not compared, because there is no run that trained {model} at temperature 1")
            return {}
        gaps: list[float] = []
        for ids, logprobs in recorded:
            try:
                now = [0.0, *self._host.logprobs(ids)]
            except AgentCoreRLError as e:
                self._say(f"logprobs: the model returned none: {e}")
                return {}
            gaps += [abs(now[place] - before) for place, before in logprobs.items()]
        mean = sum(gaps) / len(gaps)
        self._say(
            f"logprobs of {len(gaps)} tokens in {len(recorded)} sequences differ by {mean:.2g} on average from the run's"
        )
        if mean > MAX_MEAN_GAP:
            raise ConfigError(
                f"the endpoint serves other weights than the run's: their logprobs differ by {mean:.2g} on average, and by at "
                f"most {MAX_MEAN_GAP:g} through rounding"
            )
        return {"logprob_gap_mean": mean}

    def send_rows(self, rows: Path, agent: str, endpoint: str, baggage: str | None) -> None:
        """Call the agent as its users do, with the first rows. Raises: ConfigError if it refuses one."""
        from ...client.evaluation import read_rows
        from ...contract import new_session_id

        for row in read_rows(rows)[:ROWS]:
            reply = self._call(
                "bedrock-agentcore",
                "InvokeAgentRuntime",
                agentRuntimeArn=agent,
                qualifier=endpoint,
                runtimeSessionId=new_session_id(),
                payload=json.dumps(row.payload).encode(),
                baggage=baggage,
            )
            text = reply["response"].read().decode("utf-8", "replace")
            self._say(f"{row.input_id}: {reply.get('statusCode', 200)} {text[:200]}")
            if reply.get("statusCode", 200) >= 400:
                raise ConfigError(f"the agent refused {row.input_id}: {text[:500]}")


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
