"""Writes `rollouts.sqlite`: rollouts with their parts, the trainer's numbers, and the summaries of steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .record import DETAIL, DIALOGUE, TOKENS, Rollout, TokenSequence, numbers_of, pack, searched_text, stored, unpack
from .schema import open_to_write
from .steps import summarize

log = logging.getLogger(__name__)

Step = tuple[str, int | None]  # phase and step


class TokenTexts:
    """Texts by a tokenizer's folder (or its `tokenizer.json`), loaded at the first use.

    Without it, or without the library `tokenizers`, tokens have no text.
    """

    def __init__(self, folder: Path | str) -> None:
        self._path = Path(folder)

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each token id. Bytes that are not text are U+FFFD, as in every decoder."""
        found: dict[int, str] = {}
        for token in ids if self._tokenizer is not None else ():
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            piece = self._tokenizer.id_to_token(token)
            # Decoders of the SentencePiece kind drop the blank that begins a word.
            if piece is not None and piece.startswith("\u2581") and not text.startswith(" "):
                text = " " + text
            found[token] = text if text or piece is None else piece
        return found

    def probe(self, count: int) -> dict[int, str]:
        """Return `of` the special tokens and of about ``count`` others, evenly spaced in the vocabulary."""
        if self._tokenizer is None:
            return {}
        size = self._tokenizer.get_vocab_size()
        return self.of(sorted({*self._tokenizer.get_added_tokens_decoder(), *range(0, size, max(1, size // count))}))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        path = self._path / "tokenizer.json" if self._path.is_dir() else self._path
        try:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path)) if path.is_file() else None
        except ModuleNotFoundError:
            return None
        except Exception as e:  # the library raises plain exceptions; a run without texts is still a run
            log.warning("tokens of this run have no text: %s cannot be read: %s", path, e)
            return None


class Tables:
    """The tables of a run, open for writing. One thread uses it, in transactions.

    Raises: ConfigError when another version wrote them; sqlite3.Error, OSError.
    """

    def __init__(self, path: Path, texts: TokenTexts | None) -> None:
        self.database = open_to_write(path)
        self.execute = self.database.execute
        self._texts = texts
        self._known = set(self._ids_with_text())  # tokens whose text is written
        self._changed: set[Step] = set()  # steps that this transaction changes
        self._open: set[Step] = set(
            self.execute("SELECT phase, step FROM rollouts EXCEPT SELECT phase, step FROM steps")
        )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes of the block, with the summaries of steps, or none of them."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._summarize()
            self.execute("COMMIT")
            self._open = self._changed
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self.execute("ROLLBACK")
                self._known = set(self._ids_with_text())
            raise
        finally:
            self._changed = set()

    def _ids_with_text(self) -> Iterator[int]:
        return (row[0] for row in self.execute("SELECT id FROM token_texts"))

    def close(self) -> None:
        """Close the file. An ended run is one file, unless others have it open."""
        with contextlib.suppress(sqlite3.Error):
            self.execute("PRAGMA busy_timeout=0")
            self.execute("PRAGMA journal_mode=DELETE")
        self.database.close()

    def insert(self, rollout: Rollout) -> None:
        """Add a rollout, or put it in the place of the one of the same session."""
        detail, columns = rollout.detail(), rollout.columns()
        parts = {DETAIL: pack(detail)}
        if rollout.dialogue is not None:
            parts[DIALOGUE] = pack(list(rollout.dialogue))
        if rollout.sequences is not None:
            parts[TOKENS] = pack([sequence.encoded() for sequence in rollout.sequences])
        text = searched_text(rollout.dialogue, detail, columns["error"])
        # Only now, since a rollout that cannot be encoded must leave nothing.
        before = self.execute("SELECT id FROM rollouts WHERE session_id = ?", (rollout.session_id,)).fetchone()
        if before is not None:  # it keeps its number, which addresses name
            self.remove("id = ?", before)
            columns["id"] = before[0]
        names, places = ", ".join(columns), ", ".join("?" * len(columns))
        row = self.execute(f"INSERT INTO rollouts ({names}) VALUES ({places})", tuple(columns.values())).lastrowid
        self._changed.add((rollout.phase, rollout.step))
        every = ((row, *part) for part in parts.items())
        self.database.executemany("INSERT INTO parts (rollout, name, data) VALUES (?, ?, ?)", every)
        document = self.execute("INSERT INTO searched (rollout) VALUES (?)", (row,)).lastrowid
        self.execute("INSERT INTO search (rowid, text) VALUES (?, ?)", (document, text))
        if self._texts is not None:
            new = {token for sequence in rollout.sequences or () for token in sequence.ids} - self._known
            self.database.executemany("INSERT OR IGNORE INTO token_texts VALUES (?, ?)", self._texts.of(new).items())
            self._known |= new

    def annotate(self, session_id: str, columns: dict[str, Any], added: Mapping[int, Mapping[str, Any]]) -> None:
        """Set columns of a rollout, and fields of its sequences by their index. Without such a rollout do nothing."""
        found = "SELECT id, phase, step FROM rollouts WHERE session_id = ?"
        for row, phase, step in self.execute(found, (session_id,)).fetchall():
            self._changed |= {(phase, step), (phase, columns.get("step", step))}
            part = self.execute("SELECT data FROM parts WHERE rollout = ? AND name = ?", (row, TOKENS)).fetchone()
            if added and part is not None:
                sequences = [TokenSequence.decoded(value) for value in unpack(part[0])]
                for index, facts in added.items():
                    length = len(sequences[index].ids)  # what comes from a padded batch may be longer
                    for name, value in facts.items():
                        setattr(sequences[index], name, value[:length] if isinstance(value, Sequence) else value)
                data = pack([sequence.encoded() for sequence in sequences])
                self.execute("UPDATE parts SET data = ? WHERE rollout = ? AND name = ?", (data, row, TOKENS))
                numbers = numbers_of(sequences)
                columns |= {n: numbers[n] for n in ("gap_max", "gap_mean", "entropy_mean") if numbers[n] is not None}
            sets = [f"{name} = ?" for name in columns]
            if "advantage" in columns and "gradient_tokens" not in columns:
                sets.append(f"gradient_tokens = trained_tokens * {int(columns['advantage'] != 0)}")
            if sets:
                values = itertools.starmap(stored, columns.items())
                self.execute(f"UPDATE rollouts SET {', '.join(sets)} WHERE id = ?", (*values, row))

    def remove(self, which: str, values: Sequence[Any]) -> None:
        """Remove the rollouts that a condition selects."""
        for row, phase, step in self.execute(f"SELECT id, phase, step FROM rollouts WHERE {which}", values).fetchall():
            self._changed.add((phase, step))
            for table in ("parts", "searched"):
                self.execute(f"DELETE FROM {table} WHERE rollout = ?", (row,))
            self.execute("DELETE FROM rollouts WHERE id = ?", (row,))

    def move(self, which: str, values: Sequence[Any], phase: str) -> None:
        """Move the rollouts that a condition selects to another phase."""
        for before, step in self.execute(f"SELECT DISTINCT phase, step FROM rollouts WHERE {which}", values).fetchall():
            self._changed |= {(before, step), (phase, step)}
        self.execute(f"UPDATE rollouts SET phase = ? WHERE {which}", (phase, *values))

    def _summarize(self) -> None:
        """Keep the summaries of steps that were changed before this transaction, and remove those of steps that it changes."""
        for step in self._open | self._changed:
            self.execute("DELETE FROM steps WHERE phase = ? AND step IS ?", step)
        for step in self._open - self._changed:
            if summary := summarize(self.execute, *step):
                self.execute("INSERT INTO steps VALUES (?, ?, ?)", (*step, json.dumps(summary)))
