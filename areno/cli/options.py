"""Command line options made from the declarations in `areno.config`, and a help page grouped by concern."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import click

from areno.config import knobs
from areno.knobs import Knob

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class GroupedCommand(click.Command):
    """Lists its options under the concern that each belongs to."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, params in groupby(self.params, key=lambda param: getattr(param, "group", "Other")):
            with formatter.section(group):
                formatter.write_dl([record for p in params if (record := p.get_help_record(ctx)) is not None])


class KnobOption(click.Option):
    """The option of one knob."""

    def __init__(self, knob: Knob) -> None:
        switch = knob.type is bool
        names = f"{knob.option}/--no-{knob.option[2:]}" if switch else knob.option
        default: dict[str, Any] = {"required": True} if knob.required else {"default": knob.default}
        super().__init__(
            [names, knob.name],
            type=None if switch else click.Choice(knob.choices) if knob.choices else knob.type,
            show_default=knob.default is not None,
            help=knob.help,
            metavar=knob.metavar or None,
            **default,
        )
        self.group = knob.group


def knob_options() -> list[click.Parameter]:
    """An option for every knob, in the order of the declarations."""
    return [KnobOption(knob) for knob in knobs()]


def changed(ctx: click.Context) -> set[str]:
    """The options that were given on the command line, as `--name`."""
    given = click.core.ParameterSource.COMMANDLINE
    return {knob.option for knob in knobs() if ctx.get_parameter_source(knob.name) is given}


def grouped(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Option values under the concern that each belongs to, named as on the command line."""
    return {group: {k.option: values[k.name] for k in some} for group, some in groupby(knobs(), key=lambda k: k.group)}
