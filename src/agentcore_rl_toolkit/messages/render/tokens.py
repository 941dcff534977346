"""Text <-> token ids: a thin layer over `tokenizers`, and decoding of a growing list of ids."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..._installation import missing_extra
from ...errors import ConfigError
from .parsers.base import any_of

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\ufffd"
_CHARACTER = 4  # tokens, and bytes, that one may be spread over
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_LIKE_A_MARKER = re.compile(
    r"[<\[\]|｜].+[>\[\]|｜]", re.DOTALL
)  # added tokens that are words or blanks are no markers


class PlainText:
    """Replaces markers in texts and encodes what a template made of them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, own_marks: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        found = tokenizer.added_texts
        markers = [text for text in found if _LIKE_A_MARKER.fullmatch(text)]
        self._word = f"\ue0f0{secrets.token_hex(8)}"
        self._texts = markers
        self._places = {text: place for place, text in enumerate(markers)}
        self._all = any_of(tuple(markers))
        # The policy's own marks of reasoning and of calls mean something to the template also in an answer's text.
        self._in_answers = any_of(tuple(text for text in markers if not any(text in mark for mark in own_marks)))
        pattern = any_of(found)
        self._pieces = None if pattern is None else re.compile(f"({pattern.pattern})")  # the template's markers
        self._masked = re.compile(self._word + "_([0-9]+)\ue0f1")
        self._plain = tokenizer.without_markers()

    def mask(self, value: Any, *, sampled: bool = False) -> Any:
        """Return the same JSON value with words in place of markers."""
        pattern = self._in_answers if sampled else self._all
        if isinstance(value, str) and pattern is not None:
            return pattern.sub(lambda match: f"{self._word}_{self._places[match[0]]}\ue0f1", value)
        if isinstance(value, list):
            return [self.mask(item, sampled=sampled) for item in value]
        if isinstance(value, dict):
            return {key: self.mask(item, sampled=sampled) for key, item in value.items()}
        return value

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self.mask(message, sampled=message.get("role") == "assistant") for message in messages]

    def shown(self, text: str) -> str:
        return self._masked.sub(lambda match: self._texts[int(match[1])], text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a template's text."""
        if self._word not in text or self._pieces is None:
            return self._tokenizer.encode(text)
        ids: list[int] = []
        for masked, pieces in itertools.groupby(self._pieces.split(text), lambda piece: self._word in piece):
            part = "".join(pieces)
            ids += self._plain.encode(self.shown(part)) if masked else self._tokenizer.encode(part)
        return ids


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file as a dict, empty when there is no such file. Raises: ConfigError when it does not decode."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid JSON: {e}") from e
    return found if isinstance(found, dict) else {}


