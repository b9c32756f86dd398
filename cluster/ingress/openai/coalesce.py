"""Fewer and larger streamed chunks (`stream_interval`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from pilotfish.v1 import generation_pb2

Events = AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]
"""Pairs of an index and an event."""


async def coalesce(
    events: Events, interval: int, note: Callable[[int, generation_pb2.GenerationDelta], None]
) -> Events:
    """Join the deltas of each index until they have `interval` tokens. The first delta of an index is not held back.

    `note` is called with each delta before.
    """
    held: dict[int, generation_pb2.GenerateResponse] = {}
    begun: set[int] = set()
    async with aclosing(events):
        async for index, event in events:
            if event.HasField("delta"):
                note(index, event.delta)
                joined = _joined(held.pop(index, None), event)
                if index in begun and len(joined.delta.token_ids) < interval:
                    held[index] = joined
                    continue
                begun.add(index)
                event = joined
            elif index in held:
                yield index, held.pop(index)
            yield index, event


def _joined(
    before: generation_pb2.GenerateResponse | None, event: generation_pb2.GenerateResponse
) -> generation_pb2.GenerateResponse:
    """Return one delta of the text and tokens of both. The numbers of drafted and accepted tokens add up."""
    if before is None:
        return event
    first, second = before.delta, event.delta
    first.text += second.text
    for name in ("token_ids", "logprobs", "token_bytes", "drafts", "token_texts", "accepted_origins"):
        getattr(first, name).extend(getattr(second, name))
    first.accepted_draft_tokens += second.accepted_draft_tokens
    first.drafted_tokens += second.drafted_tokens
    return before
