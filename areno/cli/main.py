"""The `areno` command: its subcommands, and how a failure leaves the process."""

from __future__ import annotations

import io
import sys
from importlib import import_module

import click

from areno import __version__
from areno.cli.ending import clean_up_on_sigterm, was_terminated
from areno.cli.options import HELP
from areno.errors import ArenoError, UsageError

_COMMANDS = {
    "train": "Post-train a language model with GRPO or GSPO.",
    "reward": "Try a reward function on real rows.",
    "check": "Tell what this machine can run, and what to do about the rest.",
}


class _Commands(click.Group):
    """Imports the module of a command when it is asked for, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"areno.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings=HELP)
@click.version_option(__version__, prog_name="areno")
def cli() -> None:
    """RL post-training of language models on one node: `areno train --help` lists everything that can be set."""


def main(args: list[str] | None = None) -> None:
    """Run a command and end the process.

    Exit codes: 0, 2 for something the user passed in (one sentence on stderr), 1 for a fault in mid-run (likewise),
    130 for Ctrl-C, 143 for SIGTERM. Anything else is a fault of this program and shows its traceback.
    """
    clean_up_on_sigterm()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to stop
    try:
        sys.exit(cli.main(args, prog_name="areno", standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message(), err=True)
        sys.exit(exc.exit_code)
    except click.UsageError as exc:
        asked = exc.ctx.command_path if exc.ctx else "areno"
        _fail(f"{exc.format_message()} See `{asked} --help`.", exc.exit_code)
    except click.ClickException as exc:
        _fail(exc.format_message(), exc.exit_code)
    except ArenoError as exc:
        if exc.details:
            click.echo(exc.details.rstrip(), err=True)
        _fail(str(exc), 2 if isinstance(exc, UsageError) else 1)
    except click.Abort:
        if was_terminated():
            _fail("terminated", 143)
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    click.echo(f"areno: error: {message}", err=True)
    sys.exit(code)
