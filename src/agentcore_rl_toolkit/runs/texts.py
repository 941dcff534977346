"""The text of single tokens, so that a run can be read where its tokenizer is not."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class TokenTexts:
    """Texts by a tokenizer's folder (or its `tokenizer.json`), loaded at the first use.

    Where there is none, or the library `tokenizers` is not installed, tokens have no text.
    """

    def __init__(self, folder: Path | str) -> None:
        self._path = Path(folder)
        self._tokenizer: Any = None
        self._tried = False

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Token id -> its text. Bytes that are no text of their own are U+FFFD, as every decoder shows them."""
        if not self._tried:
            self._tried = True
            self._tokenizer = self._load()
        if self._tokenizer is None:
            return {}
        found: dict[int, str] = {}
        for token in ids:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            piece = self._tokenizer.id_to_token(token)
            # Decoders of the SentencePiece kind drop the blank that begins a word.
            if piece is not None and piece.startswith("\u2581") and not text.startswith(" "):
                text = " " + text
            found[token] = text if text or piece is None else piece
        return found

    def _load(self) -> Any:
        path = self._path / "tokenizer.json" if self._path.is_dir() else self._path
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            return None
        if not path.is_file():
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain exceptions; a run without texts is still a run
            log.warning("tokens of this run have no text: %s cannot be read: %s", path, e)
            return None
