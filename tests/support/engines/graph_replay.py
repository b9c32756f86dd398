"""CUDA graph runners without a GPU: replaying a graph calls the recorded function again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, PreTrainedConfig

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.models import tiny
from workers.forward import runner as runners
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.choice import ChosenBackend
from workers.forward.backends.sdpa import CAPABILITIES, SdpaBackend
from workers.forward.captured_passes import GraphCapture
from workers.forward.cuda_graphs import Compute, CudaGraphRunner
from workers.forward.graph_sizes import GraphSize
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.block_table import OUT_OF_WINDOW, BlockTable
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.verify.decider import Decider, LocalDecider
from workers.verify.engine import TargetEngine

BLOCK = 4
CPU = torch.device("cpu")
TOLERANCE = 2e-4
BRANCHING = TokenTree((5, 6, 7, 8, 5, 9), (-1, -1, 0, 0, 1, 3))
WINDOW = 6


@dataclass
class FakeRecorder:
    """A recorder without CUDA graphs: a replay calls the function again on the same tensors. Counts both."""

    recorded: int = 0
    replayed: int = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        function()

        def replay() -> None:
            self.replayed += 1
            function()

        return replay


def gemma3() -> PreTrainedConfig:
    """Four layers: three with a window of `WINDOW` tokens and one with full attention. Two tables and two masks."""
    kinds = ["full_attention" if layer == 2 else "sliding_attention" for layer in range(4)]
    shape = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3}
    size = {"vocab_size": tiny.VOCABULARY, "intermediate_size": 80, "head_dim": 8, "max_position_embeddings": 256}
    window = {"sliding_window": WINDOW, "layer_types": kinds, "query_pre_attn_scalar": 8}
    return Gemma3TextConfig(**(shape | size | window))


CONFIGURATIONS = {
    "full": tiny.llama,
    "learned positions": lambda: tiny.gpt2(
        pad_token_id=None
    ),  # a padding token makes transformers search every step for it
    "latents": tiny.deepseek_v3,
    "window": lambda: tiny.mistral(sliding_window=WINDOW),
    "several tables": gemma3,
}


@dataclass
class Bench:
    """A runner over a pool, with or without CUDA graphs."""

    pool: KvPool
    runner: ModelRunner
    graphs: CudaGraphRunner | None = None

    def run(self, *rows: ForwardRow, accepted: Sequence[int] = ()) -> torch.Tensor:
        """Run one step and commit: the nodes `accepted` of a branching tree, the first two nodes of a chain."""
        for row in rows:
            self.pool.reserve(row.table, row.end)
        logits = self.runner.forward(rows).clone()
        for row in rows:
            self.runner.commit(row, range(len(row.tree))[:2] if row.tree.is_chain else accepted)
        return logits

    def stored(self, table: BlockTable) -> torch.Tensor:
        """The stored keys and values of a sequence, without positions outside the window."""
        slots = [
            blocks[position // BLOCK] * BLOCK + position % BLOCK
            for blocks in table.blocks
            for position in range(table.stored_len)
            if blocks[position // BLOCK] != OUT_OF_WINDOW
        ]
        stored = [store for store in (*self.pool.keys, *self.pool.values) if len(store)]
        return torch.cat([store.flatten(0, 1)[slots] for store in stored])


def gathering(setting: AttentionSetting) -> ChosenBackend:
    """Attention over gathered blocks."""
    return ChosenBackend("sdpa", SdpaBackend(setting), CAPABILITIES)


SIZES = [
    GraphSize(rows, width, rows * width, blocks, rows * width)
    for width in (1, 2, 8, 32, 64)
    for rows in (1, 4)
    for blocks in (8, 32)
]
"""Sizes of graphs for all steps of `scenario` and `decode_with_trees`, ascending."""


def open_bench(
    directory: Path,
    record: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    taps: tuple[int, ...] = (),
    attention: Callable[[AttentionSetting], ChosenBackend] = gathering,
    sizes: Sequence[GraphSize] = SIZES,
) -> Bench:
    """A bench for the model in `directory`. With `record` it replays graphs of these `sizes`, with `attention`."""
    model = replace(
        load_model(ModelSection(path=str(directory), device="cpu", native="off")), uses_cuda_graphs=record is not None
    )
    pool = KvPool(model.kv_spec, KvSection(block_size=BLOCK), blocks=200)
    with _graphs(record, attention, sizes) as made:
        runner = ModelRunner(model, pool, taps)
    return Bench(pool, runner, made[0] if made else None)


@contextmanager
def _graphs(
    record: GraphCapture | None, attention: Callable[[AttentionSetting], ChosenBackend], sizes: Sequence[GraphSize]
) -> Iterator[list[CudaGraphRunner]]:
    """A runner that is made inside replays graphs. They are warmed up in the end, and yielded as the only one."""
    made: list[CudaGraphRunner] = []

    def graphed(_: object, setting: AttentionSetting, compute: Compute, *__: object) -> CudaGraphRunner | None:
        if record is None:
            return None
        made.append(CudaGraphRunner(compute, record, setting, attention(setting), sizes))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runners, "make_graph_runner", graphed)
        yield made
    if made:
        made[0].warm_up()


def some_tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, tiny.VOCABULARY, (count,), generator=generator).tolist())


def scenario(bench: Bench) -> tuple[list[torch.Tensor], list[BlockTable]]:
    """Prompts in chunks, single tokens, chains and trees, alone and together, for sequences of different lengths."""
    tables = [bench.pool.new_table() for _ in range(3)]
    first, second, third = tables
    logits = [
        bench.run(ForwardRow(first, some_tokens(21), select=(20,))),
        bench.run(ForwardRow(first, (7,), select=(0,)), ForwardRow(second, some_tokens(13, seed=1))),
        bench.run(ForwardRow(second, some_tokens(30, seed=2), select=(4, 29)), ForwardRow(first, (8,), select=(0,))),
        bench.run(*(ForwardRow(table, (9,), select=(0,)) for table in tables)),
        bench.run(
            ForwardRow(first, (10,), TokenTree.chain((4, 5, 6)), (0, 1, 2, 3)),
            ForwardRow(second, (11, 12), BRANCHING, tuple(range(1, 8))),
            ForwardRow(third, (13,), select=(0,)),
            accepted=(0, 3),
        ),
    ]
    for token in range(20, 30):
        logits.append(bench.run(*(ForwardRow(table, (token,), select=(0,)) for table in tables)))
        logits.append(bench.run(ForwardRow(second, (token,), BRANCHING, tuple(range(7))), accepted=(0, 3, 5)))
    return logits, tables


def open_engine(
    directory: Path,
    record: GraphCapture | None,
    device: str = "cpu",
    make_decider: Callable[[LoadedModel], Decider] = lambda _: LocalDecider(),
    attention: Callable[[AttentionSetting], ChosenBackend] = gathering,
    sizes: Sequence[GraphSize] = SIZES,
) -> TargetEngine:
    """An engine for the model in `directory`. With `record` it replays graphs of these `sizes`, with `attention`."""
    model = replace(
        load_model(ModelSection.model_validate({"path": str(directory), "device": device, "native": "off"})),
        uses_cuda_graphs=record is not None,
    )
    with _graphs(record, attention, sizes):
        pool = KvPool(model.kv_spec, KvSection(block_size=BLOCK), blocks=100)
        return TargetEngine(model, pool, make_decider(model))


def decode_with_trees(
    engine: TargetEngine, name: str, seed: int, temperature: float, known: Sequence[int], count: int = 24
) -> list[int]:
    """Decode `count` tokens. The draft trees contain tokens of `known`, the expected answer, and wrong tokens."""
    prompt = some_tokens(11 + seed, seed=seed)
    start = SequenceStart(len(prompt), SamplingParameters(temperature=temperature, seed=seed))
    stored, pending, answer = 0, prompt, []
    while len(answer) < count:
        draft = known[len(answer) : len(answer) + 3]
        tree = TokenTree.chain(draft)
        if len(answer) % 2 and len(draft) == 3 and 90 not in draft[:2]:
            tree = TokenTree((90, draft[0], 91, draft[1], draft[2]), (-1, -1, 0, 1, 3))
        base_len = stored + len(pending)
        row = VerifyRow(SequenceId(name), base_len, pending, tree, start=start if stored == 0 else None)
        (verdict,) = engine.step(StepBatch((row,))).verdicts
        assert verdict.fault is None
        stored += len(pending) + len(verdict.tokens) - 1
        answer += verdict.tokens
        pending = verdict.tokens[-1:]
    return answer[:count]
