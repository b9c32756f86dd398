"""Sends messages to the two APIs and collects what breaks the rules: errors of the server, and calls that hang."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from tests.fuzz.mutation import bodies, mutated_json, mutated_protobuf, protobufs

HANG_SECONDS = 60.0
"""Longest time for an answer, in seconds."""
_BROKEN = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
_SHOWN = 20


@dataclass
class Findings:
    """What was sent and what broke the rules."""

    statuses: Counter[str] = field(default_factory=Counter)
    """Number of answers by API and status."""
    broken: list[str] = field(default_factory=list)
    """The first messages that the server failed at, with their answers."""
    failures: int = 0

    def fail(self, text: str) -> None:
        """Record a broken rule."""
        self.failures += 1
        if len(self.broken) < _SHOWN:
            self.broken.append(text)

    @property
    def sent(self) -> int:
        """Number of messages."""
        return self.statuses.total()


async def fuzz_http(url: str, count: int, rng: random.Random, findings: Findings, *, at_once: int) -> None:
    """Send `count` mutated JSON bodies."""
    cases = [(path, body) for path, found in bodies().items() for body in found]
    left = iter(range(count))
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=HANG_SECONDS, limits=limits) as client:

        async def work() -> None:
            for _ in left:
                path, body = rng.choice(cases)
                data = mutated_json(body, rng)
                try:
                    answer = await client.post(path, content=data, headers={"content-type": "application/json"})
                except httpx.HTTPError as error:
                    findings.statuses[f"HTTP {type(error).__name__}"] += 1
                    findings.fail(f"POST {path} {data[:500]!r}: {error!r}")
                    continue
                findings.statuses[f"HTTP {answer.status_code}"] += 1
                if answer.status_code >= 500 and answer.status_code != 503:
                    findings.fail(f"POST {path} {data[:500]!r}: {answer.status_code} {answer.text[:200]}")

        await asyncio.gather(*(work() for _ in range(at_once)))


async def fuzz_grpc(address: str, count: int, rng: random.Random, findings: Findings, *, at_once: int) -> None:
    """Send `count` mutated protobufs."""
    cases = [(method, message) for method, found in protobufs().items() for message in found]
    weights = [8 if method.endswith("/Generate") else 1 for method, _ in cases]
    left = iter(range(count))
    async with grpc.aio.insecure_channel(address) as channel:

        async def work() -> None:
            for _ in left:
                ((method, message),) = rng.choices(cases, weights)
                data = mutated_protobuf(message, rng)
                code, details = await _call(channel, method, data)
                findings.statuses[f"gRPC {code.name}"] += 1
                if code in _BROKEN or code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    findings.fail(f"{method} {data[:500]!r}: {code.name} {details[:200]}")

        await asyncio.gather(*(work() for _ in range(at_once)))


async def _call(channel: grpc.aio.Channel, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """Send one message and read all answers. Returns the status and its message."""
    try:
        if method.endswith("/Generate"):
            stream: Any = channel.unary_stream(method)(data, timeout=HANG_SECONDS)
            async for _ in stream:
                pass
        else:
            await channel.unary_unary(method)(data, timeout=HANG_SECONDS)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
