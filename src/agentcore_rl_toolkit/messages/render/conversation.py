"""The history of a session as tokens: its prompts, its sampled answers, and the turn that each request continues.

Theory of operation. Every finished turn is a `Commit`: a row of tokens, and a digest of the messages it stands for
(chained, so that one digest names a whole history). A request continues the deepest commit whose digest is that of a
beginning of its messages; the rest of the messages is rendered after it. Usually the request repeats the previous
one with something appended: comparing the message lists as they are, which Python does at memory speed, then saves
the digest of the history.

An assistant message is matched by its text and calls, not by its ids, blanks at its ends or reasoning: agent
frameworks drop or rewrite those, and the sampled tokens are known. The reasoning may also come back before the
text. In a message with calls the text may be missing, and its blanks may differ. Other words are an edit, which the model must
see. Calls that come back with their ids and with members added to their arguments are the same calls: Claude Code fills in
defaults.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...errors import CaptureError
from ..errors import NOT_JSON
from ..wire.arguments import value_of
from ..wire.history import text_of
from .tokens import TokenRow

_ENCODER = msgspec.json.Encoder(order="deterministic")
_KEEP_LISTS = 4  # branches whose last message list is kept for comparison; others are found by digest

Digest = bytes


def _hash(*parts: bytes) -> Digest:
    return hashlib.blake2b(b"\x00".join(parts), digest_size=16).digest()


def _text(content: Any) -> str:
    return content if isinstance(content, str) else text_of(content)


def _arguments_key(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return value_of(arguments)
    except NOT_JSON:
        return arguments.strip()


def _called(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], _arguments_key(function.get("arguments"))) for function in functions]


def message_digest(message: Mapping[str, Any], *, text: str | None = None) -> Digest:
    """Return the content of a message, however its framework writes it. ``text`` replaces an answer's text."""
    role, content = message["role"], message.get("content")
    words = _text(content) if text is None else text
    if role == "assistant":
        calls = _called(message)
        return _hash(b"assistant", _ENCODER.encode(["".join(words.split()) if calls else words.strip(), calls]))
    if isinstance(content, list) and any(part.get("type") != "text" for part in content):
        body = _ENCODER.encode(content)
    else:
        body = words.encode("utf-8", "surrogatepass")
    return _hash(b"system" if role == "developer" else role.encode(), body)


def _calls_key(message: Mapping[str, Any]) -> Digest | None:
    """Return a digest of the ids of a message's calls, which this gateway made. None: a call has no id."""
    ids = [call.get("id") for call in message.get("tool_calls") or ()]
    return _hash(b"calls", _ENCODER.encode(ids)) if ids and all(ids) else None


def _filled_in(sampled: Sequence[tuple[str, Any]], called: Sequence[tuple[str, Any]]) -> bool:
    """Return True if these are the sampled calls, perhaps with added members. Some agents fill in defaults."""
    if [name for name, _ in sampled] != [name for name, _ in called]:
        return False
    pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(sampled, called, strict=True)]
    return all(
        ours == theirs
        or (isinstance(ours, dict) and isinstance(theirs, dict) and {k: theirs.get(k) for k in ours} == ours)
        for ours, theirs in pairs
    )


@dataclass(slots=True, eq=False)
class Commit:
    """A finished turn: ``row`` has its prompt and completion. ``continued`` counts the prompts made from here."""

    turn_id: str
    digest: Digest
    row: TokenRow
    words: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    continued: int = 0


@dataclass(slots=True, eq=False)
class KnownPrompt:
    """A rendered prompt. The same messages again get the same tokens again.

    ``calls`` counts the calls with this prompt, ``running`` those that have no answer yet.
    """

    digest: Digest
    base: Commit | None
    row: TokenRow
    opens_reasoning: bool
    extended: bool
    calls: int = 0
    running: int = 0


