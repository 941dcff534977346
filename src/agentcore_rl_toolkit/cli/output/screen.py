"""Commands whose help was once in sections."""

from __future__ import annotations

from typing import Any

import click


class Command(click.Command):
    """A plain command; ``sections`` is not used any more."""

    def __init__(self, *arguments: Any, sections: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
