"""Hybrid models: layers with recurrent and convolutional states beside layers that attend.

The text is that of `transformers` alone, whatever drafts are verified, and a state has the same bits however its tokens
were computed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import RowFaultCode
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from deploy.implied_settings import with_implied_settings
from tests.support.engines.engine_rows import PROMPT, SAMPLED, decode, first_row, open_row, verify
from tests.support.engines.engine_sequence import GREEDY, drafts_near
from tests.support.models import tiny
from tests.support.models.hybrids import KINDS, OTHERS, committed_parts, save_hybrid
from tests.support.models.model_cases import ModelCase
from tests.support.slow import slow_but
from workers.draft.registry import create
from workers.forward.layer_lists import decoder_layers
from workers.forward.recurrence.mixers import ShortConvolutionMixer
from workers.forward.recurrent import bind_recurrent, cache_name
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.block_table import BlockTable
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool
from workers.kv.pool_size import PREFIX_STATES_PER_SEQUENCE, block_bytes, blocks_that_fit, state_bytes
from workers.kv.states import STATES_PER_SEQUENCE
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

COUNT = 30
NEIGHBOR = tuple(range(10, 23))


@pytest.fixture(scope="module", params=slow_but(KINDS[:1], (*KINDS, *OTHERS)))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
    return save_hybrid(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(case: ModelCase) -> TargetEngine:
    return case.engine()


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
    """A model of the kind that loads fastest."""
    return save_hybrid(tmp_path_factory.mktemp("lfm2"), "lfm2")


def test_greedy_text_is_that_of_transformers(engine: TargetEngine, case: ModelCase) -> None:
    text = decode(engine, PROMPT, COUNT)
    assert text == case.reference(PROMPT, COUNT)
    assert len(set(text)) > 3  # it does not repeat one token


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_draft_changes_the_text(engine: TargetEngine, sampling: SamplingParameters) -> None:
    plain = decode(engine, PROMPT, COUNT, sampling)
    text = [*PROMPT, *plain, *range(10)]
    draw, accepted, drafted = random.Random(0), 0, 0

    def partly_right(tokens: Sequence[int]) -> TokenTree:
        true = text[len(tokens) : len(tokens) + 5]
        right = draw.randrange(1, 5)
        return TokenTree.chain([*true[:right], *((token + 1) % tiny.VOCABULARY for token in true[right:])])

    def branching(tokens: Sequence[int]) -> TokenTree:
        true = text[len(tokens) : len(tokens) + 4]
        wrong = [draw.randrange(tiny.VOCABULARY) for _ in range(3)]
        paths = [wrong, true[:3], (*true[:2], *wrong)]
        draw.shuffle(paths)
        return TokenTree.from_candidates(paths, 9)

    for propose in (partly_right, branching):
        tokens = list(PROMPT)
        verdict = verify(engine, first_row("a", PROMPT, sampling))
        while True:
            accepted, drafted = accepted + verdict.accepted, drafted + verdict.drafted
            tokens.extend(verdict.tokens)
            if len(tokens) >= len(PROMPT) + COUNT:
                break
            verdict = verify(engine, VerifyRow(SequenceId("a"), len(tokens), (tokens[-1],), propose(tokens)))
        assert tokens[: len(PROMPT) + COUNT] == text[: len(PROMPT) + COUNT]
    assert COUNT < accepted < drafted
    engine.release_all()


def test_neighbors_and_chunks_do_not_change_the_text(engine: TargetEngine) -> None:
    alone = decode(engine, PROMPT, 10)
    first = replace(first_row("a", PROMPT[:5]), decide=False)
    verdicts = engine.step(StepBatch((first, first_row("b", NEIGHBOR, SAMPLED)))).verdicts
    texts = {"a": list(PROMPT), "b": [*NEIGHBOR, *verdicts[1].tokens]}
    pending = {"a": PROMPT[5:], "b": verdicts[1].tokens}
    while len(texts["a"]) < len(PROMPT) + 10:
        tree = TokenTree.chain([1, 2, 3])
        rows = [
            VerifyRow(SequenceId(name), len(texts[name]), tuple(pending[name]), tree if name == "b" else EMPTY_TREE)
            for name in ("b", "a")
        ]
        for row, verdict in zip(rows, engine.step(StepBatch(tuple(rows))).verdicts, strict=True):
            texts[row.sequence_id] += verdict.tokens
            pending[row.sequence_id] = verdict.tokens[-1:]
    assert texts["a"][len(PROMPT) :] == alone
    engine.release_all()


class Steps:
    """Steps of a model over its own pool, without decisions."""

    def __init__(self, case: ModelCase) -> None:
        _, self.pool = case.engine_and_pool(200)
        self.model = case.model()
        self.runner = ModelRunner(self.model, self.pool, taps=(0, 2, 4))

    def run(
        self, table: BlockTable, tokens: Sequence[int], tree: TokenTree = EMPTY_TREE, path: Sequence[int] = ()
    ) -> None:
        row = ForwardRow(table, tuple(tokens), tree, (len(tokens) - 1,))
        self.pool.reserve(table, row.end, len(tree))
        self.runner.forward([row])
        self.runner.commit(row, path)

    def parts(self, table: BlockTable) -> list[torch.Tensor]:
        return committed_parts(self.pool, table)


def test_a_state_has_the_same_bits_however_its_tokens_were_computed(case: ModelCase) -> None:
    steps = Steps(case)
    text = [*PROMPT, 3, 4, 5, 6]
    single, chunked, chain, branch = (steps.pool.new_table() for _ in range(4))
    for token in text:
        steps.run(single, [token])
    steps.run(chunked, text[:5])
    steps.run(chunked, text[5:])
    steps.run(chain, text[:8])
    steps.run(chain, text[8:9], TokenTree.chain([*text[9:], 90, 91]), (0, 1, 2))
    steps.run(branch, text[:8])
    steps.run(branch, text[8:9], TokenTree((90, 4, 91, 5, 6, 7), (-1, -1, 0, 1, 3, 1)), (1, 3, 4))
    expected = steps.parts(single)
    assert sum(float(part.abs().sum()) for part in expected) > 0
    for table in (chunked, chain, branch):
        assert table.tokens == text
        for found, wanted in zip(steps.parts(table), expected, strict=True):
            assert torch.equal(found, wanted)
    steps.run(single, [7])
    steps.run(chain, [7], TokenTree.chain([8, 9]))  # rejected completely
    for found, wanted in zip(steps.parts(chain), steps.parts(single), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_a_model_of_recurrent_layers_alone_writes_the_text_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = save_hybrid(tmp_path, family)

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("no layer attends, so no attention is planned")

    monkeypatch.setattr("workers.forward.runner.choose_backend", refuse)
    engine, pool = case.engine_and_pool(60)
    text = case.reference(PROMPT, COUNT)
    assert decode(engine, PROMPT, COUNT) == text
    assert pool.blocks_free == 60  # blocks count its tokens
    steps = 0

    def propose(tokens: Sequence[int]) -> TokenTree:
        nonlocal steps
        steps += 1
        return drafting(tokens)

    drafting = drafts_near([*PROMPT, *text])
    assert decode(engine, PROMPT, COUNT, propose=propose) == text
    assert steps < COUNT - 5  # drafts were accepted
    wanted = KvSection(pool_bytes=1 << 30, block_size=4, sequences=8)
    assert blocks_that_fit(case.model().kv_spec, wanted) == 2 * 8 * 128 // 4  # more would never be used
    with pytest.raises(ConfigurationError, match=rf"2 is refused, because model type '{family}' has no tens"):
        load_model(ModelSection(path=str(tmp_path), device="cpu"), tensor_parallel=2)


def test_all_tokens_of_a_step_are_computed_at_once(case: ModelCase) -> None:
    """A trial has compared each layer with its module's own code, which computes one token after another."""
    layers = bind_recurrent(case.model().module)
    assert layers is not None
    assert set(layers.mixers) == set(layers.shapes) != set()


