"""A teacher: an engine with another model of the student's vocabulary, asked for the logprobs of the student's tokens.

Its route is vLLM's ``/v1/completions`` with token ids and ``prompt_logprobs``, which the built-in policy server has, too.
Source: vLLM 0.32, `entrypoints/openai/completion/protocol.py`.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import ConfigError, UpstreamError
from ...logs import WarnsOnceAMinute
from ...runs import TokenTexts
from .._portal import portal
from ..chat import reply, tried
from .groups import CollectedRollout

KEY_ENV = "AGENTCORE_RL_TEACHER_KEY"
CALL_S = 120.0  # time to read 100,000 tokens
PROBED = 128  # tokens whose texts are compared, besides the special ones
MAX_GAP = 20.0  # nats between teacher and student; vLLM writes -9999 for a token of probability 0

_failures = WarnsOnceAMinute(logging.getLogger(__name__))
Token = tuple[float, str]  # its logprob and its text


class Teacher:
    """The engine at a URL. Raises: UpstreamError when it does not answer, or not with logprobs."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._model: str | None = None  # the name of the model that it serves

    async def read(self, ids: Sequence[int]) -> list[Token]:
        """Return logprob and text of each token but the first. Shapes: (T,) -> (T - 1,)."""
        return await tried(lambda: self._completed(ids), functools.partial(self._read, ids))

    async def _completed(self, ids: Sequence[int]) -> bytes:
        key, url = os.environ.get(KEY_ENV), self.url
        if self._model is None:
            models = await reply(f"{url}/v1/models", None, key=key, timeout_s=CALL_S)
            try:
                self._model = str(json.loads(models)["data"][0]["id"])
            except (LookupError, TypeError, ValueError) as e:
                raise UpstreamError("it lists no model at /v1/models", status=200) from e
        body = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        return await reply(f"{url}/v1/completions", body, key=key, timeout_s=CALL_S)

    def _read(self, ids: Sequence[int], data: bytes) -> list[Token]:
        try:
            given = json.loads(data)["choices"][0]["prompt_logprobs"]
            found = [entry[str(token)] for token, entry in zip(ids[1:], given[1:], strict=True)]
            return [(float(token["logprob"]), str(token["decoded_token"])) for token in found]
        except (LookupError, TypeError, ValueError) as e:
            raise UpstreamError(
                "it returns no prompt_logprobs of token ids: a teacher must be vLLM or `policy serve`", status=200
            ) from e

    def check(self, tokenizer: Path | str | None) -> None:
        """Compare the student's and the teacher's texts of tokens: of special ones, and of others from all over the vocabulary.

        ``tokenizer`` is the student's folder. Raises: ConfigError with the reason.
        """
        texts = TokenTexts(tokenizer).probe(PROBED) if tokenizer is not None else {}
        if not texts:
            raise ConfigError(
                "a teacher needs the student's tokenizer, to compare their vocabularies: there is no tokenizer.json in "
                f"{tokenizer} (gateway_model, or the model's folder)"
            )
        first, *_ = texts
        probe = [first, *texts]
        try:
            read = self._read(probe, portal.call(self._completed(probe)))
        except UpstreamError as e:
            raise ConfigError(f"the teacher {self.url} cannot teach this student: {e}") from e
        for (token, own), (_, text) in zip(texts.items(), read, strict=True):
            # Decoders differ in the blanks around words, and in bytes that are not text by themselves.
            mine, its = "".join(own.split()), "".join(text.split())
            if mine and its and "\ufffd" not in mine + its and mine != its:
                raise ConfigError(
                    f"the teacher {self.url} has another vocabulary: token {token} is {own!r} to the student and {text!r} to "
                    "the teacher; distillation compares probabilities of the same tokens, so both need one tokenizer"
                )

    async def taught(self, rollout: CollectedRollout) -> CollectedRollout:
        """Add the teacher's logprobs minus the student's to a rollout. Mask it if the teacher fails."""
        if not rollout.usable or rollout.trajectory is None:
            return rollout
        gaps = {}
        try:
            for index, sequence in enumerate(rollout.trajectory.sequences):
                if not sequence.trained_tokens:
                    continue
                read = await self.read(sequence.token_ids)
                start = sequence.prompt_length
                each = zip(read[start - 1 :], sequence.logprobs[start:], strict=True)
                gaps[index] = [0.0 if own is None else _bounded(logprob - own) for (logprob, _), own in each]
        except UpstreamError as e:
            _failures.warning("rollout %s is masked: the teacher %s: %s", rollout.session_id, self.url, e)
            return replace(rollout, mask_reason="teacher", error=e)
        return replace(rollout, teacher_gaps=gaps)


def _bounded(gap: float) -> float:
    """Bound the gap of tokens that the teacher never samples: they would outweigh all others. Raises: UpstreamError on NaN."""
    if math.isnan(gap):
        raise UpstreamError("its logprobs are not numbers (NaN)", status=200)
    return max(-MAX_GAP, min(MAX_GAP, gap))


@functools.cache
def teacher_at(url: str) -> Teacher:
    return Teacher(url)
