"""A gRPC server stops within a bound, whatever its calls do."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.wire import server as server_module
from cluster.wire.server import WireServer


class _NeverStops:
    async def stop(self, grace: float) -> None:
        await asyncio.Event().wait()


async def test_stop_returns_although_a_call_never_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_LATE_SECONDS", 0.05)
    server = WireServer("127.0.0.1", 0)
    await server.start()
    real, server._server = server._server, _NeverStops()  # type: ignore[assignment]
    begun = time.monotonic()
    await server.stop(0.01)
    assert time.monotonic() - begun < 5.0
    assert "has not stopped" in caplog.text
    assert real is not None
    await real.stop(0.0)
