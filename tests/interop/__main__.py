"""`make interop`: other engines, each in an environment of its own, with what Pilotfish gives them.

    python -m tests.interop [--only speculators,transformers,formats,vllm] [--model NAME] [--draft NAME]
                            [--head DIRECTORY] [--head-name TEXT] [--drafted 5] [--max-tokens 96] [--keep]

The library `speculators` loads tiny drafts as training stores them (EAGLE-3, DSpark) and computes what Pilotfish
computes, within 1e-5. It also writes the outputs again that are stored beside tests (P-EAGLE, DFlash, DFlash2, DSpark,
MTP), and so does `transformers` (DFlash), with which layers for multi-token prediction and PARD are compared as well.
`formats` is `python -m tests.interop.draft_formats`: each public format's distance from its oracle and tokens a step.
vLLM for CPUs answers prompts greedily alone, with the drafts of `pilotfish drafter`, and with a
drafter that is killed halfway. With `--head`, an EAGLE-3 head that `pilotfish distill --kind eagle3` has trained drafts
in vLLM and here, and must bring as many tokens a step here.
Prints a table of all checks. Exits with 1 if one failed. With `--keep`, the formats and the rates of a head are also
written to their result files, which `make pages` shows; else nothing in the tree is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from deploy.bench.report.tables import markdown_table
from deploy.local.local_cluster import LocalCluster
from deploy.models import resolve_models
from deploy.network.cluster_token import draw_token
from deploy.settings import load_settings
from tests.clients.environments import ROOT, ClientKind, install
from tests.interop import stored_oracles
from tests.interop.speculators_drafts import Check, SpeculatorsDrafts
from tests.interop.vllm_result import Rates, keep_rates, versions_in
from workers.model.model_files import resolve_model_directory
from workers.serve.node import free_port

HERE = Path(__file__).resolve().parent
SPECULATORS = ClientKind("speculators", "speculators_drafts.py", uses_project=True, names_all=True)
TRANSFORMERS = ClientKind("transformers", "transformers_layers.py", uses_project=True, names_all=True)
VLLM = ClientKind("vllm", "vllm_door.py", uses_project=True, wheels=("protos", "protos/pilotfish_vllm"), names_all=True)
LOOPBACK = "127.0.0.1"
LONGEST_SECONDS = 1200.0
LEAST_RATIO = 0.97
"""Fewest tokens a step here ÷ those in vLLM, with the same drafts."""
PROMPTS = (
    "Name three rivers in France.",
    "Write a short story about a dog.",
    "What is 12 times 7? Think step by step.",
    "Explain photosynthesis to a child.",
    "Translate into French: The weather is nice today.",
    "List five fruits and a color for each.",
    "Why is the sky blue?",
    "Write an email that asks for a day off.",
)


def write(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def drafter(draft: str, token: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`pilotfish drafter` with a draft model: process and address. Raises `RuntimeError` if it does not start."""
    port = free_port(LOOPBACK)
    command = [sys.executable, "-m", "deploy.cli", "drafter", "--port", str(port), "--set", f"draft.path={draft}"]
    environment = os.environ | {"PILOTFISH_CLUSTER_TOKEN": token}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=output)
        try:
            end = time.monotonic() + LONGEST_SECONDS
            while b"drafts by" not in _content(output):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"pilotfish drafter has not started: {_content(output).decode()}")
                time.sleep(0.2)
            yield process, f"{LOOPBACK}:{port}"
        finally:
            process.kill()
            process.wait()


def _content(output: Any) -> bytes:
    return os.pread(output.fileno(), 1 << 20, 0)  # the process that writes has the same position in the file


