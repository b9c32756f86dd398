"""Measures the target's process alone, for `memory`: it loads, listens, steps and, with `fill`, fills its pool.

    python -m tests.bench.processes.target_process '{"target": …}' SPAWNED_AT [fill]

Prints one line of JSON. It runs in a process of its own, because peak memory never decreases.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass

import torch

from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.target_client import GrpcTarget
from deploy.local.local_cluster import LOOPBACK
from tests.bench.decoding import Decoding
from tests.bench.machine import peak_resident_bytes, resident_bytes
from workers.kv.start_memory import POPULATING
from workers.serve.configuration import load_configuration
from workers.serve.worker_server import host_target
from workers.verify.build import build_engine

WIDTHS = 128
"""Number of step widths that are tried."""


@dataclass(frozen=True)
class Footprint:
    """Memory and start time of one run of the process."""

    ready_seconds: float
    """Seconds from the start of the process to the first answer of its server."""
    code_bytes: int
    """Resident bytes before the model is loaded: interpreter and libraries."""
    ready_bytes: int
    """Peak resident bytes until the server is ready."""
    used_bytes: int
    """Peak resident bytes after steps of many widths."""
    full_bytes: int
    """Peak resident bytes after every block of the pool is written."""
    held_bytes: int
    """Resident bytes in the end: what is left once the memory that only the start needed is given back."""


async def measure(configuration: Configuration, spawned_at: float, *, fills: bool) -> Footprint:
    """Start the server, answer once, take steps, fill the pool."""
    code_bytes = resident_bytes()
    torch.set_num_threads(configuration.target.threads or os.cpu_count() or 1)
    engine = build_engine(configuration.target)
    async with host_target(LOOPBACK, engine) as host:
        client = GrpcTarget(fixed_address(host.address))
        await client.info()
        ready_seconds = time.time() - spawned_at
        await client.close()
        ready_bytes = peak_resident_bytes()
        used_bytes = ready_bytes
        if fills:
            decoding = Decoding(engine, configuration.scheduler.max_step_tokens)
            use(decoding, configuration.scheduler.max_step_tokens)
            used_bytes = peak_resident_bytes()
            fill(decoding)
        for thread in threading.enumerate():
            if thread.name == POPULATING:
                await asyncio.to_thread(thread.join)
        peak = peak_resident_bytes()
        return Footprint(ready_seconds, code_bytes, ready_bytes, used_bytes, peak, resident_bytes())


def use(decoding: Decoding, widest: int) -> None:
    """Take steps of many widths, because kernels and their buffers are often stored by shape."""
    vocabulary = decoding.engine.info().vocabulary_size
    for width in range(1, widest + 1, max(1, widest // WIDTHS)):
        decoding.add("width", [(width + index) % vocabulary for index in range(width)])
        decoding.clear()


def fill(decoding: Decoding) -> None:
    """Write every block once, with sequences as long as a quarter of the pool or of the context."""
    info = decoding.engine.info()
    positions = info.kv.blocks_total // info.layout.tables * info.layout.block_size
    length = min(info.max_context_len - 1, max(info.layout.block_size, positions // 4))
    sequences = 0
    # With windows a sequence frees blocks as it grows, so more sequences than this fit.
    while decoding.engine.info().kv.blocks_free >= info.layout.peak(length, length) and sequences < 1000:
        decoding.add(f"s{sequences}", [(sequences + index) % info.vocabulary_size for index in range(length)])
        sequences += 1
    decoding.clear()


def main() -> None:
    """Measure what the command line describes."""
    logging.disable(logging.WARNING)
    configuration = load_configuration(json.loads(sys.argv[1]))
    footprint = asyncio.run(measure(configuration, float(sys.argv[2]), fills="fill" in sys.argv[3:]))
    sys.stdout.write(f"{json.dumps(asdict(footprint))}\n")


if __name__ == "__main__":
    main()
