"""A cluster of a tiny random model in a process of its own, for `make fuzz`. Its first line on stdout says where it is.

    python -m tests.fuzz.server DIRECTORY

It ends when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from cluster.core.config.base import MIB
from deploy.local.local_cluster import LocalCluster
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.configuration import load_configuration

LONGEST = 256
"""Longest sequence, in tokens."""


async def serve(directory: Path) -> None:
    """Serve until stdin is closed."""
    model = tiny.save(directory / "model", tiny.llama(vocab_size=320, max_position_embeddings=LONGEST))
    values = {
        "target": {
            "path": str(tiny_tokenizer.byte_level(model)),
            "served_name": "tiny",
            "device": "cpu",
            "compile": "off",
            "max_context_len": LONGEST,
            "kv": {"pool_bytes": 8 * MIB},
        },
        "draft": {"method": "ngram"},
        "limits": {"max_output_tokens": 16, "max_n": 4, "max_prompts": 8, "max_timeout_seconds": 60.0},
        "server": {"http_port": 0, "grpc_port": 0},
    }
    async with LocalCluster(load_configuration(values), http=True) as cluster:
        sys.stdout.write(json.dumps({"http": cluster.http_url, "grpc": cluster.grpc_address}) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