def answer(
    python: Path,
    token: str,
    chosen: dict[str, Any],
    killed: subprocess.Popen[bytes] | None = None,
    longest_seconds: float = LONGEST_SECONDS,
) -> Any:
    """The answers of vLLM and its counts. `killed` ends when half of the prompts are answered.

    Raises `RuntimeError` if vLLM fails, or does not end within `longest_seconds`. Its processes are then killed.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PILOTFISH_CLUSTER_TOKEN": token,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("PYTHONPATH", None)
    command = [str(python), str(HERE / "scripts" / VLLM.script), json.dumps(chosen)]
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        bound = threading.Timer(longest_seconds, _end, (process,))
        bound.start()
        found = None
        try:
            for line in process.stdout or ():
                if line == "half\n" and killed is not None:
                    killed.kill()
                if line.startswith('{"tokens"'):
                    found = json.loads(line)
            process.wait()
        finally:
            bound.cancel()
            _end(process)
    if found is None:
        raise RuntimeError(
            f"vLLM ended with {process.returncode} and without answers; it had {longest_seconds:g} s for them"
        )
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process that still runs, and those that it has started in its session."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _quiet_environment() -> dict[str, str]:
    """Variables for scripts that read no file of the project and reach no hub."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    environment.pop("PYTHONPATH", None)
    return environment


def check_speculators(options: argparse.Namespace) -> list[Check]:
    """The checks of `speculators`: what, whether it holds, and the largest differences."""
    python, environment = install(SPECULATORS, options.environments, HERE / "pins"), _quiet_environment()
    stored = [
        stored_oracles.check_stored(one, "speculators", python, environment, LONGEST_SECONDS)
        for one in stored_oracles.SPECULATORS
    ]
    with tempfile.TemporaryDirectory() as home:
        drafts = SpeculatorsDrafts(Path(home))
        for folder in drafts.folders:  # in one process, what a second head computes depends on the first
            command = [str(python), str(HERE / "scripts" / SPECULATORS.script), str(folder)]
            subprocess.run(command, cwd=home, env=environment, check=True, timeout=LONGEST_SECONDS)
        return stored + drafts.check()


def check_transformers(options: argparse.Namespace) -> list[Check]:
    """The checks of a newer `transformers`: its stored outputs, and those that tests compare with ours."""
    python, environment = install(TRANSFORMERS, options.environments, HERE / "pins"), _quiet_environment()
    rows = [
        stored_oracles.check_stored(one, "transformers", python, environment, LONGEST_SECONDS)
        for one in stored_oracles.TRANSFORMERS
    ]
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
    command = [str(python), str(HERE / "scripts" / TRANSFORMERS.script)]
    shown = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=LONGEST_SECONDS
    ).stdout
    found = json.loads(shown.splitlines()[-1])
    if not found["is_right"]:
        write(shown)
    for name, cases, difference in found["rows"]:
        said = f"{cases} cases, {difference}" + ("" if found["is_right"] else "; see the tests above")
        rows.append((f"transformers {found['version']}, {name}: largest difference", found["is_right"], said))
    return rows


def check_formats(options: argparse.Namespace) -> list[Check]:
    """Whether each public format computes and accepts what its oracle does. Prints the table."""
    command = [sys.executable, "-m", "tests.interop.draft_formats", *([] if options.keep else ["--check"])]
    status = subprocess.run(command, cwd=ROOT, check=False, timeout=6 * LONGEST_SECONDS).returncode
    return [("public formats: differences from oracles, tokens a step", status == 0, "see the table above")]


def check_vllm(options: argparse.Namespace) -> list[Check]:
    """The checks of vLLM: what, whether it holds, and the counts."""
    python, token = install(VLLM, options.environments, HERE / "pins"), draw_token().text
    directory = resolve_model_directory(options.model, load_settings().cache_directory)
    chosen = {"model": str(directory), "prompts": PROMPTS, "max_tokens": options.max_tokens, "drafted": 0, "door": {}}
    plain = answer(python, token, chosen)
    rows: list[Check] = []
    for name in ("drafts of a drafter", "a drafter that is killed halfway"):
        with drafter(options.draft, token) as (process, address):
            drafted = chosen | {"drafted": options.drafted, "door": {"address": address}}
            killed = process if "killed" in name else None
            found = answer(python, token, drafted, killed)
        is_equal = found["tokens"] == plain["tokens"]
        tokens = sum(map(len, found["tokens"]))
        said = f"{tokens} tokens, {'all' if is_equal else 'NOT all'} as without drafts"
        rows.append((f"vLLM, {name}: greedy texts", is_equal, said))
        accepted = f"{found['accepted']} of {found['drafted']} drafted in {found['steps']} steps with a draft"
        said = f"{accepted}, {tokens_per_step(found):.2f} tokens a step"
        rows.append((f"vLLM, {name}: accepted tokens", found["accepted"] > 0, said))
    if options.head is not None:
        head = str(options.head.resolve())
        there = answer(python, token, chosen | {"drafted": options.drafted, "head": head})
        here = asyncio.run(own_answers(directory, head, options))
        rows += compared_heads(plain, there, here)
        if options.keep and all(holds for _, holds, _ in rows):
            name, steps = options.head_name or options.head.name, (tokens_per_step(here), tokens_per_step(there))
            keep_rates(Rates(name, *steps, prompts=len(PROMPTS), drafted=options.drafted), versions_in(python))
    return rows


