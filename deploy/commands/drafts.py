"""`pilotfish drafts`: the versions of drafts that a server has learned, and the way back to an earlier one."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from cluster.core.config.base import with_home
from cluster.core.errors import ConfigurationError
from cluster.core.ids import scoped_salt
from deploy.commands.options import ConfigOption, SetOption
from deploy.settings import load_settings
from deploy.terminal import notify, output
from workers.draft.common.learning import salt_key
from workers.serve.learning.versions import SaltVersions, roll_back, versions_of


class Action(StrEnum):
    """What to do with the learned versions."""

    LIST = "list"
    ROLLBACK = "rollback"


def drafts(
    action: Annotated[Action, typer.Argument(help="`rollback` serves the version that was served before.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    client: Annotated[
        str | None,
        typer.Option(help="Name of the API key whose drafts are meant, of any cache_salt; empty: without keys."),
    ] = None,
) -> None:
    """List the versions in draft.learn_directory, or go back to the ones that were served before.

    Running servers follow within a second, and no answer changes.
    """
    settings = load_settings(config, assignments or ()).configuration
    if settings.draft.learn_directory is None:
        raise ConfigurationError("draft.learn_directory: needed the directory with the learned versions, found none")
    directory = with_home("draft.learn_directory", settings.draft.learn_directory)
    key = None if client is None else salt_key(scoped_salt(client, "", shares_between_keys=False))
    try:
        if action is Action.ROLLBACK:
            roll_back(directory, key)
        found = [one for one in versions_of(directory) if key in (None, one.key, one.client)]
    except OSError as error:
        needed = "may read" if action is Action.LIST else "may write"
        raise ConfigurationError(f"draft.learn_directory: needed one that this user {needed}; {error}") from None
    if found:
        output.print(_table(found))
    else:
        whose = "" if key is None else " of that client"
        notify(f"{directory} " + (f"has no learned versions{whose}" if directory.is_dir() else "does not exist"))


def _table(found: list[SaltVersions]) -> Table:
    table = Table("salt", "served", "stored", box=SIMPLE, pad_edge=False)
    for one in found:
        table.add_row(one.key, str(one.served), ", ".join(map(str, one.stored)))
    return table
