"""A tensor-parallel group: rank 0 speaks gRPC, the others follow its commands.

A command is one broadcast of bytes (a step is its own protobuf message, never a pickle). All ranks
run the same engine over it; what is reduced between them is each rank's winner of its part of the
vocabulary, or, for parameters that need the whole distribution, the logits of those rows alone.
Any failure ends the group: its owner restarts all ranks together.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

import torch
from torch import distributed

from cluster.core.config import TargetSection
from cluster.core.errors import TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo
from cluster.wire.codec_target import (
    open_rows_from_bytes,
    open_rows_to_bytes,
    step_batch_from_bytes,
    step_batch_to_bytes,
)
from workers.forward.loaded_model import LoadedModel
from workers.kv.pool import KvPool, blocks_that_fit
from workers.model.loading import choose_device, load_model
from workers.sampling.accept import acceptance_rule
from workers.sampling.context import DecisionContext
from workers.sampling.decide import is_shardable, merge_winners, shard_winners
from workers.verify.engine import Decider, Decisions, LocalDecider, TargetEngine, mark_undecidable

logger = logging.getLogger(__name__)

# A follower waits for its next command as long as the cluster is idle. A dead peer closes its
# connection and is noticed at once; this bound only has to be longer than any idle time.
_IDLE = timedelta(days=365)


class _Command(IntEnum):
    STEP = 1
    RELEASE = 2
    OPEN = 3
    STOP = 4
    RELEASE_ALL = 5


class GroupDecider:
    """Decides with the other ranks: rank 0 takes the best of all winners and tells everyone."""

    def __init__(self, model: LoadedModel, rank: int) -> None:
        self._model = model
        self._rank = rank
        self._ranks = model.tensor_parallel
        self._shard = -(-model.vocabulary_size // self._ranks)
        self._local = LocalDecider()

    def decide(self, logits: torch.Tensor, contexts: Sequence[DecisionContext]) -> Decisions:
        """See `Decider`. `logits` `[decisions, this rank's part of the vocabulary]`."""
        if not contexts:
            return Decisions([], {})
        whole = [index for index, context in enumerate(contexts) if not is_shardable(context.sampling)]
        part = [index for index in range(len(contexts)) if index not in set(whole)]
        tokens = [-1] * len(contexts)
        asked: dict[int, torch.Tensor] = {}
        if part:
            chosen = self._by_winners(logits[part], [contexts[index] for index in part])
            for index, token in zip(part, chosen, strict=True):
                tokens[index] = token
        if whole:
            gathered = self._gather(self._padded(logits[whole]))
            if gathered is not None:
                full = torch.cat(gathered, dim=1)[:, : self._model.vocabulary_size]
                decided = self._local.decide(full, [contexts[index] for index in whole])
                for position, index in enumerate(whole):
                    tokens[index] = decided.tokens[position]
                    if position in decided.logits:
                        asked[index] = decided.logits[position]
        agreed = torch.tensor(tokens, device=self._model.device)
        distributed.broadcast(agreed, src=0)
        return Decisions(agreed.tolist(), asked)

    def _by_winners(self, logits: torch.Tensor, contexts: Sequence[DecisionContext]) -> list[int]:
        values, ids = shard_winners(logits, contexts, self._model.vocabulary_offset)
        gathered_values, gathered_ids = self._gather(values), self._gather(ids)
        if gathered_values is None or gathered_ids is None:
            return [-1] * len(contexts)
        best, tokens = torch.stack(gathered_values), torch.stack(gathered_ids)
        return mark_undecidable(len(contexts), lambda rows: merge_winners(best[:, rows], tokens[:, rows]))

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        """Parts of equal width: the last rank's may be shorter."""
        missing = self._shard - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")).contiguous()

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """All ranks' tensors on rank 0, `None` elsewhere."""
        gathered = [torch.empty_like(tensor) for _ in range(self._ranks)] if self._rank == 0 else None
        distributed.gather(tensor.contiguous(), gathered, dst=0)
        return gathered