def tokens_per_step(found: dict[str, Any]) -> float:
    """Tokens of a step with drafts in answers, which have `accepted` and `steps`."""
    return float(1 + found["accepted"] / max(1, found["steps"]))


def compared_heads(plain: dict[str, Any], there: dict[str, Any], here: dict[str, Any]) -> list[Check]:
    """The checks of a head that drafts in vLLM (`there`) and in Pilotfish (`here`). All have `tokens` by answer."""
    texts = [one["tokens"] == plain["tokens"] for one in (there, here)]
    rates = [tokens_per_step(one) for one in (there, here)]
    ratio, said = rates[1] / rates[0], f"{rates[1]:.3f} tokens a step here, {rates[0]:.3f} in vLLM"
    return [
        ("EAGLE-3 head: greedy texts in vLLM and here", all(texts), f"as without drafts: {texts[0]}, {texts[1]}"),
        ("EAGLE-3 head: tokens a step here ÷ in vLLM", ratio >= LEAST_RATIO, f"{ratio:.3f}: {said}"),
    ]


async def own_answers(model: Path, head: str, options: argparse.Namespace) -> dict[str, Any]:
    """The answers of Pilotfish with chains of the head, as `answer` tells those of vLLM."""
    values = [f"target.path={model}", "target.dtype=float32", "target.quantization=none", f"draft.path={head}"]
    values += [f"draft.max_nodes={options.drafted}", f"draft.max_depth={options.drafted}", "draft.eagle.candidates=1"]
    values += ["draft.controller=off", "server.http_port=0", "server.grpc_port=0"]
    settings = load_settings("cpu", values)
    configuration = resolve_models(
        settings.configuration, settings.cache_directory, report=lambda _: None
    ).configuration
    found: dict[str, Any] = {"tokens": [], "accepted": 0, "steps": 0}
    async with (
        LocalCluster(configuration, http=True) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=LONGEST_SECONDS) as client,
    ):
        for prompt in PROMPTS:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": options.max_tokens}
            body |= {"temperature": 0, "return_token_ids": True}
            response = await client.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            (choice,) = response.json()["choices"]
            found["tokens"].append(choice["token_ids"])
            found["accepted"] += choice["receipt"]["accepted"]
            found["steps"] += choice["receipt"]["target_passes"] - 1  # that of the prompt has no draft
    return found


ENGINES = {
    "speculators": check_speculators,
    "transformers": check_transformers,
    "formats": check_formats,
    "vllm": check_vllm,
}


def main() -> None:
    """Run the checks and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.interop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(ENGINES), help="names with commas between them")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the target, as in target.path")
    parser.add_argument("--draft", default="smollm2-135m-draft", help="a draft model for it, as in draft.path")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head for it, which drafts in vLLM and here")
    parser.add_argument("--head-name", default="", help="what the result file calls the head")
    parser.add_argument("--keep", action="store_true", help="write the result files that make pages shows")
    parser.add_argument("--drafted", type=int, default=5, help="tokens of a draft")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv" / "interop")
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name]
    unknown = ", ".join(sorted(set(wanted) - ENGINES.keys()))
    if unknown:
        parser.error(f"--only: unknown {unknown}; there are {', '.join(ENGINES)}")
    rows = [row for name in wanted for row in ENGINES[name](options)]
    table = [[what, said if holds else f"FAILED: {said}"] for what, holds, said in rows]
    write(markdown_table(("check", "result"), table))
    sys.exit(0 if all(holds for _, holds, _ in rows) else 1)


if __name__ == "__main__":
    main()
