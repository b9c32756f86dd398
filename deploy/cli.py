"""The `pilotfish` command line. It assembles the commands and prints every error as one line.

Exit codes: 2 for an error in the configuration or the request, 1 for other errors, 130 after a signal.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from cluster.core.errors import ConfigurationError, InvalidRequest, PilotfishError
from deploy.commands.bench import bench
from deploy.commands.client.chat import chat
from deploy.commands.client.complete import complete
from deploy.commands.client.top import top
from deploy.commands.demo import demo
from deploy.commands.distill import distill
from deploy.commands.doctor import doctor
from deploy.commands.generate import generate
from deploy.commands.plan import plan_command
from deploy.commands.prepare import prepare
from deploy.commands.run_batch import run_batch
from deploy.commands.serve import serve
from deploy.commands.simulate import simulate
from deploy.commands.translate import translate
from deploy.signals import Interrupted
from deploy.terminal import notify, output

cli = typer.Typer(
    name="pilotfish",
    help="Serve a large language model with speculative decoding. By default, the text is exactly the model's own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """Run the command line. This is the `pilotfish` console script."""
    try:
        cli(standalone_mode=True)
    except PilotfishError as error:
        for line in str(error).splitlines():
            notify(f"pilotfish: {line}")
        sys.exit(2 if isinstance(error, ConfigurationError | InvalidRequest) else 1)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print(f"pilotfish {version('pilotfish')}")
        raise typer.Exit


@cli.callback()
def common_options(
    version_wanted: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that every command accepts."""


cli.command("plan")(plan_command)
for command in (prepare, serve, generate, chat, complete, translate, run_batch, top, demo, distill, doctor):
    cli.command()(command)
cli.add_typer(bench, name="bench")
cli.add_typer(simulate, name="simulate")


if __name__ == "__main__":
    main()
