"""Text to tokens and back: the chat template, rendered, and the tokenizer, with what was seen before remembered.

A conversation is rendered by the same Jinja template that ships beside the weights (``chat_template.jinja``), in the sandbox that
transformers uses, and cut at ``<|im_start|>``: that marker is one token whatever stands around it, so each message can be encoded
on its own and remembered. The next turn of a conversation, and the other rollouts of a group, then cost only their new messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ..errors import PolicyError

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer.json"


class ChatTokenizer:
    """Renders conversations to token ids and decodes tokens. Safe to use from several threads.

    Gives what ``AutoTokenizer.from_pretrained(directory).apply_chat_template(...)`` gives, for a fraction of its CPU time.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, *, remembered: int = 8192) -> None:
        self.tokenizer = tokenizer
        self.template = template
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._compiled = environment.from_string(template)
        self.end_id = self._id_of(END)
        self.pad_id = self._id_of(END_OF_TEXT)
        self._start_id = self._id_of(START)
        self._bytes_of_tokens = _token_bytes_table(tokenizer)
        self._token_json = [(b.decode(errors="replace"), list(b)) for b in self._bytes_of_tokens]
        self._encode_piece = lru_cache(maxsize=remembered)(self._encode_piece_uncached)

    @classmethod
    def from_directory(cls, directory: str | Path) -> ChatTokenizer:
        """Read ``tokenizer.json`` and ``chat_template.jinja``. Raises: PolicyError when either is missing or unreadable."""
        folder = Path(directory)
        try:
            tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
            template = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        except Exception as e:  # tokenizers raises bare Exception
            raise PolicyError(f"no usable tokenizer in {folder}: {e}") from e
        return cls(tokenizer, template)

    @property
    def vocabulary_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text. Raises: PolicyError when the template refuses a message (unknown role, an image, ...)."""
        try:
            return self._compiled.render(
                messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, AttributeError) as e:
            raise PolicyError(f"the messages do not fit the chat template: {e}") from e

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; markers such as ``<|im_end|>`` in it become their single tokens."""
        head, *pieces = text.split(START)
        ids = list(self._encode_piece(head)) if head else []
        for piece in pieces:
            ids.append(self._start_id)
            ids.extend(self._encode_piece(piece))
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation. Raises: PolicyError as `render` does."""
        return self.encode(self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; the marks of tool calls stay, those of messages (``<|im_end|>``, ...) are left out by default."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary writes it: in a byte-level one every byte is a visible character (a space is ``Ġ``)."""
        return str(self.tokenizer.id_to_token(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        return self._bytes_of_tokens[token_id]

    def token_json(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of one token as they stand in JSON; not to be changed, since they are shared."""
        return self._token_json[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of one token; bytes that are no text by themselves are shown as U+FFFD."""
        return self._token_json[token_id][0]

    def _encode_piece_uncached(self, piece: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(piece, add_special_tokens=False).ids)

    def _id_of(self, mark: str) -> int:
        token_id = self.tokenizer.token_to_id(mark)
        if token_id is None:
            raise PolicyError(f"the tokenizer has no token {mark}")
        return int(token_id)


def _token_bytes_table(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes of every token. Byte-level vocabularies write a byte as one visible character; marks stand for themselves."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the assignment of GPT-2, which ByteLevel uses
    hidden = [b for b in range(256) if b not in visible]
    byte_of = {chr(b): b for b in visible} | {chr(256 + k): b for k, b in enumerate(hidden)}
    added = set(tokenizer.get_added_tokens_decoder())
    table = []
    for token_id in range(tokenizer.get_vocab_size()):
        token = tokenizer.id_to_token(token_id) or ""
        table.append(token.encode() if token_id in added else bytes(byte_of[c] for c in token))
    return table


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; transformers replaces it by exactly this.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)
