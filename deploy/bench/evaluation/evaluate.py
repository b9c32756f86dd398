"""A whole evaluation: tasks, competitors, measurements, and the files with the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers.utils import logging as transformers_logging

from cluster.core.errors import ConfigurationError
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.contestants.answers import BenchPrompt, BenchTasks
from deploy.bench.contestants.peers import GENERATE, PEERS, Peer
from deploy.bench.evaluation.evaluation import Evaluation, Scoreboard
from deploy.bench.evaluation.report import markdown, roofline
from deploy.bench.evaluation.tasks.arithmetic import read_arithmetic
from deploy.bench.evaluation.tasks.code import read_code
from deploy.bench.evaluation.tasks.correction import read_correction
from deploy.bench.evaluation.tasks.spec_bench import read_spec_bench
from deploy.bench.evaluation.tasks.task import Example, Task
from deploy.bench.evaluation.tasks.translation import TASK as TRANSLATION_TASKS
from deploy.bench.evaluation.tasks.translation import read_translation
from deploy.bench.measuring.competitors import (
    BenchSettings,
    Competitor,
    Skipped,
    draft_model_directory,
    find_competitors,
)
from deploy.bench.measuring.costs import configuration_cost
from deploy.bench.measuring.meter import ResourceMeter
from deploy.bench.measuring.results import BenchResults, write_json
from deploy.bench.measuring.roofs import measure_roofs
from deploy.bench.measuring.runner import PeerMethods, bench_clusters, bench_endpoints
from deploy.bench.measuring.session import BenchSession, Report, Schedule, run_to_the_end
from deploy.bench.measuring.setup import chosen_tasks, context_len, empty_results, endpoint_results, render_prompt
from deploy.bench.options import EvaluationOptions
from deploy.bench.report.charts import speedup_by_task
from deploy.models import served_name
from deploy.progress import ProgressReporter
from deploy.settings import Settings
from deploy.terminal import notices
from workers.model.stretch import read_stretch
from workers.model.weight_files import is_encoder_decoder

_WARM_TOKENS = 64
"""Most tokens of the answers before the measurements. In these, every task has a bound of its own."""


def run(options: EvaluationOptions, settings_source: BenchSettings) -> tuple[Evaluation, ...]:
    """Run the evaluation of each target and write `tasks.json`, `tasks.md` and the plots into its directory.

    Raises `PilotfishError`.
    """
    transformers_logging.disable_progress_bar()
    if options.url:
        return (_run_endpoints(options, settings_source.client()),)
    return tuple(_run_clusters(part, settings) for part, settings in by_target(options, settings_source))


def by_target(
    options: EvaluationOptions, settings_source: BenchSettings
) -> tuple[tuple[EvaluationOptions, BenchSettings], ...]:
    """The options and the settings of each target: that of the settings, then `options.translator`."""
    if not options.translator:
        return ((options, settings_source),)
    names = options.task_names
    others = tuple(name for name in names if not name.startswith(TRANSLATION_TASKS))
    found: list[tuple[EvaluationOptions, BenchSettings]] = []
    if others or (not names and (options.correction or options.spec_bench or options.arithmetic or options.code)):
        own = replace(options, translator="", translation=None, tasks=",".join(others))
        found.append((own, settings_source))
    if not names or len(others) < len(names):
        translating = replace(options, translator="", correction=None, spec_bench=None, arithmetic=None, code=None)
        tasks = ",".join(name for name in names if name not in others)
        translating = replace(translating, tasks=tasks, out=options.out / "translation")
        assignments = (*settings_source.assignments, f"target.path={options.translator}")
        found.append((translating, BenchSettings(settings_source.config, assignments)))
    return tuple(found)


def _run_clusters(options: EvaluationOptions, settings_source: BenchSettings) -> Evaluation:
    tasks, left_out = read_suite(options)
    plain = settings_source.plain().configuration
    directory = Path(plain.target.path)
    tokenizer = Tokenizer.load(directory)
    form = options.form
    source_alone = is_encoder_decoder(directory) if form == "auto" else form == "source"
    tasks, prompts = with_prompts(tasks, tokenizer, context_len(plain, directory), source_alone=source_alone)
    competitors, skipped = find_competitors(options, settings_source)
    peers = find_peers(competitors) if options.peers else ()
    if not competitors and not peers:
        raise ConfigurationError(f"--methods: no competitor can run; {'; '.join(entry.reason for entry in skipped)}")
    results = empty_results(f"{served_name(plain)} in {plain.target.dtype}; {_describe(prompts)}")
    results.stretch = str(read_stretch(directory) or "")
    results.skipped.extend((*left_out, *skipped))
    results.plain_cost = configuration_cost(plain)
    evaluation = Evaluation(results, tasks, _scoreboard(tasks, tokenizer))
    evaluation.roofs = measure_roofs(plain.target.dtype, plain.target.device)
    with ProgressReporter(notices, "tasks") as report:
        session = _session(options, evaluation, prompts, report, len(competitors) + len(peers))
        methods = PeerMethods(peers, partial(draft_model_directory, settings_source), options.peer_seconds)
        measuring = bench_clusters(session, plain, competitors, methods, together=options.together)
        run_to_the_end(measuring, partial(write, evaluation), options.out)
    return evaluation


def find_peers(competitors: tuple[Competitor, ...]) -> tuple[Peer, ...]:
    """The methods of `transformers`, with a beam search for each one among the competitors."""
    beams = {found.request: None for found in competitors if found.request.beams > 1}
    return (*PEERS, *(Peer(GENERATE, request) for request in beams))


def _run_endpoints(options: EvaluationOptions, settings: Settings) -> Evaluation:
    tasks, left_out = read_suite(options)
    tasks, prompts = with_prompts(tasks, None, None, source_alone=options.form == "source")
    results = endpoint_results(options, prompts)
    results.skipped.extend(left_out)
    evaluation = Evaluation(results, tasks, _scoreboard(tasks, None))
    with ProgressReporter(notices, "tasks") as report:
        session = _session(options, evaluation, prompts, report, 1)
        measuring = bench_endpoints(session, options, settings, predicts=options.send_prediction)
        run_to_the_end(measuring, partial(write, evaluation), options.out)
    return evaluation


def _session(
    options: EvaluationOptions, evaluation: Evaluation, prompts: BenchTasks, report: Report, total: int
) -> BenchSession:
    bounds = {task.name: task.max_tokens for task in evaluation.tasks}
    warm = min(_WARM_TOKENS, *bounds.values())
    schedule = Schedule(warm, options.batches, options.temperatures, options.repeats, options.seed)
    # Without ids, a server at a URL is elsewhere, and this process is only its client.
    meter = ResourceMeter(options.server_pid) if options.server_pid or not options.url else None

    def save(_: BenchResults) -> None:
        write(evaluation, options.out)

    return BenchSession(schedule, prompts, evaluation.results, report, save, total, bounds, meter)


def _scoreboard(tasks: tuple[Task, ...], tokenizer: Tokenizer | None) -> Scoreboard:
    return Scoreboard({task.name: task for task in tasks}, None if tokenizer is None else tokenizer.decode)


def _describe(prompts: BenchTasks) -> str:
    lengths = [len(prompt.tokens) for found in prompts.values() for prompt in found]
    counts = ", ".join(f"{name}: {len(found)}" for name, found in prompts.items())
    return f"prompts of {min(lengths)} to {max(lengths)} tokens ({counts})"


def write(evaluation: Evaluation, directory: Path) -> None:
    """Score what is new, and write the results so far into the directory: JSON, tables and plots."""
    evaluation.quality.update(evaluation.results)
    write_json(evaluation.to_json(), directory / "tasks.json")
    (directory / "tasks.md").write_text(markdown(evaluation), encoding="utf-8")
    pictures = {"speedup.png": speedup_by_task(evaluation.results), "roofline.png": roofline(evaluation)}
    for name, picture in pictures.items():
        if picture is not None:
            (directory / name).write_bytes(picture)


def read_suite(options: EvaluationOptions) -> tuple[tuple[Task, ...], tuple[Skipped, ...]]:
    """The chosen tasks, and those that are left out with the reason.

    Raises `ConfigurationError` for a file that cannot be read, and for an unknown task with the known ones.
    """
    tasks = {task.name: task for task in _read(options)}
    skipped = []
    if options.code and not options.execute_code:
        skipped.append(Skipped("code", "it runs what the model writes, which needs --execute-code"))
    chosen = chosen_tasks(tasks, options.task_names, "files").values()
    bound = options.max_tokens
    return tuple(replace(task, max_tokens=bound or task.max_tokens) for task in chosen), tuple(skipped)


def _read(options: EvaluationOptions) -> Iterator[Task]:
    most = options.examples
    if options.translation:
        yield read_translation(options.translation, options.languages, most)
    if options.correction:
        yield read_correction(options.correction, options.sentences_per_prompt, most)
    if options.spec_bench:
        yield from read_spec_bench(options.spec_bench, most)
    if options.arithmetic:
        yield read_arithmetic(options.arithmetic, most)
    if options.code and options.execute_code:
        yield read_code(options.code, most)


def with_prompts(
    tasks: tuple[Task, ...], tokenizer: Tokenizer | None, context_len: int | None, *, source_alone: bool
) -> tuple[tuple[Task, ...], BenchTasks]:
    """The prompts by task. Examples whose prompt and answer are longer than the context are left out of both.

    Raises `ConfigurationError` for a task of which nothing is left.
    """
    kept: list[Task] = []
    prompts: BenchTasks = {}
    for task in tasks:
        longest = None if context_len is None else context_len - task.max_tokens
        pairs = [(example, _prompt(example, tokenizer, longest, source_alone)) for example in task.examples]
        fitting = [(example, prompt) for example, prompt in pairs if prompt is not None]
        if not fitting:
            raise ConfigurationError(
                f"{task.name}: every prompt is longer than {longest} tokens, the model's context less --max-tokens"
            )
        kept.append(replace(task, examples=tuple(example for example, _ in fitting)))
        prompts[task.name] = tuple(prompt for _, prompt in fitting)
    return tuple(kept), prompts


def _prompt(
    example: Example, tokenizer: Tokenizer | None, longest: int | None, source_alone: bool
) -> BenchPrompt | None:
    text = example.prompt(source_alone=source_alone)
    return render_prompt(text, tokenizer, longest, prediction=example.prediction, as_chat=not source_alone)
