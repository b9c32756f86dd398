"""`make chaos`: kills and stops processes of a cluster while clients stream; every token is compared.

    python -m tests.chaos [--rounds 300] [--seed 0] [--json FILE] [--set key=value …]

Exits with 1 if a token differed, a stream ended with an error, or anything leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

import torch

from deploy.settings import parse_assignments
from tests.chaos.harness import ChaosOptions, limit_threads, run_chaos
from tests.chaos.serve_harness import run_serve_chaos


def main() -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--pause", type=float, default=0.6, help="mean time between two faults, in seconds")
    parser.add_argument("--at-once", type=int, default=12, help="number of clients")
    parser.add_argument("--ranks", default="1,2", help="ranks of each target")
    parser.add_argument("--drafters", type=int, default=2, help="number of drafters")
    parser.add_argument("--ingresses", type=int, default=ChaosOptions.ingresses, help="number of ingresses")
    parser.add_argument("--roles", default="", help="roles that faults are for (default: all)")
    parser.add_argument("--most-lost", type=int, default=2, help="most processes that are away at a further fault")
    parser.add_argument("--serve", action="store_true", help="run under Ray Serve, which replaces lost processes")
    parser.add_argument("--json", type=Path, help="file that the report is appended to, as a line of JSON")
    parser.add_argument("--logs", type=Path, help="directory for the logs of the processes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    arguments = parser.parse_args()
    limit_threads()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("tests").setLevel(logging.INFO)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options = ChaosOptions(
        seed=arguments.seed,
        rounds=arguments.rounds,
        pause_seconds=arguments.pause,
        ranks=tuple(int(size) for size in arguments.ranks.split(",")),
        drafters=arguments.drafters,
        ingresses=arguments.ingresses,
        at_once=arguments.at_once,
        roles=tuple(filter(None, arguments.roles.split(","))) or ChaosOptions.roles,
        most_lost=arguments.most_lost,
        settings=parse_assignments(arguments.set),
    )
    with tempfile.TemporaryDirectory(prefix="pilotfish-chaos-") as scratch:
        directory = arguments.logs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        report = asyncio.run((run_serve_chaos if arguments.serve else run_chaos)(options, directory))
    sys.stdout.write(report.to_text() + "\n")
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            file.write(report.to_json() + "\n")
    sys.exit(0 if report.is_clean else 1)


if __name__ == "__main__":
    main()
