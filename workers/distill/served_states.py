"""The hidden states of texts, from the evidence that a serving target sends with its steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from uuid import uuid4

import torch
from torch import Tensor

from cluster.core.drafting import RowFaultCode
from cluster.core.errors import ConfigurationError, KvPoolExhausted, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.ports import Target
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.verification import StepBatch, Verdict, VerifyRow

_SAMPLING = SamplingParameters(temperature=0.0)
"""Nothing is sampled: the rows are chunks of prompts."""


async def served_states(target: Target, rows: Sequence[Sequence[int]], width: int, step_tokens: int) -> list[Tensor]:
    """The hidden states of texts, bfloat16 `[tokens, width]` each: the taps of `target.evidence` side by side.

    `rows` are the token ids of the texts. A step has at most `step_tokens` tokens, which its rows share equally. Texts
    for which the KV pool has no room together are read in halves.

    Raises `ConfigurationError` for a text that the target cannot read, `TargetUnavailable` where it was lost.
    """
    try:
        return await _read(target, rows, width, step_tokens)
    except KvPoolExhausted as error:
        if len(rows) == 1:
            raise ConfigurationError(f"target.kv: no room for a text of {len(rows[0])} tokens; {error}") from error
    half = len(rows) // 2
    first = await served_states(target, rows[:half], width, step_tokens)
    return first + await served_states(target, rows[half:], width, step_tokens)


async def _read(target: Target, rows: Sequence[Sequence[int]], width: int, step_tokens: int) -> list[Tensor]:
    names = [SequenceId(f"states-{uuid4().hex}") for _ in rows]
    found = [torch.empty((len(row), width), dtype=torch.bfloat16) for row in rows]
    done = [0] * len(rows)
    try:
        while reading := [number for number, row in enumerate(rows) if done[number] < len(row)][:step_tokens]:
            most = step_tokens // len(reading)
            chunks = tuple(_chunk(names[number], rows[number], done[number], most) for number in reading)
            result = await target.step(StepBatch(chunks))
            for number, chunk, verdict in zip(reading, chunks, result.verdicts, strict=True):
                found[number][done[number] : chunk.base_len] = _states(chunk, verdict, width)
                done[number] = chunk.base_len
    finally:
        with suppress(TargetUnavailable):  # a target that was lost has none of them
            await target.release(names)
    return found


def _chunk(name: SequenceId, row: Sequence[int], begin: int, most: int) -> VerifyRow:
    """The next tokens of a text, `most` at most."""
    end = min(len(row), begin + most)
    start = None if begin else SequenceStart(len(row), _SAMPLING)
    return VerifyRow(name, end, tuple(row[begin:end]), decide=False, start=start)


def _states(chunk: VerifyRow, verdict: Verdict, width: int) -> Tensor:
    """The hidden states of the tokens of a chunk."""
    if verdict.fault is not None:
        kinds = {RowFaultCode.KV_EXHAUSTED: KvPoolExhausted, RowFaultCode.INVALID: ConfigurationError}
        raise kinds.get(verdict.fault.code, TargetUnavailable)(f"hidden states: {verdict.fault.message}")
    hidden = None if verdict.evidence is None else verdict.evidence.hidden
    if hidden is None or (hidden.first, len(hidden), hidden.width) != (chunk.start_len, len(chunk.pending), width):
        sent = "none" if hidden is None else f"{len(hidden)} of {hidden.width} numbers from {hidden.first} on"
        raise ConfigurationError(
            f"target.evidence: needed the hidden states of {len(chunk.pending)} tokens of {width} numbers from "
            f"{chunk.start_len} on, found {sent}"
        )
    return torch.frombuffer(bytearray(hidden.data), dtype=torch.bfloat16).view(-1, width)
