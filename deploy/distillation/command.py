"""`pilotfish distill`: train a draft model for a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cluster.core.errors import ConfigurationError
from deploy.commands.options import ConfigOption, SetOption
from deploy.dataclass_options import command_with_options
from deploy.distillation.recipe import recipe_values, recipes, summary
from deploy.progress import ProgressReporter
from deploy.settings import load_settings
from deploy.terminal import notices, output
from workers.distill.options import SINGLE_PROCESS, DistillOptions
from workers.model.draft_card import LAYERS


def _print_recipes(is_wanted: bool) -> None:
    if is_wanted:
        for name in recipes():
            output.print(f"{name:10} {summary(name)}", markup=False)
        raise typer.Exit


RecipesOption = Annotated[
    bool,
    typer.Option("--recipes", callback=_print_recipes, is_eager=True, help="Print the packaged recipes and exit."),
]


@command_with_options(DistillOptions, recipe_values)
def distill(
    options: DistillOptions,
    config: ConfigOption = None,
    assignments: SetOption = None,
    recipes_wanted: RecipesOption = False,  # noqa: ARG001 - its callback has ended the command
) -> None:
    """Train a draft: the target answers prompts, and a small model or a module learns to predict the answers."""
    chosen = tuple(assignments or ())
    settings = load_settings(config, chosen)
    target = settings.configuration.target
    if target.tensor_parallel > 1 and options.kind not in SINGLE_PROCESS:
        raise ConfigurationError(
            f"target.tensor_parallel: {target.tensor_parallel} is refused for kind {options.kind}, for which one "
            f"process has the whole target; it must be 1, or the kind {' or '.join(SINGLE_PROCESS)}"
        )
    if options.plan:
        from deploy.distillation.training_plan import print_plan

        print_plan(options, Path(target.path), target.tensor_parallel, target.quantization)
        return
    # These import torch, once all options are checked.
    from deploy.distillation.rank_writer import RankWriter
    from deploy.distillation.served_texts import Server
    from deploy.distillation.single_process_job import distill_in_one_process
    from deploy.distillation.target import LocalTarget
    from deploy.models import resolve_models, served_name
    from workers.distill.job import DistillJob
    from workers.distill.modules.module_pipeline import distill_module
    from workers.distill.output import check_replaceable
    from workers.distill.seq2seq_data import is_encoder_decoder
    from workers.distill.student_pipeline import check_options, distill_model

    check_replaceable(options.out)
    if options.kind == LAYERS:
        check_options(options)
    with notices.status("looking for the target") as status:
        models = resolve_models(settings.configuration, settings.cache_directory, status.update)
    server = None if options.url is None else Server(settings, options.url, options.cacert)
    if server is not None and is_encoder_decoder(models.target):
        raise ConfigurationError(
            "--url: refused for an encoder-decoder target; the command translates its sources itself"
        )
    job = DistillJob(
        options=options,
        configuration=models.configuration,
        target=models.target,
        name=served_name(models.configuration),
        command_line=options.command_line(config, chosen),
        notices=(told := _TerminalNotices()),
        served=LocalTarget(models.configuration, server, told.print),
        ranks=partial(RankWriter, models.configuration, told.print),
    )
    make: Callable[[DistillJob], None] = distill_model if options.kind == LAYERS else distill_module
    if options.kind in SINGLE_PROCESS:
        make = partial(distill_in_one_process, server=server)
    try:
        make(job)
    except KeyboardInterrupt:
        notices.print(
            f"stopped; what is done is in {options.work_directory}, and the same command goes on from there",
            markup=False,
        )
        raise


class _TerminalNotices:
    """Lines and progress bars on stderr. It is a `Notices`."""

    def print(self, text: str) -> None:
        notices.print(text, markup=False)

    def stage(self, title: str, seconds: float = math.inf) -> AbstractContextManager[ProgressReporter]:
        return ProgressReporter(notices, title, seconds=seconds)
