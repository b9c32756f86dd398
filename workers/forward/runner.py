"""Runs forward passes over ragged batches of rows, and commits the accepted tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

import torch

from cluster.core.errors import ConfigurationError, KvPoolExhausted
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.attention import StepPlan, bind
from workers.forward.backends.base import AttentionSetting, StepKind
from workers.forward.backends.choice import ChosenBackend, choose_backend, require_backend
from workers.forward.captured_passes import GraphCapture, allocated_bytes, peak_from_now, within_reserved
from workers.forward.cuda_graphs import CudaGraphRunner, make_graph_runner
from workers.forward.layout import RowShape, SourceShape, StepRows, slots_of
from workers.forward.loaded_model import WHOLE_PASS, EncodedSources, LoadedModel, PassOptions, PassOutput
from workers.forward.partial_pass import WHOLE, PartialPass, only_parts
from workers.forward.recurrence.plan import RecurrenceColumns, RecurrencePlan, StateRow, recurrence_columns
from workers.forward.recurrent import bind_recurrent
from workers.forward.taps import TapRecorder, check_taps
from workers.kv.block_table import BlockTable
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore, StoredSource
from workers.transfer import launch_on, to_device

logger = logging.getLogger(__name__)

WARM_UP_WIDTHS = (8, 1, 2, 64)
"""Tokens per warm-up step. The compiler makes one version for a single token and one for all other widths."""


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """Tokens that follow a table's stored ones, a tree below the last of them, and the logits to return."""

    table: BlockTable
    tokens: tuple[int, ...]
    tree: TokenTree = EMPTY_TREE
    select: tuple[int, ...] = ()
    """Indices within the row of the tokens whose logits are returned: committed tokens first, then the tree's nodes."""
    uncommitted: int = 0
    """Positions between the table's stored ones and this row's tokens, whose keys and values an earlier pass wrote
    without a commit. A draft grows by them token by token; `KvPool.truncate` to `stored_len` removes them."""
    source: StoredSource | None = None
    """What the row's cross-attention reads; `None` without an encoder."""

    @property
    def shape(self) -> RowShape:
        """The row as the layout sees it."""
        source = None if self.source is None else SourceShape(self.source.table.blocks, len(self.source))
        stored_len = self.table.stored_len + self.uncommitted
        return RowShape(self.table.blocks, stored_len, len(self.tokens), self.tree, source)

    @property
    def end(self) -> int:
        """Length to reserve before the forward pass."""
        return self.table.stored_len + self.uncommitted + len(self.tokens) + len(self.tree)