def test_a_layer_that_fits_a_kind_by_names_only_computes_by_its_own_code(
    short: ModelCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ShortConvolutionMixer, "__init__", lambda mixer, module, kernels: module.what_others_have)
    engine = short.engine()
    assert "recurrent layers compute one token after another: AttributeError" in caplog.text
    assert decode(engine, PROMPT, 10) == short.reference(PROMPT, 10)


def test_linear_layers_around_the_state_read_their_weights_once_a_step(case: ModelCase) -> None:
    steps = Steps(case)
    module = next(part for part in steps.model.module.modules() if cache_name(part) is not None)
    widths: dict[str, list[int]] = {}

    def count(name: str, product: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def counted(values: torch.Tensor) -> torch.Tensor:
            widths.setdefault(name, []).append(values.shape[1])
            return product(values)

        return counted

    for name, child in module.named_children():
        if "proj" in name and name not in ("x_proj", "dt_proj"):  # Mamba-1's come after the convolution
            child.forward = count(name, child.forward)
    steps.run(steps.pool.new_table(), PROMPT, TokenTree.chain([1, 2, 3]))
    assert widths
    assert all(found == [len(PROMPT) + 3] for found in widths.values()), widths


def test_hidden_states_are_those_of_the_dense_pass(case: ModelCase) -> None:
    steps = Steps(case)
    steps.run(steps.pool.new_table(), PROMPT)
    found = steps.runner.hidden_of(0).float()
    model = AutoModelForCausalLM.from_pretrained(case.directory, dtype=torch.float32).eval()
    layers: list[torch.Tensor] = []
    hook = lambda _, __, output: layers.append(output[0] if isinstance(output, tuple) else output)  # noqa: E731
    for layer in decoder_layers(model):
        layer.register_forward_hook(hook)
    with torch.inference_mode():
        model(torch.tensor([PROMPT]), use_cache=False)
    width = found.shape[1] // 3
    for tap, wanted in ((1, layers[1]), (2, layers[3])):
        torch.testing.assert_close(
            found[:, tap * width : (tap + 1) * width], wanted[0].bfloat16().float(), rtol=2e-2, atol=2e-2
        )


def test_without_a_prefix_cache_a_preempted_sequence_is_computed_again_from_its_first_token(short: ModelCase) -> None:
    engine = short.engine(prefix_cache=False)
    plain = decode(engine, PROMPT, 20)
    text = [*PROMPT, *plain[:10]]
    verify(engine, first_row("a", text))
    engine.release([SequenceId("a")])
    assert engine.open([open_row("a", text)]).stored_lens == (0,)
    assert verify(engine, first_row("a", text)).tokens == (plain[10],)


def test_a_child_goes_on_from_its_parents_state_only_where_the_parent_is(short: ModelCase) -> None:
    engine = short.engine()
    verify(engine, first_row("parent", PROMPT))
    rows = [open_row("longer", (*PROMPT, 20), "parent"), open_row("shorter", PROMPT[:6], "parent")]
    rows += [open_row("other", (*PROMPT[:6], 1, 1, 1), "parent"), open_row("foreign", (*PROMPT, 20), "parent", "key")]
    assert engine.open(rows).stored_lens == (len(PROMPT), 4, 4, 0)  # a state was kept behind the first block
    found = verify(engine, VerifyRow(SequenceId("longer"), len(PROMPT) + 1, (20,)))
    assert found.tokens == verify(engine, first_row("fresh", (*PROMPT, 20))).tokens
    before = verify(engine, VerifyRow(SequenceId("parent"), len(PROMPT) + 1, (20,)))
    assert before.tokens == found.tokens  # the child has not changed its parent's state


def states_of(case: ModelCase, sequences: int) -> tuple[TargetEngine, KvPool]:
    return case.engine_and_pool(300, sequences=sequences)


def test_states_are_counted_and_all_return(short: ModelCase) -> None:
    engine, pool = states_of(short, 2)
    assert pool.states is not None
    assert pool.states.capacity == 2 * STATES_PER_SEQUENCE == pool.states.free
    verify(engine, first_row("a", PROMPT))
    assert pool.states.free == 2 * STATES_PER_SEQUENCE - 1
    verify(engine, VerifyRow(SequenceId("a"), len(PROMPT) + 1, (3,), TokenTree.chain([4, 5, 6])))
    assert pool.states.free == 2 * STATES_PER_SEQUENCE - 1
    engine.release_all()
    assert pool.states.free == 2 * STATES_PER_SEQUENCE


def test_a_tree_is_cut_to_the_states_that_are_free(short: ModelCase) -> None:
    engine, _ = states_of(short, 1)
    plain = decode(engine, PROMPT, 12)
    verify(engine, first_row("a", PROMPT))
    row = VerifyRow(SequenceId("a"), len(PROMPT) + 1, (plain[0],), TokenTree.chain(plain[1:8]))
    verdict = verify(engine, row)
    assert (verdict.drafted, verdict.tokens) == (1, tuple(plain[1:3]))
    assert verify(engine, row) == verdict  # sent again


def test_a_row_without_a_free_state_is_refused_and_the_others_are_not(short: ModelCase) -> None:
    engine, _ = states_of(short, 1)
    rows = [first_row(name, PROMPT) for name in ("a", "b", "c", "d")]
    verdicts = engine.step(StepBatch(tuple(rows))).verdicts
    assert [verdict.fault is None for verdict in verdicts] == [True, True, True, False]
    assert verdicts[3].fault is not None and verdicts[3].fault.code is RowFaultCode.KV_EXHAUSTED
    assert "target.kv.sequences" in verdicts[3].fault.message


def test_settings_that_such_a_model_cannot_have_are_refused_by_name(short: ModelCase, tmp_path: Path) -> None:
    model = short.model()
    with pytest.raises(ConfigurationError, match=r"target\.kv\.host_bytes"):
        KvPool(model.kv_spec, KvSection(host_bytes=1 << 20), 20)
    with pytest.raises(ConfigurationError, match=r"draft\.model\.path"):
        KvPool(model.kv_spec, KvSection(), 20, truncatable=True)
    with pytest.raises(ConfigurationError, match=r"target\.kv\.sequences: the recurrent states of 4096 sequences take"):
        blocks_that_fit(model.kv_spec, KvSection(pool_bytes=1 << 20, sequences=4096))
    shutil.copytree(short.directory, tmp_path / "draft", ignore=shutil.ignore_patterns("*.safetensors"))
    drafting = load_configuration({"draft": {"method": "model", "model": {"path": str(tmp_path / "draft")}}})
    with pytest.raises(ConfigurationError, match=r"draft\.model\.path: a model with recurrent layers"):
        create(drafting.draft, drafting.target)  # there are no weights to read
    target = {"path": str(short.directory), "device": "cpu", "kv": {"pool_bytes": 8 << 20}}
    chosen = load_configuration({"target": target, "draft": {"method": "early_exit"}})
    with pytest.raises(ConfigurationError, match=r"draft\.method: .* recurrent layers"):
        build_engine(chosen.target, method=create(chosen.draft, chosen.target))
    with pytest.raises(ConfigurationError, match=r"compile: on is refused for model type 'lfm2'"):
        load_model(chosen.target.model_copy(update={"compile": "on"}))


def test_room_for_fewer_states_than_sequences_that_run_is_refused() -> None:
    implied = with_implied_settings(load_configuration({"scheduler": {"max_sequences": 12}}))
    assert implied.target.kv.sequences == 12
    with pytest.raises(ConfigurationError, match=r"target\.kv\.sequences: 3 is refused; it must be at least"):
        with_implied_settings(load_configuration({"target": {"kv": {"sequences": 3}}}))


def test_states_and_blocks_together_take_the_pools_bytes(short: ModelCase) -> None:
    spec, section = short.model().kv_spec, KvSection(pool_bytes=4 << 20, block_size=4, sequences=100)
    size = block_bytes(group_layers(spec, section), spec.dtype)
    taken = blocks_that_fit(spec, section) * size + state_bytes(spec, section)
    assert 0 <= (4 << 20) - taken < size
    size = sum(shape.size for shape in spec.states)
    own = 1 + 100 * STATES_PER_SEQUENCE  # one is all zeros
    assert state_bytes(spec, section) == (own + 100 * PREFIX_STATES_PER_SEQUENCE) * size
    assert state_bytes(spec, section.model_copy(update={"prefix_states": 7})) == (own + 7) * size
    assert state_bytes(spec, section.model_copy(update={"prefix_cache": False})) == own * size
