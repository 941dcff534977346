"""A teacher: an engine with another model of the student's vocabulary, asked for the logprobs of what the student sampled.

Its route is vLLM's ``/v1/completions`` with token ids and ``prompt_logprobs``, which the built-in policy server has, too.
Source: vLLM 0.32, `entrypoints/openai/completion/protocol.py`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UpstreamError
from ...logs import WarnsOnceAMinute
from ...runs import TokenTexts
from .groups import CollectedRollout

KEY_ENV = "AGENTCORE_RL_TEACHER_KEY"
CALL_S = 120.0  # reads 100,000 tokens
ATTEMPTS, PAUSE_S = 3, 1.0
AT_ONCE = 16  # calls; tokens of a probe
PROBED = 128  # tokens whose texts are compared, besides the special ones

_failures = WarnsOnceAMinute(logging.getLogger(__name__))


class Teacher:
    """The engine at a URL. Raises: UpstreamError when it does not answer, or not with logprobs."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="teacher")

    @functools.cached_property
    def model(self) -> str:
        """The name of the model that it serves."""
        try:
            return str(self._ask("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as e:
            raise UpstreamError(f"the teacher {self.url} names no model at /v1/models") from e

    def read(self, ids: Sequence[int]) -> list[tuple[float, str]]:
        """Logprob and text of each token but the first. Shapes: (T,) -> (T - 1,)."""
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._ask("/v1/completions", body)
                break
            except UpstreamError as e:
                status = getattr(e.__cause__, "code", 500)  # what is refused once is refused again
                if attempt == ATTEMPTS or (status < 500 and status != 429):
                    raise
                time.sleep(PAUSE_S * attempt)
        try:
            given = answer["choices"][0]["prompt_logprobs"]
            found = [entry[str(token)] for token, entry in zip(ids[1:], given[1:], strict=True)]
            return [(float(token["logprob"]), str(token["decoded_token"])) for token in found]
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise UpstreamError(
                f"the teacher {self.url} gives no prompt_logprobs of token ids: it must be vLLM or `policy serve`"
            ) from e

    def check(self, tokenizer: Path | str | None) -> None:
        """Compare what the tokens mean to student and teacher: the special ones, and others from all over the vocabulary.

        ``tokenizer`` is the student's folder. Raises: ConfigError with the reason.
        """
        texts = TokenTexts(tokenizer).probe(PROBED) if tokenizer is not None else {}
        if not texts:
            raise ConfigError(
                "a teacher needs the student's tokenizer, to compare their vocabularies: there is no tokenizer.json in "
                f"{tokenizer} (gateway_model, or the model's folder)"
            )
        ids = list(texts)
        try:
            read = [token for i in range(0, len(ids), AT_ONCE) for token in self.read([ids[0], *ids[i : i + AT_ONCE]])]
        except UpstreamError as e:
            raise ConfigError(f"this teacher cannot teach this student: {e}") from e
        for (token, own), (_, text) in zip(texts.items(), read, strict=True):
            # Decoders differ in the blanks around words, and in bytes that are no text of their own.
            mine, its = "".join(own.split()), "".join(text.split())
            if mine and its and "\ufffd" not in mine + its and mine != its:
                raise ConfigError(
                    f"the teacher {self.url} has another vocabulary: token {token} is {own!r} to the student and {text!r} to "
                    "the teacher; distillation compares probabilities of the same tokens, so both need one tokenizer"
                )

    async def taught(self, rollout: CollectedRollout) -> CollectedRollout:
        """The rollout with the teacher's logprobs minus the student's; masked where the teacher fails."""
        if not rollout.usable or rollout.trajectory is None:
            return rollout
        loop, gaps = asyncio.get_running_loop(), {}
        try:
            for index, sequence in enumerate(rollout.trajectory.sequences):
                if not sequence.trained_tokens:
                    continue
                read = await loop.run_in_executor(self._pool, self.read, sequence.token_ids)
                start = sequence.prompt_length
                each = zip(read[start - 1 :], sequence.logprobs[start:], strict=True)
                gaps[index] = [0.0 if own is None else logprob - own for (logprob, _), own in each]
        except UpstreamError as e:
            _failures.warning("rollout %s is masked: %s", rollout.session_id, e)
            return replace(rollout, mask_reason="teacher", error=e)
        return replace(rollout, teacher_gaps=gaps)

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"content-type": "application/json"}
        if key := os.environ.get(KEY_ENV):
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data=data, headers=headers), timeout=CALL_S
            ) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as e:
            with e:
                text = e.read(500).decode("utf-8", "replace")
            raise UpstreamError(f"the teacher {self.url} refused {path}: {e.code} {text}") from e
        except (OSError, ValueError) as e:
            raise UpstreamError(f"the teacher {self.url} did not answer {path}: {e}") from e


@functools.cache
def teacher_at(url: str) -> Teacher:
    """The teacher of this process."""
    return Teacher(url)