class ModelRunner:
    """Runs a loaded model over its pool. Not thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvPool,
        taps: tuple[int, ...] = (),
        attention: ChosenBackend | None = None,
        capture: GraphCapture | None = None,
    ) -> None:
        """`taps`: see `hidden`. `attention` is what `choose_attention` returned, if it was called before. Graphs are
        CUDA's unless `capture` is given.

        Raises `ConfigurationError` for a tap that the model does not have.
        """
        check_taps(taps, model.depth)
        self._taps = taps
        self._recorder = TapRecorder(taps)
        self._shapes: tuple[RowShape, ...] = ()
        self._firsts: tuple[int, ...] = ()
        """Place of the first token of each row among those of the last pass."""
        self.hidden: torch.Tensor | None = None
        """Hidden states of the last pass, bfloat16 `[tokens, taps * hidden]`; `None` without taps.

        Tap `l` is the residual stream after `l` decoder layers. The tokens are those of all rows with their nodes, in
        the order of the rows. Valid until the next pass."""
        self._model = model
        self._pool = pool
        self._paged = bind(model.module)
        self._recurrent = bind_recurrent(model.module) if model.states else None
        self._attention = attention or choose_attention(model, pool)
        self._partials: list[PartialPass] = []
        self.graphs: CudaGraphRunner | None = None
        """Passes that `warm_up` captures as CUDA graphs."""
        if model.native is None:
            setting = attention_setting(model, pool)
            self.graphs = make_graph_runner(model, setting, self._compute_captured, self._attention, capture)
        else:
            model.native.bind(pool)

    def warm_up(self) -> None:
        """Run steps of several widths, so that no request waits for compilation. Frees all blocks that it uses.

        Prompt chunks that have kernels of their own run by themselves and before a tree. On a GPU, a step as large as
        any shows whether its activations fit into the memory that was left for them; raises `ConfigurationError` if the
        GPU has less.
        """
        self._pool.warm_up()
        prompts = () if self._attention is None else self._attention.capabilities.prompts
        steps = [(width, EMPTY_TREE) for width in (*WARM_UP_WIDTHS, *prompts)]
        steps += [(width - 1, TokenTree.chain((0,))) for width in prompts]
        for fresh, tree in steps:
            if fresh + len(tree) <= max(self._model.max_context_len, *WARM_UP_WIDTHS):
                with suppress(KvPoolExhausted):  # the pool may be too small for a step of this width
                    self._run_alone([(fresh, tree)])
        with suppress(KvPoolExhausted):
            self._compare_largest_step()
        if self.graphs is not None:
            device = self._model.device
            setting, _ = self._pool.memory_setting
            with within_reserved(self._model.graph_bytes, lambda: allocated_bytes(device), setting):
                self.graphs.warm_up(self._partials)

    def _compare_largest_step(self) -> None:
        """Compare what the activations of the largest step take of a GPU with what the pool left for them.

        Raises `ConfigurationError` if the GPU has no memory for them: serving would fail at the first such step.
        """
        tokens, longest = self._pool.largest_step, self._model.max_context_len
        peak = peak_from_now(self._model.device) if tokens else None
        if peak is None:
            return
        reserved, what = tokens * self._model.layer_bytes, f"the activations of a step of {tokens} tokens"
        rows = [(min(longest, tokens - begin), EMPTY_TREE) for begin in range(0, tokens, longest)]
        setting, value = self._pool.memory_setting
        try:
            with within_reserved(reserved, peak, setting, what=what, lacks="CUDA graphs"):
                self._run_alone(rows)
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                f"{setting}: {value} is refused: {what} take more memory than the pool leaves of the GPU, where "
                f"{reserved} bytes were reserved for them; lower it or scheduler.max_step_tokens"
            ) from error

    def _run_alone(self, rows: Sequence[tuple[int, TokenTree]]) -> None:
        """Run a step of new rows, of so many tokens and a tree each, and free their blocks.

        Raises `KvPoolExhausted` if the pool has no room for them.
        """
        begun, forwards = time.perf_counter(), list[ForwardRow]()
        try:
            for fresh, tree in rows:
                select = (fresh + len(tree) - 1,)
                forwards.append(ForwardRow(self._pool.new_table(), (0,) * fresh, tree, select))
                self._pool.reserve(forwards[-1].table, forwards[-1].end, len(tree))
            self.forward(forwards)
        finally:
            for row in forwards:
                self._pool.release(row.table)
        width = sum(fresh + len(tree) for fresh, tree in rows)
        logger.info("warm-up of a step of %d tokens took %.1f s", width, time.perf_counter() - begun)

    def expect(self, partial: PartialPass) -> None:
        """Let `warm_up` prepare passes of this part of the model too."""
        self._partials.append(partial)

    @torch.inference_mode()
    def forward(self, rows: Sequence[ForwardRow], options: PassOptions = WHOLE_PASS) -> torch.Tensor:
        """Compute all rows in one pass. Each row's table must have room for `row.end` tokens.

        Stores the keys and values of all tokens and nodes; `commit` commits them. Returns the selected logits, row
        after row, `[selected, vocabulary (this rank's part)]`. They are valid until the next pass.

        A partial pass stores keys and values of the layers that it computes only. The next whole pass over the same
        positions overwrites them, so such a pass is not committed. It records no hidden states. Raises
        `ConfigurationError` if the model has no such parts, `ValueError` for inputs of another shape.
        """
        launch_on(self._model.device)
        self._check(rows, options)
        recurrence = self._claim_states(rows)
        output = self._run(rows, options, recurrence)
        if recurrence is not None:
            for row in rows:
                row.table.states.is_computed = True
        self.hidden = output.hidden if options.with_taps else None  # a CUDA graph records them in any case
        return output.logits[: sum(len(row.select) for row in rows)]

    @torch.inference_mode()
    def encode(self, sources: Sequence[StoredSource], store: SourceStore) -> None:
        """Read sources, and store the keys and values that cross-attention reads in their blocks.

        Raises `ValueError` if the model has no encoder.
        """
        if self._model.source is None:
            raise ValueError("the model has no encoder")
        for batch in self._model.source.encoder.encode([source.tokens for source in sources], self._model.device):
            self._store_sources([sources[index] for index in batch.indices], batch, store)

    @torch.inference_mode()
    def store_encoded(self, source: StoredSource, hidden: torch.Tensor, store: SourceStore) -> None:
        """Store the keys and values of a source whose output `[tokens, hidden]` of an equal encoder is known.

        Raises `ValueError` if the model has no encoder.
        """
        if self._model.source is None:
            raise ValueError("the model has no encoder")
        self._store_sources([source], self._model.source.encoder.project(hidden.to(self._model.device)), store)

    def _store_sources(self, sources: Sequence[StoredSource], batch: EncodedSources, store: SourceStore) -> None:
        size, slots = self._pool.block_size, dict[int, torch.Tensor]()
        states = batch.states.to(self._model.dtype)
        for layer, placement in enumerate(self._pool.kv_groups.placements):
            if placement.table not in slots:
                tables = [(source.table.blocks[placement.table], len(source)) for source in sources]
                found = [slot for blocks, length in tables for slot in slots_of(blocks, 0, length, size)]
                slots[placement.table] = to_device(found, self._model.device)
            self._pool.write(layer, slots[placement.table], states[:, layer, 0], states[:, layer, 1])
        first = 0
        for source in sources:
            store.mark_encoded(source, batch.hidden[first : first + len(source)])
            first += len(source)

    def hidden_of(self, row: int, nodes: Sequence[int] = (), hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of a row of the last pass: its committed tokens, then the path `nodes` of its tree.

        Returns bfloat16 `[committed + nodes, taps * hidden]`, or those rows of `hidden` `[tokens, width]`, which was
        made of the hidden states of all tokens. Raises `ValueError` without taps.
        """
        hidden = self.hidden if hidden is None else hidden
        if hidden is None:
            raise ValueError("the last pass recorded no hidden states: the runner was made without taps")
        tokens = self.tokens_of(row, nodes)
        return hidden[tokens if isinstance(tokens, slice) else to_device(tokens, hidden.device)]

    def tokens_of(self, row: int, nodes: Sequence[int] = ()) -> slice | list[int]:
        """Where the last pass has a row's committed tokens and the path `nodes` of its tree, among all its tokens."""
        first, fresh = self._firsts[row], self._shapes[row].fresh
        if all(node == depth for depth, node in enumerate(nodes)):
            return slice(first, first + fresh + len(nodes))
        return [*range(first, first + fresh), *(first + fresh + node for node in nodes)]

    def _claim_states(self, rows: Sequence[ForwardRow]) -> RecurrenceColumns | None:
        """What recurrent layers do with these rows; `None` without such layers.

        Raises `KvPoolExhausted` if there is no room for their states, `ValueError` for a row that begins where no state
        was kept.
        """
        if self._pool.states is None:
            return None
        if any(row.uncommitted for row in rows):
            raise ValueError("a row after uncommitted positions is refused: recurrent layers keep no state there")
        for row in rows:
            if len(row.table.states.fresh) != 1 + len(row.tree):
                self._pool.states.claim(row.table.states, 1 + len(row.tree))
        states = [
            StateRow(len(row.tokens), row.tree, row.table.states, self._pool.keep_states(row.table, len(row.tokens)))
            for row in rows
        ]
        return recurrence_columns(states)

    @contextmanager
    def _recurring(self, plan: RecurrencePlan | None) -> Iterator[None]:
        """Inside, recurrent layers compute over the states of sequences, as the plan says."""
        if self._recurrent is None or self._pool.states is None:
            yield
            return
        self._recurrent.states = self._pool.states.slots.layers
        self._recurrent.plan = plan
        try:
            yield
        finally:
            self._recurrent.plan = None

    def _check(self, rows: Sequence[ForwardRow], options: PassOptions) -> None:
        inputs = options.inputs
        if options.partial is WHOLE and inputs is None:
            return
        hidden = self._model.hidden_size
        options.partial.check(self._model.depth, hidden, self._model.device)
        expected = sum(len(row.tokens) + len(row.tree) for row in rows), hidden
        if inputs is not None and inputs.shape != expected:
            raise ValueError(f"inputs: the shape {tuple(inputs.shape)} is refused; it must be {expected}")

    def _run(
        self, rows: Sequence[ForwardRow], options: PassOptions, recurrence: RecurrenceColumns | None
    ) -> PassOutput:
        """Run all rows. The output may have more logits than the rows select."""
        device = self._model.device
        shapes = StepRows(row.shape for row in rows)
        tokens = [token for row in rows for token in (*row.tokens, *row.tree.tokens)]
        self._shapes = tuple(shapes)
        self._firsts = (0, *accumulate(shape.width for shape in shapes))
        selected = [first + index for row, first in zip(rows, self._firsts, strict=False) for index in row.select]
        if not selected:
            selected = [len(tokens) - 1]  # some linear kernels reject an input of no rows
        if self._model.native is not None:
            taps = self._taps if options.with_taps and options.partial is WHOLE else ()
            return self._model.native.compute(tokens, selected, shapes, options, taps)
        positions = shapes.columns.positions
        if self.graphs is not None and options.inputs is None:
            replayed = self.graphs.run(shapes, tokens, positions, selected, options.partial, recurrence)
            if replayed is not None:
                return replayed
        ids, position_ids, chosen = (to_device(values, device) for values in (tokens, positions, selected))
        plan = self._plan(shapes)
        with self._recurring(None if recurrence is None else recurrence.on(device)):
            return self._compute(ids[None], position_ids[None], chosen, plan, options.partial, options.inputs)

    def _plan(self, shapes: Sequence[RowShape]) -> StepPlan | None:
        """The step, planned by the backend; `None` if no layer attends."""
        if not self._model.attends:
            return None
        if self._attention is None:
            raise RuntimeError("no attention backend was chosen: the model's layers are the CPU kernels'")
        backend = self._attention.backend
        sources = None if self._model.source is None else backend.plan_sources(shapes)
        return StepPlan(backend, backend.plan(shapes), sources)

    def _compute_captured(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        selected: torch.Tensor,
        plan: StepPlan,
        partial: PartialPass,
        recurrence: RecurrencePlan,
    ) -> PassOutput:
        """What `_compute` does, in a CUDA graph, from buffers."""
        with self._recurring(recurrence):
            return self._compute(tokens, positions, selected, plan, partial)

    def _compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        selected: torch.Tensor,
        plan: StepPlan | None,
        partial: PartialPass = WHOLE,
        inputs: torch.Tensor | None = None,
    ) -> PassOutput:
        """Run the model over tokens and positions `[1, tokens]`, with logits for `selected`."""
        module = self._model.module
        embeddings = None if inputs is None else inputs[None].to(self._model.device, self._model.dtype)
        recorder = self._recorder if partial is WHOLE else TapRecorder(())
        self._paged.step = plan
        try:
            with only_parts(module, partial), recorder.recording(module):
                output = module(
                    input_ids=tokens if embeddings is None else None,
                    inputs_embeds=embeddings,
                    position_ids=positions,
                    use_cache=False,
                    logits_to_keep=selected,
                )
        finally:
            self._paged.step = None
        return PassOutput(output.logits[0], recorder.hidden())

    def commit(self, row: ForwardRow, nodes: Sequence[int] = ()) -> None:
        """Commit the row's tokens and the accepted path `nodes`, and free the blocks of the rest of the tree.

        The keys and values of the path move to the positions after the committed tokens (`KvPool.move`). Raises
        `ValueError` for a row with uncommitted positions before its tokens.
        """
        if row.uncommitted:
            raise ValueError(f"a row after {row.uncommitted} uncommitted positions cannot be committed")
        if nodes and nodes[-1] >= len(nodes):  # nodes ascend along a path: these are not the first ones
            self._pool.move(row.table, row.table.stored_len + len(row.tokens), nodes)
        tokens = (*row.tokens, *[row.tree.tokens[node] for node in nodes]) if nodes else row.tokens
        if self._pool.states is None:
            self._pool.commit(row.table, tokens)
        else:
            self._pool.commit_states(row.table, tokens, nodes)


def attention_setting(model: LoadedModel, pool: KvPool) -> AttentionSetting:
    """What an attention backend is opened for."""
    return AttentionSetting(
        store=pool.store,
        layers=model.layers,
        blocks=pool.blocks_total,
        dtype=model.dtype,
        device=model.device,
        relative_biases=() if model.source is None else model.source.relative_biases,
        has_sources=model.source is not None,
        code_directory=model.code_directory,
    )


def choose_attention(model: LoadedModel, pool: KvPool, name: str = "auto") -> ChosenBackend | None:
    """Choose what computes attention in the model's modules. `None` for layers of the CPU kernels, and if none attends.

    `name` is `target.attention_backend`. All ranks of a model call this together. Raises `ConfigurationError` if the
    named backend cannot be used.
    """
    if model.native is not None or not model.attends:
        if name == "auto":
            return None
        problem = "no layer attends" if model.native is None else "the CPU kernels compute the whole model"
        raise ConfigurationError(f"target.attention_backend: {name!r} is refused, because {problem}; it must be auto")
    setting = attention_setting(model, pool)
    if name != "auto":
        return require_backend(name, setting, model.tensor_parallel)
    return choose_backend(setting, StepKind.RAGGED, model.tensor_parallel)
