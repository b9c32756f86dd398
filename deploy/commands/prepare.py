"""`pilotfish prepare`: put the models into the cache."""

from __future__ import annotations

from deploy.commands.options import ConfigOption, SetOption
from deploy.packaged_drafts import INSTALL, drafts_of, is_installed
from deploy.settings import load_settings
from deploy.terminal import notices, output


def prepare(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Fetch or convert the configured models into the cache. Start nothing."""
    settings = load_settings(config, assignments or ())
    # Importing torch takes seconds, so the settings are checked first.
    from deploy.models import resolve_models

    with notices.status("finding the models") as status:
        models = resolve_models(settings.configuration, settings.cache_directory, status.update)
    for name, directory in (("target", models.target), ("draft", models.draft)):
        if directory is not None:
            output.print(f"{name}: {directory}", markup=False)
    drafts = drafts_of(settings.configuration.target.path)
    present = sorted(name for name, directory in drafts.items() if is_installed(directory))
    if present:
        output.print(f"packaged drafts: {', '.join(present)}", markup=False)
    if len(present) < len(drafts):
        absent = ", ".join(sorted(drafts.keys() - set(present)))
        output.print(f"packaged drafts that are not installed: {absent}; run `{INSTALL}`", markup=False)
