"""`make clients`: real clients, each in an environment of its own, against one `pilotfish serve`.

    python -m tests.clients [--only openai,litellm] [--data DIRECTORY] [--samples 100] [--set key=value …]

Prints a table of all checks. Exits with 1 if one failed. lm-eval's tasks are made from `gsm8k_train.jsonl` in the
directory of data; without it, they are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from deploy.bench.report.tables import markdown_table
from deploy.settings import load_settings
from tests.bench.processes.serve_command import ServeCommand
from tests.bench.report import write
from tests.clients.environments import KINDS, ROOT, SCRIPTS, ClientKind, install
from workers.model.model_files import resolve_model_directory

DATA = ROOT.parent / "shared" / "data"
QUESTIONS = "gsm8k_train.jsonl"
LONGEST_SECONDS = 1800.0


def run_script(kind: ClientKind, python: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Run the checks of one client. Returns a row per check."""
    with tempfile.TemporaryDirectory() as home:
        offline = {
            "HF_HOME": home,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment = {**os.environ, **offline, "NO_PROXY": "127.0.0.1", "OPENAI_API_KEY": "none"}
        environment.pop("PYTHONPATH", None)
        command = [str(python), str(SCRIPTS / kind.script), *arguments]
        done = subprocess.run(
            command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True, timeout=LONGEST_SECONDS, check=False
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    versions = ", ".join(f"{name} {version}" for line in lines for name, version in line.get("versions", {}).items())
    rows = [{"client": kind.name, "versions": versions, **line} for line in lines if "check" in line]
    if done.returncode or not rows:
        rows.append({"client": kind.name, "check": "runs to its end", "ok": False, "detail": f"exit {done.returncode}"})
    return rows


def check_all(kinds: list[ClientKind], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Install all clients, then run them one after another against one server."""
    pythons = {kind.name: install(kind, options.environments) for kind in kinds}
    directory = resolve_model_directory("smollm2-135m-instruct", load_settings().cache_directory)
    rows: list[dict[str, Any]] = []
    with ServeCommand("cpu", options.set) as server:
        model = httpx.get(f"{server.http_url}/v1/models", timeout=60.0).json()["data"][0]["id"]
        arguments = [server.http_url, server.grpc_address, model, str(directory)]
        arguments += [str(options.data / QUESTIONS), str(options.samples)]
        for kind in kinds:
            begun = time.perf_counter()
            found = run_script(kind, pythons[kind.name], arguments)
            rows += found
            failed = sum(not row["ok"] for row in found)
            write(f"{kind.name}: {len(found)} checks, {failed} failed, {time.perf_counter() - begun:.0f} s")
            for row in found:
                write(f"  {'ok' if row['ok'] else 'FAILED'}  {row['check']}: {row['detail']}")
    return rows


def main() -> None:
    """Run the chosen clients and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names with commas between them")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv" / "clients")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name]
    unknown = set(wanted) - {kind.name for kind in KINDS}
    if unknown:
        parser.error(
            f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(kind.name for kind in KINDS)}"
        )
    kinds = [kind for kind in KINDS if not wanted or kind.name in wanted]
    if not (options.data / QUESTIONS).is_file():
        write(f"lm-eval is left out: there is no {options.data / QUESTIONS}")
        kinds = [kind for kind in kinds if kind.name != "lm-eval"]
    rows = check_all(kinds, options)
    columns = ("client", "check", "result")
    table = [
        [row.get("versions") or row["client"], row["check"], row["detail"] if row["ok"] else "FAILED"] for row in rows
    ]
    write("\n" + markdown_table(columns, table))
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
