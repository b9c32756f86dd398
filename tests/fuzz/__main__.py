"""`make fuzz`: wrong messages to both APIs of a server with a tiny model, more than 100,000 of them.

    python -m tests.fuzz [--messages 100000] [--examples 200] [--seed 0]

Schemathesis makes requests from `/openapi.json`; right bodies and protobufs are mutated besides. Exits with 1 if the
server answered with an error of its own, hung, held more memory in the end, or gave another answer than before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.report import write
from tests.fuzz.doors import Findings, fuzz_grpc, fuzz_http
from tests.support.clusters.json_process import JsonProcess

MOST_GROWTH_MB = 32.0
"""Most memory that the server may hold more after the second half of the messages, in MB."""
AT_ONCE = 8
ROUNDS = 10
EXACT = {"prompt": "one two one two", "max_tokens": 16, "seed": 11, "return_token_ids": True, "stream": True}


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=100_000, help="messages that are mutated here, in total")
    parser.add_argument("--examples", type=int, default=200, help="requests of Schemathesis to each operation, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program, which has its own environment")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = JsonProcess("tests.fuzz.server", directory)
        try:
            passed = fuzz(server.read(300.0), server.pid, arguments)
        finally:
            server.stop()
    sys.exit(0 if passed else 1)


def fuzz(server: dict[str, Any], pid: int, arguments: argparse.Namespace) -> bool:
    """Send everything. Returns whether all rules held."""
    process, findings, begun = psutil.Process(pid), Findings(), time.monotonic()
    before = exact_stream(server["http"])
    made, schema_failures = run_schemathesis(server["http"], arguments)
    write(f"{time.monotonic() - begun:6.0f} s: Schemathesis made {made} requests, {schema_failures} failures")
    rng, memory = random.Random(arguments.seed), []
    for number in range(ROUNDS):
        asyncio.run(send(server, arguments.messages // ROUNDS, rng, findings))
        memory.append(process.memory_info().rss / 1e6)
        passed = time.monotonic() - begun
        write(f"{passed:6.0f} s: {findings.sent} mutated, {findings.failures} failures, {memory[-1]:.0f} MB, {number}")
    after, growth = exact_stream(server["http"]), memory[-1] - memory[ROUNDS // 2 - 1]
    left = held(server["http"])
    for text in findings.broken:
        write(f"BROKEN {text}")
    write(", ".join(f"{name}: {count}" for name, count in sorted(findings.statuses.items())))
    write(
        f"{made + findings.sent} messages in {time.monotonic() - begun:.0f} s, seed {arguments.seed}: "
        f"{schema_failures + findings.failures} failures, {growth:+.1f} MB in the second half, still held: {left}, "
        f"{len(after)} tokens of a stream afterwards: {'the same' if after == before else 'OTHERS'}"
    )
    is_exact = bool(after) and after == before and not any(left.values())
    return not schema_failures and not findings.failures and growth < MOST_GROWTH_MB and is_exact


async def send(server: dict[str, Any], count: int, rng: random.Random, findings: Findings) -> None:
    """Send one round of mutated messages, two thirds of them over gRPC."""
    await asyncio.gather(
        fuzz_http(server["http"], count // 3, rng, findings, at_once=AT_ONCE),
        fuzz_grpc(server["grpc"], count - count // 3, rng, findings, at_once=AT_ONCE),
    )


def run_schemathesis(url: str, arguments: argparse.Namespace) -> tuple[int, int]:
    """Run Schemathesis over the schema of the server. Returns how many requests arrived, and whether it failed."""
    before = requests_of(url)
    command = [
        arguments.schemathesis,
        "run",
        f"{url}/openapi.json",
        "--checks=not_a_server_error",
        "--phases=examples,coverage,fuzzing",
        "--mode=all",
        "--continue-on-failure",
        "--workers=2",
        f"--max-examples={arguments.examples}",
        f"--seed={arguments.seed}",
        "--request-timeout=60",
        "--suppress-health-check=all",
        "--output-sanitize=false",  # it would hide values of fields with "token" in their names
        "--no-color",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        write(ended.stdout[-6000:] + ended.stderr[-2000:])
    return requests_of(url) - before, int(ended.returncode != 0)


def exact_stream(url: str) -> list[int]:
    """Return the tokens of a streamed answer with a fixed seed."""
    lines = httpx.post(f"{url}/v1/completions", json=EXACT, timeout=60.0).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]


def requests_of(url: str) -> int:
    """Return how many HTTP requests the server has counted."""
    return int(metric(url, "http_requests_total"))


def held(url: str) -> dict[str, float]:
    """Return what the server still holds a moment after the last message."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    for _ in range(100):
        found = {name: metric(url, name) for name in names}
        if not any(found.values()):
            break
        time.sleep(0.1)
    return found


def metric(url: str, name: str) -> float:
    """Return the sum of all series of that name."""
    text = httpx.get(f"{url}/metrics", timeout=60.0).text
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


if __name__ == "__main__":
    main()