@dataclass(frozen=True, eq=False)
class RenderedPrompt:
    """A prompt as tokens. ``branch_reason`` is one of `trajectory.BRANCH_REASONS`, None if the prompt continues a turn.

    Units: tokens.
    """

    asked: KnownPrompt = field(repr=False)
    branch_reason: str | None
    extended: bool  # False: the full prompt was rendered again
    parent_turn: str | None  # the earlier turn whose prompt and completion are repeated exactly
    reused_tokens: int  # tokens of the parent turn
    length: int
    opens_reasoning: bool  # the prompt itself ends with the opening mark of the model's reasoning
    json: bytes = field(repr=False)  # the ids as JSON text, ready to be put into a request body
    packed: bytes = field(repr=False)  # the ids as uint32

    @property
    def token_ids(self) -> list[int]:
        """Shapes: (P,). A fresh list each time; for sending, `json` is cheaper."""
        return self.asked.row.ids().tolist()


@dataclass(slots=True, eq=False)
class Match:
    """The place of a request in a conversation.

    It has the commit ``base`` that the request continues, the number of messages that this covers, and the digest of all its
    messages. ``root`` identifies its agent: the tools, and the system message if it has one.
    """

    options: Digest  # a digest of the tools and the options
    tools: Digest
    messages: list[dict[str, Any]]
    root: Digest
    digest: Digest
    base: Commit | None = None
    covered: int = 0


