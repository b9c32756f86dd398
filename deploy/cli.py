"""The `pilotfish` command line. It assembles the commands and prints every error as one line.

Exit codes: 2 for an error in the configuration or the request, 1 for other errors, 130 after a signal.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, NoReturn

import typer

from cluster.core.errors import ConfigurationError, PilotfishError
from deploy.signals import SIGNALLED, Interrupted, status_of
from deploy.terminal import notify, output


@dataclass(frozen=True, slots=True)
class _Added:
    """A command of a distribution of its own, which an extra of `pilotfish` installs."""

    module: str
    attribute: str
    extra: str
    help: str


_COMMANDS: dict[str, str | _Added] = {
    "plan": "plan:plan_command",
    "prepare": "prepare:prepare",
    "serve": "serve:serve",
    "drafter": "drafter:drafter",
    "generate": "generate:generate",
    "chat": "client.chat:chat",
    "complete": "client.complete:complete",
    "translate": "translate:translate",
    "run-batch": "run_batch:run_batch",
    "top": "client.top:top",
    "demo": "demo:demo",
    "distill": _Added("deploy.distillation.command", "distill", "distill", "Train a draft."),
    "doctor": "doctor:doctor",
    "drafts": "drafts:drafts",
    "bench": _Added("deploy.bench.commands", "bench", "bench", "Measure drafting methods, or a server under load."),
    "simulate": _Added(
        "deploy.simulation.commands", "simulate", "simulate", "Run the control plane on a virtual clock."
    ),
}
"""The commands, by name: the module in `deploy.commands` and what it has, or a command of another distribution."""


def main() -> NoReturn:
    """Run the command line. This is the `pilotfish` console script."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of libraries; Pilotfish shows its own
    _accept_any_text()
    try:
        key = _completed_key(os.environ)
        command_line(sys.argv[1:])(standalone_mode=True, prog_name="pilotfish", obj=key)
    except PilotfishError as error:
        for line in str(error).splitlines():
            notify(f"pilotfish: {line}")
        sys.exit(status_of(error))
    except OSError as error:
        if error.filename is None:  # it says too little without the code that raised it
            raise
        notify(f"pilotfish: {error}")
        sys.exit(1)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(SIGNALLED)
    sys.exit(0)


def _accept_any_text() -> None:
    """Let the standard streams read bytes and write characters that their encoding does not have.

    A byte that is read so becomes half of a surrogate pair, as in the arguments of the process; a character is written
    as a backslash and its code, as on stderr.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _completed_key(environment: MutableMapping[str, str]) -> str:
    """The setting whose value bash asks for; empty where it asks for something else.

    To bash, `draft.method=n` is three words, and it replaces the last one alone. That one remains.
    """
    cursor = int(environment.get("COMP_CWORD", 0))
    words = environment.get("COMP_WORDS", "").split("\n")[: cursor + 1]
    if "=" not in words:
        return ""
    completed = "" if words[-1] == "=" else words.pop()
    key = ""
    if words[-1] == "=":
        words.pop()
        key = "" if words[-1].startswith("-") else words.pop()
    if words[-1] == "=":
        words.pop()
    whole = "\n".join(words).replace("\n=\n", "=").split("\n")
    environment.update({"COMP_WORDS": "\n".join([*whole, completed]), "COMP_CWORD": str(len(whole))})
    return key


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print(f"pilotfish {version('pilotfish')}")
        raise typer.Exit


def common_options(
    version_wanted: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that every command accepts."""


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """The command line with the command that the arguments begin with, or with all if they begin otherwise.

    The modules of all commands take a second to import.
    """
    cli = typer.Typer(
        name="pilotfish",
        help="Serve a large language model with speculative decoding. By default, the text is exactly the model's own.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    cli.callback()(common_options)
    for name in [one for one in arguments[:1] if one in _COMMANDS] or _COMMANDS:
        _add(cli, name, _COMMANDS[name])
    return cli


def _add(cli: typer.Typer, name: str, listed: str | _Added) -> None:
    if isinstance(listed, str):
        module, _, attribute = listed.partition(":")
        command = getattr(import_module(f"deploy.commands.{module}"), attribute)
    elif find_spec(listed.module.rpartition(".")[0]) is None:
        _add_missing(cli, name, listed)
        return
    else:
        command = getattr(import_module(listed.module), listed.attribute)
    if isinstance(command, typer.Typer):
        cli.add_typer(command, name=name)
    else:
        cli.command(name, help=_reflowed(inspect.getdoc(command) or ""))(command)


def _reflowed(text: str) -> str:
    """The text with a line for each paragraph. Typer breaks lines at the terminal's width, but keeps other breaks."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _add_missing(cli: typer.Typer, name: str, listed: _Added) -> None:
    """Add a command that says what to install, whatever its arguments are."""
    install = f"pip install 'pilotfish[{listed.extra}]'"

    def refuse() -> None:
        raise ConfigurationError(f"{name}: not installed; run `{install}`")

    whatever = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    cli.command(name, help=f"{listed.help} Not installed: {install}", context_settings=whatever)(refuse)


if __name__ == "__main__":
    main()
