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
from deploy.race.competitors import RaceSettings, draft_model_directory, find_competitors
from deploy.race.contestants.peers import PEERS
from deploy.race.costs import describe_machine
from deploy.race.options import RaceOptions
from deploy.race.report.charts import speedup_by_task, throughput_by_batch
from deploy.race.report.tables import markdown
from deploy.race.results import RaceResults, write_results
from deploy.race.runner import RaceSession, Report, race_clusters, race_endpoints
from deploy.race.tasks import RaceTasks, read_tasks
from deploy.terminal import notices
from workers.model.stretch import read_stretch


def run(options: RaceOptions, race_settings: RaceSettings) -> RaceResults:
    """Run the race and write `race.json`, `race.md` and the plots into `options.out`. Raises `PilotfishError`."""
    transformers_logging.disable_progress_bar()
    return _run_endpoints(options) if options.endpoint else _run_clusters(options, race_settings)


def _run_clusters(options: RaceOptions, race_settings: RaceSettings) -> RaceResults:
    plain = race_settings.plain().configuration
    directory = Path(plain.target.path)
    longest = _context_len(plain, directory) - options.max_tokens
    tokenizer = Tokenizer.load(directory)
    tasks = read_tasks(options.prompts, options.task_names, options.prompts_per_task, tokenizer, longest)
    competitors, skipped = find_competitors(options, race_settings)
    peers = PEERS if options.peers else ()
    if not competitors and not peers:
        raise ConfigurationError(f"--methods: no competitor can run; {'; '.join(entry.reason for entry in skipped)}")
    title = f"{served_name(plain)} in {plain.target.dtype}; {describe_tasks(tasks, options.max_tokens)}"
    results = _empty(title)
    results.stretch = str(read_stretch(directory) or "")
    results.skipped.extend(skipped)
    with ProgressReporter(notices, "race") as report:
        session = _session(options, tasks, results, report, len(competitors) + len(peers))
        asyncio.run(race_clusters(session, plain, competitors, peers, lambda: draft_model_directory(race_settings)))
    write(results, options.out)
    return results


def _run_endpoints(options: RaceOptions) -> RaceResults:
    url, model = options.endpoint or "", options.model or ""
    tasks = read_tasks(options.prompts, options.task_names, options.prompts_per_task, None, None)
    results = _empty(f"{model} at {url}; {sum(map(len, tasks.values()))} prompts ({', '.join(tasks)})")
    with ProgressReporter(notices, "race") as report:
        session = _session(options, tasks, results, report, 1)
        asyncio.run(race_endpoints(session, url, options.plain_endpoint, model))
    write(results, options.out)
    return results


def _empty(title: str) -> RaceResults:
    return RaceResults(title, describe_machine(), shlex.join(["pilotfish", *sys.argv[1:]]))


def _session(options: RaceOptions, tasks: RaceTasks, results: RaceResults, report: Report, total: int) -> RaceSession:
    return RaceSession(options, tasks, results, report, lambda found: write(found, options.out), total)


def write(results: RaceResults, directory: Path) -> None:
    """Write the results so far into the directory: JSON, tables and plots."""
    write_results(results, directory)
    (directory / "race.md").write_text(markdown(results), encoding="utf-8")
    for name, picture in (("speedup.png", speedup_by_task(results)), ("throughput.png", throughput_by_batch(results))):
        if picture is not None:
            (directory / name).write_bytes(picture)


def describe_tasks(tasks: RaceTasks, max_tokens: int) -> str:
    """One line about the prompts."""
    lengths = [len(prompt.tokens) for found in tasks.values() for prompt in found]
    if not lengths:
        raise ConfigurationError("--prompts: every prompt is longer than the model's context less --max-tokens")
    return (
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens ({', '.join(tasks)}), "
        f"at most {max_tokens} tokens each"
    )


def _context_len(configuration: Configuration, directory: Path) -> int:
    own = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    return configuration.target.max_context_len or int(own or 1 << 20)
