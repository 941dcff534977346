"""Help that fits a screen: the usual options in groups, all of them under `--help-all`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import click


class Command(click.Command):
    """A command whose `--help` shows the options that most callers need, under headings, and its first paragraph.

    ``sections`` maps a heading to the parameters below it. What is in no section is shown by `--help-all` only, which has all
    paragraphs, too. A paragraph that begins with ``\\b``, such as an example, is always shown.
    """

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sections = sections
        whole = click.Option(["--help-all"], is_flag=True, expose_value=False, is_eager=True, callback=_print_all)
        whole.help = "Show this with every option and detail."
        self.params.append(whole)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole = self.help
        if not ctx.meta.get(_ALL) and whole:
            first, *rest = inspect.cleandoc(whole).split("\n\n")
            self.help = "\n\n".join([first, *(text for text in rest if text.startswith("\b"))])
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = whole

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {p.name: p.get_help_record(ctx) for p in self.get_params(ctx)}
        shown = {title: [records.pop(name) for name in names] for title, names in self.sections.items()}
        help_option = self.get_help_option(ctx)
        last = ("as_json", "help_all", help_option.name if help_option is not None else None)
        usual = [records.pop(name) for name in last if name in records]
        if ctx.meta.get(_ALL):
            shown["Rarely needed"] = list(records.values())
        shown[list(shown)[-1]] += usual
        for title, rows in shown.items():
            with formatter.section(title):
                formatter.write_dl([row for row in rows if row is not None])


_ALL = f"{__name__}.all"


def _print_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