class Tokenizer:
    """A model's tokenizer, as chat rendering uses it. Thread-safe; encoding and decoding release the GIL.

    It adds no tokens, and recognizes special tokens in the text (`plain_text` keeps those of messages out of it).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._text_of_added = {token_id: token.content for token_id, token in added.items()}
        eos = self.special_tokens.get("eos_token")
        known = None if eos is None else backend.token_to_id(eos)
        self.eos_ids = frozenset([*eos_ids, *([] if known is None else [known])])
        self.byte_of = {
            backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)
        }  # the bytes of byte-fallback tokens

    @property
    def added_texts(self) -> tuple[str, ...]:
        return tuple(self._text_of_added.values())

    def without_markers(self) -> Tokenizer:
        """Return a tokenizer that encodes markers as plain text. It shares the vocabulary with this one."""
        from tokenizers import models

        plain = type(self._backend)(models.BPE())
        for name in ("normalizer", "pre_tokenizer"):
            if (part := getattr(self._backend, name)) is not None:
                setattr(plain, name, part)
        plain = plain.from_str(plain.to_str().replace('"prepend_scheme":"first"', '"prepend_scheme":"never"'))
        plain.model = self._backend.model
        return Tokenizer(plain)

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Load ``tokenizer.json`` and the settings of a model directory. Raises: ConfigError, MissingExtraError."""
        folder = Path(path)
        config = read_json(folder / "tokenizer_config.json")
        special = special_token_texts(config)
        for name, text in special_token_texts(read_json(folder / "special_tokens_map.json")).items():
            special.setdefault(name, text)
        eos_ids = generation_eos_ids(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json; save_pretrained of a fast tokenizer of transformers writes one"
            )
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as e:
            raise missing_extra(f"rendering needs {e.name}", "gateway") from e
        try:
            backend = Backend.from_file(str(file))
        except Exception as e:  # the library raises bare Exception
            raise ConfigError(f"{file} is not a tokenizer: {e}") from e
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, special_tokens=special, eos_ids=eos_ids)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Shapes: -> (T,). No start token is added: templates write it themselves."""
        # The fast variant leaves out character offsets, which are not needed here.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens shown."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def id_of(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def text_of(self, token_id: int) -> str:
        """Return the text of one token as it stands in a rendered template."""
        known = self._text_of_added.get(token_id)
        return known if known is not None else self.decode([token_id])

    @property
    def vocabulary_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def vocabulary_digest(self) -> str:
        """Return a digest of the vocabulary: which ids stand for which texts. Cost: 0.2 s for 150,000 tokens."""
        known = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        return hashlib.blake2b(msgspec.json.encode(known), digest_size=16).hexdigest()


def special_token_texts(config: dict[str, Any]) -> dict[str, str]:
    """Return ``eos_token`` and other special tokens as plain strings. Some files hold objects with a ``content``."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def generation_eos_ids(folder: Path) -> list[int]:
    """Return ``eos_token_id`` of generation_config.json, or of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        if isinstance(value, int):
            return [value]
        if isinstance(value, list):
            return [item for item in value if isinstance(item, int)]
    return []


@dataclass(eq=False)
class TextDecoder:
    """Ids, as they come, -> text, such that the pieces joined are the decoding of the whole.

    A character may be spread over several tokens: what could still change is held back. Byte-fallback tokens are held back up
    to the next other token, because a wrong byte changes the text of all adjacent bytes. Some decoders treat the first
    token differently (a leading space), so a window of tokens already shown is decoded along with the new ones. A long window
    is decoded only when its last tokens show that its text has an end.
    """

    tokenizer: Tokenizer
    _ids: list[int] = field(default_factory=list)
    _shown: int = 0  # ids of the window whose text is out

    def feed(self, ids: Sequence[int]) -> str:
        self._ids += ids
        if not ids or ids[-1] in self.tokenizer.byte_of:
            return ""
        if len(self._ids) - self._shown > _CHARACTER:
            end = self.tokenizer.decode(self._ids[-_CHARACTER:])
            if not end or end.endswith(_REPLACEMENT):
                return ""
        before = self.tokenizer.decode(self._ids[: self._shown])
        now = self.tokenizer.decode(self._ids)
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return ""
        del self._ids[: self._shown]
        self._shown = len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """Return the text held back; an unfinished character becomes U+FFFD, as in a decoding of the whole."""
        text = ""
        if len(self._ids) > self._shown:  # else all is shown
            before = self.tokenizer.decode(self._ids[: self._shown])
            text = self.tokenizer.decode(self._ids)[len(before) :]
        self._ids.clear()
        self._shown = 0
        return text


class Buffer:
    """A growing row of token ids: four bytes each, and as JSON text.

    A prompt of 100,000 tokens is sent in every turn. With its text, this is a copy instead of 100,000 conversions.
    """

    __slots__ = ("ids", "text")

    def __init__(self, ids: array[int], text: bytearray) -> None:
        self.ids = ids
        self.text = text


class TokenRow:
    """The first ``length`` tokens of a buffer, which take ``text_bytes`` as JSON text. Rows of one branch share their buffer."""

    __slots__ = ("buffer", "length", "text_bytes")

    def __init__(self, buffer: Buffer | None = None) -> None:
        self.buffer = Buffer(array("I"), bytearray()) if buffer is None else buffer
        self.length = len(self.buffer.ids)
        self.text_bytes = len(self.buffer.text)

    @property
    def ends_buffer(self) -> bool:
        return len(self.buffer.ids) == self.length

    def extended(self, ids: Sequence[int]) -> TokenRow:
        """Return the row with more tokens. It gets its own buffer if another row continues this one."""
        buffer = self.buffer
        if not self.ends_buffer:
            buffer = Buffer(self.ids(), buffer.text[: self.text_bytes])
        if len(ids):
            if buffer.text:
                buffer.text += b","
            buffer.text += msgspec.json.encode(list(ids))[1:-1]
            buffer.ids.extend(ids)
        return TokenRow(buffer)

    def cut(self) -> None:
        """Drop the tokens in the buffer that continue this row."""
        del self.buffer.ids[self.length :]
        del self.buffer.text[self.text_bytes :]

    def ids(self) -> array[int]:
        return self.buffer.ids[: self.length]

    def tail(self, count: int) -> array[int]:
        return self.buffer.ids[max(self.length - count, 0) : self.length]

    def json(self) -> bytes:
        # A slice, not a view: while a view exists no other thread could extend the text.
        return b"".join((b"[", self.buffer.text[: self.text_bytes], b"]"))