def build_engine(section: TargetSection, rank: int = 0) -> TargetEngine:
    """Load this rank's part of the target. With several ranks, `join` comes first on each of them.

    Raises `ModelLoadError`, `ConfigurationError`.
    """
    rule = acceptance_rule(section)
    model = load_model(
        section, rank=rank, tensor_parallel=section.tensor_parallel, max_context_len=section.max_context_len
    )
    blocks = blocks_that_fit(model, section.kv)
    decider: Decider = LocalDecider()
    if section.tensor_parallel > 1:
        fewest = torch.tensor(blocks)
        distributed.all_reduce(fewest, op=distributed.ReduceOp.MIN)
        blocks = int(fewest)
        decider = GroupDecider(model, rank)
    engine = TargetEngine(model, KvPool(model, section.kv, blocks), decider, section.served_name, rule)
    try:
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    return engine


def join(section: TargetSection, rank: int, address: str, port: int) -> None:
    """Enter the group whose rank 0 listens at `address:port`: gloo between CPUs, NCCL between GPUs.

    Raises `ConfigurationError` when CUDA is wanted and absent.
    """
    backend = "cpu:gloo,cuda:nccl" if choose_device(section.device, rank).type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=section.tensor_parallel, timeout=_IDLE
    )


def leave() -> None:
    """Leave the group, if in one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


class RankZero:
    """The engine of a group as its clients see it: every command goes to the followers first."""

    def __init__(self, engine: TargetEngine) -> None:
        self._engine = engine
        self._broken: str | None = None

    @property
    def broken(self) -> str | None:
        """Why the group must be restarted, if it must."""
        return self._broken

    def info(self) -> TargetInfo:
        """What this target is."""
        return self._engine.info()

    def step(self, batch: StepBatch) -> StepResult:
        """See `TargetEngine.step`. Raises `TargetUnavailable` once the group is broken."""
        self._command(_Command.STEP, step_batch_to_bytes(batch))
        with _Breaks(self):
            return self._engine.step(batch)

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """See `TargetEngine.release`."""
        self._command(_Command.RELEASE, json.dumps(list(sequence_ids)).encode())
        return self._engine.release(sequence_ids)

    def release_all(self) -> KvOccupancy:
        """See `TargetEngine.release_all`."""
        self._command(_Command.RELEASE_ALL, b"")
        return self._engine.release_all()

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """See `TargetEngine.open`."""
        self._command(_Command.OPEN, open_rows_to_bytes(rows))
        with _Breaks(self):
            return self._engine.open(rows)

    def close(self) -> None:
        """Let the followers go and close this rank's engine; no command can follow. Closing twice is harmless."""
        try:
            if self._broken is None:
                self._command(_Command.STOP, b"")
                self.break_off("it is closed")
        except TargetUnavailable:
            pass  # told already; followers end with the connection
        finally:
            self._engine.close()

    def _command(self, command: _Command, payload: bytes) -> None:
        if self._broken is not None:
            raise TargetUnavailable(f"the tensor-parallel group is broken: {self._broken}")
        with _Breaks(self):
            distributed.broadcast(torch.tensor([command, len(payload)]), src=0)
            if payload:
                distributed.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)

    def break_off(self, reason: str) -> None:
        """No further command may be sent: the ranks may no longer agree."""
        self._broken = reason


class _Breaks:
    """Whatever is raised inside may have left the ranks in different states."""

    def __init__(self, group: RankZero) -> None:
        self._group = group

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._group.break_off(repr(error))
            logger.error("the tensor-parallel group is broken: %r", error)
            if isinstance(error, Exception):
                raise TargetUnavailable(f"the tensor-parallel group is broken: {error!r}") from error


def follow(engine: TargetEngine) -> None:
    """Obey rank 0 until it says stop, then close the engine, as also before raising whatever else ends the group."""
    try:
        while (received := _receive())[0] is not _Command.STOP:
            _obey(engine, *received)
    finally:
        engine.close()


def _receive() -> tuple[_Command, bytes]:
    header = torch.zeros(2, dtype=torch.long)
    distributed.broadcast(header, src=0)
    command, length = _Command(int(header[0])), int(header[1])
    payload = torch.zeros(length, dtype=torch.uint8)
    if length:
        distributed.broadcast(payload, src=0)
    return command, payload.numpy().tobytes()


def _obey(engine: TargetEngine, command: _Command, content: bytes) -> None:
    match command:
        case _Command.STEP:
            engine.step(step_batch_from_bytes(content))
        case _Command.OPEN:
            engine.open(open_rows_from_bytes(content))
        case _Command.RELEASE:
            engine.release([SequenceId(name) for name in json.loads(content)])
        case _Command.RELEASE_ALL:
            engine.release_all()
