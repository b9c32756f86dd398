"""What a target's process holds: its weights, its pool, and at most 250 MB beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.models import resolve_models
from deploy.settings import load_settings
from workers.model.stored.source import stored_file

pytestmark = [pytest.mark.slow, pytest.mark.weights]

POOL_BYTES = 64 << 20
OTHER_BYTES = 250_000_000
SCRIPT = """
import asyncio, json, os, sys, threading
import psutil
from cluster.wire.peer_access import OPEN
from workers.kv.start_memory import POPULATING
from workers.serve.rank_actors import FirstRank
from workers.serve.rank_placement import RankGroup

async def serve():
    rank = FirstRank()
    await rank.start(RankGroup(json.loads(sys.argv[1]), os.cpu_count(), "127.0.0.1", 0), OPEN)
    for thread in threading.enumerate():
        if thread.name == POPULATING:
            thread.join()
    resident = psutil.Process().memory_info().rss
    await rank.stop()
    print(json.dumps([resident, "transformers" in sys.modules]))

asyncio.run(serve())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_a_rank_of_the_packaged_model_holds_its_file_and_its_pool_and_little_more() -> None:
    """The rank has the drafts of the preset, and its weights are packed, as they are from the second start on."""
    settings = load_settings(
        "cpu",
        ["target.dtype=bfloat16", "target.quantization=stored", f"target.kv.pool_bytes={POOL_BYTES}"],
    )
    configuration = resolve_models(settings.configuration, settings.cache_directory, lambda _: None).configuration
    file = stored_file(Path(configuration.target.path))
    assert file is not None
    values = configuration.model_dump(
        mode="json",
        include={"target": True, "draft": True, "cluster": True, "log_level": True, "server": {"log_format"}},
    )
    for _ in range(2):  # the first start packs the weights, unless an earlier one did
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(values)], capture_output=True, text=True, check=True
        )
        resident, has_transformers = json.loads(ended.stdout.splitlines()[-1])
        if not has_transformers:
            break
    assert not has_transformers
    assert resident <= 1.2 * file.stat().st_size + POOL_BYTES + OTHER_BYTES
    assert resident >= file.stat().st_size * 0.9 + POOL_BYTES
