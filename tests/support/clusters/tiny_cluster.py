"""The configuration of a cluster that serves a tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.core.config.sections import Configuration
from workers.serve.configuration import load_configuration

Settings = Mapping[str, Any]


def tiny_cluster(
    directory: Path, draft: Settings, *, target: Settings | None = None, kv: Settings | None = None, **others: Settings
) -> Configuration:
    """A model in `directory` on the CPU, under the name `tiny`, with ports of its own.

    `target` and `kv` are further settings of these sections, `others` whole sections.
    """
    model = {"path": str(directory), "served_name": "tiny", "device": "cpu", "compile": "off"}
    server = {"grpc_port": 0, "http_port": 0} | others.pop("server", {})
    memory = {"pool_bytes": 8 << 20} | (kv or {})
    return load_configuration(
        {"target": model | {"kv": memory} | (target or {}), "draft": draft, "server": server} | others
    )