class Conversation:
    """The state of one session; `Renderer.render`, `commit` and `abandon` move it.

    ``now`` (unix seconds) is the date for its templates. ``thinking`` are the marks around the model's reasoning.
    Message objects that were passed in must not be changed afterwards. Not thread-safe.
    """

    __slots__ = ("_matches", "_options", "_thinking", "asked", "commits", "now", "roots")

    def __init__(self, *, now: float | None = None, thinking: tuple[str, str] | None = None) -> None:
        self.now = now
        self._thinking = thinking
        self.commits: dict[Digest, Commit] = {}
        self.asked: dict[Digest, KnownPrompt] = {}
        self.roots: set[Digest] = set()
        self._matches: list[Match] = []  # the last ones, for comparison with the next request
        self._options: tuple[Any, Any, Digest, Digest] | None = None

    def _basis(
        self, tools: Sequence[dict[str, Any]] | None, options: Mapping[str, Any] | None
    ) -> tuple[Digest, Digest]:
        """Return the digest of the tools and the options of a history, and the digest of the tools.

        It is cached: tool lists are long and rarely change. ``strict`` is for engines, not for the model.
        """
        known = self._options
        if known is None or known[0] != tools or known[1] != options:
            functions = [{k: v for k, v in tool["function"].items() if k != "strict"} for tool in tools or ()]
            named = _hash(b"tools", _ENCODER.encode(functions))
            digest = _hash(b"options", named, _ENCODER.encode(dict(options or {})))
            known = self._options = (tools, options, digest, named)
        return known[2:]

    def match(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        options: Mapping[str, Any] | None,
    ) -> Match:
        """Find the deepest commit that the messages continue. Cost: O(new messages) if they extend a recent list."""
        (basis, named), first = self._basis(tools, options), messages[0]
        root = basis + message_digest(first) if first["role"] in ("system", "developer") else basis
        found = Match(basis, named, messages, root, basis)
        start = 0
        for known in reversed(self._matches):
            size = len(known.messages)
            if known.options == basis and size <= len(messages) and messages[:size] == known.messages:
                start, found.digest, found.base, found.covered = size, known.digest, known.base, known.covered
                self._matches.remove(known)
                break
        for i, message in enumerate(messages[start:], start):
            if message["role"] != "assistant" or (commit := self._commit(found.digest, message)) is None:
                found.digest = _hash(found.digest, message_digest(message))
            else:
                found.base, found.covered, found.digest = commit, i + 1, commit.digest
        self._matches.append(found)
        del self._matches[:-_KEEP_LISTS]
        return found

    def _commit(self, before: Digest, message: Mapping[str, Any]) -> Commit | None:
        text = _text(message.get("content"))
        for shown in dict.fromkeys((text, self._answer_in(text))):
            if (commit := self.commits.get(_hash(before, message_digest(message, text=shown)))) is not None:
                return commit
        key = _calls_key(message)
        commit = None if key is None else self.commits.get(_hash(before, key))
        if commit is None or not _filled_in(commit.calls, _called(message)):
            return None
        return commit if "".join(self._answer_in(text).split()) in ("", commit.words) else None

    def _answer_in(self, text: str) -> str:
        """Return a text without the reasoning that some agents write before it."""
        if self._thinking is None:
            return text
        _, mark, answer = text.partition(self._thinking[1])
        return answer if mark else text

    def branch_reason(self, match: Match) -> str | None:
        """Return why a prompt does not continue its parent (one of `trajectory.BRANCH_REASONS`). None: it does."""
        again = self.asked.get(match.digest)
        if again is not None:
            return "parallel_calls" if again.running else "resampled"
        base = match.base
        if base is not None:
            if not base.continued:
                return None
            return "parallel_calls" if self._running(base) else "history_rewritten"
        if not self.asked:
            return None
        if match.root not in self.roots:
            # The same conversation with another system message, tool list or options belongs to the same agent.
            messages = match.messages
            for other in reversed(self._matches[:-1]):
                known, size = other.messages, len(other.messages)
                same = messages[0] == known[0]
                if same and other.tools == match.tools and messages[:size] == known:
                    return "options_changed"
                if (same or size > 1) and size < len(messages) and messages[1:size] == known[1:]:
                    return "tools_changed" if same else "history_rewritten"
            return "sub_agent"
        return "parallel_calls" if self._running() else "history_rewritten"

    def _running(self, base: Commit | None = None) -> bool:
        """Return True if a prompt, or a prompt that continues ``base``, has a running call."""
        return any(asked.running and base in (None, asked.base) for asked in self.asked.values())

    def add_prompt(self, match: Match, asked: KnownPrompt) -> None:
        """Count a call with these messages. Their row is recorded at the first."""
        asked.calls += 1
        if match.digest in self.asked:
            return
        self.asked[match.digest] = asked
        self.roots.add(match.root)
        if asked.base is not None:
            asked.base.continued += 1

    def abandon(self, prompt: RenderedPrompt) -> None:
        """Undo `Renderer.render` for a call that failed or was aborted: the next prompt does not count as a branch."""
        asked = prompt.asked
        asked.running -= 1
        asked.calls -= 1
        if asked.calls or asked.running or self.asked.get(asked.digest) is not asked:
            return
        del self.asked[asked.digest]
        base = asked.base
        if base is not None:
            base.continued -= 1
            if base.row.buffer is asked.row.buffer and asked.row.ends_buffer and not base.continued:
                base.row.cut()

    def commit(
        self,
        prompt: RenderedPrompt,
        completion_ids: Sequence[int],
        message: Mapping[str, Any],
        *,
        turn_id: str,
        more: bool = False,
    ) -> None:
        """Record the answer to a prompt.

        ``message`` is what the agent received. ``more``: another choice of the same call follows.
        Shapes: ``completion_ids`` (C,).
        Raises: CaptureError without completion ids: nothing can continue the turn.
        """
        if not len(completion_ids):
            raise CaptureError(f"turn {turn_id} has no completion ids")
        self.add_commit(prompt.asked, turn_id, completion_ids, message)
        if not more:
            prompt.asked.running -= 1

    def add_commit(
        self, asked: KnownPrompt, turn_id: str, completion_ids: Sequence[int], message: Mapping[str, Any]
    ) -> None:
        digest, words, calls = _hash(asked.digest, message_digest(message)), "", list[tuple[str, Any]]()
        digests = [digest]
        if message.get("tool_calls"):
            digests.append(_hash(asked.digest, message_digest(message, text="")))
        if (key := _calls_key(message)) is not None:
            digests.append(_hash(asked.digest, key))
            words, calls = "".join(_text(message.get("content")).split()), _called(message)
        row = asked.row.extended(completion_ids)
        # Two answers with the same text (n > 1, a retry): the agent most likely continues the later one.
        self.commits.update(dict.fromkeys(digests, Commit(turn_id, digest, row, words, calls)))
