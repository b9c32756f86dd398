"""A whole race: prompts, competitors, measurements, and the files with the results."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path

from transformers.utils import logging as transformers_logging

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from cluster.ingress.text.tokenizer import Tokenizer
from deploy.models import served_name
from deploy.progress import ProgressReporter
from deploy.race.competitors import RaceSettings, find_competitors
from deploy.race.costs import describe_machine
from deploy.race.options import RaceOptions
from deploy.race.results import RaceResults, write_results
from deploy.race.runner import RaceSession, race_clusters
from deploy.race.tables import markdown
from deploy.race.tasks import RaceTasks, read_tasks
from deploy.terminal import notices


def run(options: RaceOptions, race_settings: RaceSettings) -> RaceResults:
    """Run the race and write `race.json`, `race.md` and the plots into `options.out`. Raises `PilotfishError`."""
    transformers_logging.disable_progress_bar()
    plain = race_settings.plain().configuration
    directory = Path(plain.target.path)
    longest = _context_len(plain, directory) - options.max_tokens
    tasks = read_tasks(
        options.prompts, options.task_names, options.prompts_per_task, Tokenizer.load(directory), longest
    )
    competitors, skipped = find_competitors(options, race_settings)
    title = f"{served_name(plain)} in {plain.target.dtype}; {describe_tasks(tasks, options.max_tokens)}"
    results = RaceResults(title, describe_machine(), shlex.join(["pilotfish", *sys.argv[1:]]))
    results.skipped.extend(skipped)
    if not competitors:
        raise ConfigurationError(f"--methods: no competitor can run; {'; '.join(entry.reason for entry in skipped)}")
    with ProgressReporter(notices, "race") as report:
        session = RaceSession(
            options, tasks, results, report, lambda found: write(found, options.out), len(competitors)
        )
        asyncio.run(race_clusters(session, plain, competitors))
    write(results, options.out)
    return results


def write(results: RaceResults, directory: Path) -> None:
    """Write the results so far into the directory: JSON, tables and plots."""
    write_results(results, directory)
    (directory / "race.md").write_text(markdown(results), encoding="utf-8")


def describe_tasks(tasks: RaceTasks, max_tokens: int) -> str:
    """One line about the prompts."""
    lengths = [len(prompt.tokens) for found in tasks.values() for prompt in found]
    if not lengths:
        raise ConfigurationError("--prompts: every prompt is longer than the model's context less --max-tokens")
    return (
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens from {len(tasks)} tasks, "
        f"at most {max_tokens} tokens each"
    )


def _context_len(configuration: Configuration, directory: Path) -> int:
    own = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    return configuration.target.max_context_len or int(own or 1 << 20)
