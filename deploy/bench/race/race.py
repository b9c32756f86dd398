"""A whole race: prompts, competitors, measurements, and the files with the results."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers.utils import logging as transformers_logging

from cluster.core.errors import ConfigurationError
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.contestants.answers import BenchTasks
from deploy.bench.contestants.peers import PEERS
from deploy.bench.measuring.competitors import BenchSettings, draft_model_directory, find_competitors
from deploy.bench.measuring.results import BenchResults, write_json
from deploy.bench.measuring.runner import PeerMethods, bench_clusters, bench_endpoints
from deploy.bench.measuring.session import BenchSession, Report, Schedule, run_to_the_end
from deploy.bench.measuring.setup import context_len, describe_tasks, empty_results, endpoint_results, read_tasks
from deploy.bench.options import RaceOptions
from deploy.bench.race.report import markdown
from deploy.bench.report.charts import speedup_by_task, throughput_by_batch
from deploy.models import served_name
from deploy.progress import ProgressReporter
from deploy.settings import Settings
from deploy.terminal import notices
from workers.model.stretch import read_stretch


def run(options: RaceOptions, settings_source: BenchSettings) -> BenchResults:
    """Run the race and write `race.json`, `race.md` and the plots into `options.out`. Raises `PilotfishError`."""
    transformers_logging.disable_progress_bar()
    return _run_endpoints(options, settings_source.client()) if options.url else _run_clusters(options, settings_source)


def _run_clusters(options: RaceOptions, settings_source: BenchSettings) -> BenchResults:
    plain = settings_source.plain().configuration
    directory = Path(plain.target.path)
    longest = context_len(plain, directory) - options.max_tokens
    tokenizer = Tokenizer.load(directory)
    tasks = read_tasks(options.prompts, options.task_names, options.prompts_per_task, tokenizer, longest)
    competitors, skipped = find_competitors(options, settings_source)
    peers = PEERS if options.peers else ()
    if not competitors and not peers:
        raise ConfigurationError(f"--methods: no competitor can run; {'; '.join(entry.reason for entry in skipped)}")
    title = f"{served_name(plain)} in {plain.target.dtype}; {describe_tasks(tasks, options.max_tokens)}"
    results = empty_results(title)
    results.stretch = str(read_stretch(directory) or "")
    results.skipped.extend(skipped)
    with ProgressReporter(notices, "race") as report:
        session = _session(options, tasks, results, report, len(competitors) + len(peers))
        methods = PeerMethods(peers, partial(draft_model_directory, settings_source), options.peer_seconds)
        measuring = bench_clusters(session, plain, competitors, methods, together=options.together)
        run_to_the_end(measuring, partial(write, results), options.out)
    return results


def _run_endpoints(options: RaceOptions, settings: Settings) -> BenchResults:
    tasks = read_tasks(options.prompts, options.task_names, options.prompts_per_task, None, None)
    results = endpoint_results(options, tasks)
    with ProgressReporter(notices, "race") as report:
        session = _session(options, tasks, results, report, 1)
        run_to_the_end(bench_endpoints(session, options, settings), partial(write, results), options.out)
    return results


def _session(
    options: RaceOptions, tasks: BenchTasks, results: BenchResults, report: Report, total: int
) -> BenchSession:
    schedule = Schedule(options.max_tokens, options.batches, options.temperatures, options.repeats, options.seed)
    return BenchSession(schedule, tasks, results, report, lambda found: write(found, options.out), total)


def write(results: BenchResults, directory: Path) -> None:
    """Write the results so far into the directory: JSON, tables and plots."""
    write_json(results.to_json(), directory / "race.json")
    (directory / "race.md").write_text(markdown(results), encoding="utf-8")
    for name, picture in (("speedup.png", speedup_by_task(results)), ("throughput.png", throughput_by_batch(results))):
        if picture is not None:
            (directory / name).write_bytes(picture)
