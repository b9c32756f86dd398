"""The CPU kernels for a whole model compute its logits, with the same bits in every batch."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Ministral3Config, PreTrainedConfig

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.engines.kept_kernels import NARROW, WIDE, portable
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel
from workers.forward.native import build
from workers.forward.native.decoder import NativeDecoder
from workers.forward.native.decoder_shape import supported_shape
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model import loading
from workers.model.loading import load_model

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

KNOWN = ("llama", "qwen2", "qwen3", "mistral")
KINDS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"))
TEXT = tuple((7 * index) % 90 + 3 for index in range(40))
BRANCHING = TokenTree((7, 8, 9, 7, 11, 12), (-1, -1, 0, 2, 1, 3))

Load = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tiny model of a family; the kernels are built once."""
    code = tmp_path_factory.mktemp("code")

    def loaded(family: str, dtype: str = "float32", quantization: str = "none", **settings: str) -> LoadedModel:
        directory = tiny.save(tmp_path_factory.mktemp(family), tiny.FAMILIES[family]())
        values = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(code)}
        return load_model(
            ModelSection.model_validate(values | {"dtype": dtype, "quantization": quantization} | settings)
        )

    return loaded


class Bench:
    """A runner over a pool, and sequences in it."""

    def __init__(self, model: LoadedModel) -> None:
        self.pool = KvPool(model.kv_spec, KvSection(block_size=4, pool_bytes=2 << 20))
        self.runner = ModelRunner(model, self.pool)

    def row(self, text: tuple[int, ...], fresh: int, tree: TokenTree = EMPTY_TREE) -> ForwardRow:
        """A new sequence that stores `text` without its last `fresh` tokens, which are to be computed."""
        table = self.pool.new_table()
        stored = text[: len(text) - fresh]
        if stored:
            self.pool.reserve(table, len(stored))
            row = ForwardRow(table, stored)
            self.runner.forward([row])
            self.runner.commit(row)
        row = ForwardRow(table, text[len(text) - fresh :], tree, tuple(range(fresh + len(tree))))
        self.pool.reserve(table, row.end)
        return row

    def logits(self, *rows: ForwardRow) -> list[torch.Tensor]:
        """The logits of each row, `[tokens of the row, vocabulary]`."""
        whole = self.runner.forward(rows)
        return list(torch.split(whole.clone(), [len(row.select) for row in rows]))


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", KNOWN)
def test_the_kernels_compute_the_logits_of_transformers(family: str, load: Load, tmp_path: Path) -> None:
    model = load(family)
    assert isinstance(model.native, NativeDecoder)
    bench = Bench(model)
    (found,) = bench.logits(bench.row(TEXT, len(TEXT)))
    directory = tiny.save(tmp_path, tiny.FAMILIES[family]())
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [(), NARROW, WIDE], ids=str)
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_every_width_computes_the_same(
    width: tuple[str, ...], dtype: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portable C covers widths that this processor lacks. The outputs fill no block of any width."""
    if width:
        monkeypatch.setattr(build, "_FLAGS", portable(*width))
    directory = tiny.save(tmp_path / "model", tiny.llama(vocab_size=99, intermediate_size=84, head_dim=10))
    values = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(tmp_path / "code")}
    model = load_model(ModelSection.model_validate(values | {"dtype": dtype, "quantization": quantization}))
    assert isinstance(model.native, NativeDecoder)  # the trial has compared it with the modules
    bench = Bench(model)

    (alone,) = bench.logits(bench.row(TEXT, 1, BRANCHING))
    *_, last = bench.logits(*(bench.row(TEXT[:2], 1) for _ in range(5)), bench.row(TEXT, 1, BRANCHING))

    assert torch.equal(last, alone)
    if dtype == "float32":
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.inference_mode():
            torch.testing.assert_close(alone[0], reference(torch.tensor([TEXT])).logits[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_no_bit_depends_on_other_rows_in_the_step(
    family: str, dtype: str, quantization: str, load: Load, threads: None
) -> None:
    bench = Bench(load(family, dtype, quantization))
    (alone,) = bench.logits(bench.row(TEXT, 1))
    for others in (1, 3, 7, 8, 20):
        crowd = [bench.row(TEXT[: 3 + other], 1 + other % 3) for other in range(others)]
        first, *_ = bench.logits(bench.row(TEXT, 1), *crowd)
        *_, last = bench.logits(*crowd, bench.row(TEXT, 1))
        assert torch.equal(first, alone)
        assert torch.equal(last, alone)
        bench = Bench(load(family, dtype, quantization)) if bench.pool.blocks_free < 100 else bench
    for others in range(1, 16):  # all remainders when the kernels compute several rows at a time
        bench = Bench(load(family, dtype, quantization)) if bench.pool.blocks_free < 100 else bench
        *_, last = bench.logits(*(bench.row(TEXT[:2], 1) for _ in range(others)), bench.row(TEXT, 1))
        assert torch.equal(last, alone)
    torch.set_num_threads(1)
    (single,) = bench.logits(bench.row(TEXT, 1))
    assert torch.equal(single, alone)


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("tree", [TokenTree((7, 8, 9), (-1, 0, 1)), BRANCHING])
def test_no_bit_depends_on_whether_a_token_was_drafted(
    family: str, dtype: str, quantization: str, tree: TokenTree, load: Load
) -> None:
    bench = Bench(load(family, dtype, quantization))
    row = bench.row(TEXT, 2, tree)
    (verified,) = bench.logits(row)
    for node in range(len(tree)):
        path = []
        while node >= 0:
            path.append(node)
            node = tree.parents[node]
        path.reverse()
        text = TEXT + tuple(tree.tokens[step] for step in path)
        # One token after another, as in plain decoding.
        plain = bench.row(text[:-1], 1)
        bench.logits(plain)
        bench.runner.commit(plain)
        last = ForwardRow(plain.table, text[-1:], select=(0,))
        bench.pool.reserve(plain.table, last.end)
        (decoded,) = bench.logits(last)
        assert torch.equal(verified[2 + path[-1]], decoded[0])
        bench.pool.release(plain.table)
    # After an accepted branch is committed, decoding continues with the same bits.
    deepest = max(range(len(tree)), key=lambda node: tree.depths()[node])
    path = []
    while deepest >= 0:
        path.append(deepest)
        deepest = tree.parents[deepest]
    path.reverse()
    bench.runner.commit(row, path)
    after = ForwardRow(row.table, (5,), select=(0,))
    bench.pool.reserve(row.table, after.end)
    (kept,) = bench.logits(after)
    (fresh,) = bench.logits(bench.row((*TEXT, *(tree.tokens[node] for node in path), 5), 1))
    assert torch.equal(kept, fresh)


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_a_prompt_is_the_same_whole_and_in_two_chunks_of_any_width(dtype: str, quantization: str, load: Load) -> None:
    text = TEXT + TEXT[::-1]
    model = load("llama", dtype, quantization)
    first = Bench(model)
    (whole,) = first.logits(first.row(text, len(text)))
    for fresh in (*range(1, 40), 47, 48, 49, 79):
        bench = Bench(model)
        (found,) = bench.logits(bench.row(text, fresh))
        assert torch.equal(found, whole[-fresh:])


@pytest.mark.parametrize("native", ["auto", "off"])
def test_forks_continue_independently(native: str, load: Load) -> None:
    bench = Bench(load("llama", native=native))
    trunk = bench.row(TEXT, 3).table  # its last block is half filled
    expected = [bench.logits(bench.row((*trunk.tokens, token, 9), 1))[0] for token in (5, 6, 7)]
    branches = [bench.pool.fork(trunk, trunk.stored_len), bench.pool.fork(trunk, trunk.stored_len), trunk]
    for branch, token in zip(branches, (5, 6, 7), strict=True):
        row = ForwardRow(branch, (token,))
        bench.pool.reserve(branch, row.end)
        bench.runner.forward([row])
        bench.runner.commit(row)
    rows = [ForwardRow(branch, (9,), select=(0,)) for branch in branches]
    for row in rows:
        bench.pool.reserve(row.table, row.end)
    for found, alone in zip(bench.logits(*rows), expected, strict=True):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "granite", "opt"])
def test_other_families_are_left_to_torch(family: str, load: Load) -> None:
    assert load(family).native is None


DYNAMIC = tiny.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
PER_LAYER = Gemma3TextConfig(
    vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=8
)


@pytest.mark.parametrize("config", [DYNAMIC, PER_LAYER], ids=["depends on the text", "one for each kind of layer"])
def test_rotations_that_depend_on_more_than_the_position_are_left_to_torch(config: PreTrainedConfig) -> None:
    assert supported_shape(AutoModelForCausalLM.from_config(config), torch.float32) is None


@pytest.mark.parametrize("part", ["self_attn", "mlp", "input_layernorm", "mlp.act_fn"])
def test_layers_with_a_parameter_that_the_kernels_do_not_read_are_left_to_torch(part: str) -> None:
    """One is enough: attention with learned sinks has one of its own."""
    model = AutoModelForCausalLM.from_config(tiny.llama())
    assert supported_shape(model, torch.float32) is not None
    for layer in model.model.layers:
        layer.get_submodule(part).register_parameter("sinks", torch.nn.Parameter(torch.zeros(6)))
    assert supported_shape(model, torch.float32) is None


def test_queries_that_are_scaled_from_some_position_on_are_left_to_torch(tmp_path: Path) -> None:
    """The trial of the kernels ends before that position."""
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 256}
    rotation = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    config = Ministral3Config(**sizes, rope_parameters=rotation | {"llama_4_scaling_beta": 1.0})
    directory = tiny.save(tmp_path / "model", config)
    bench = Bench(load_model(ModelSection(path=str(directory), device="cpu", compile="off")))
    (found,) = bench.logits(bench.row(TEXT, len(TEXT)))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_positions_beyond_the_cached_rotations_are_rotated_correctly(load: Load, tmp_path: Path) -> None:
    text = TEXT * 30  # 1,200 tokens
    bench = Bench(load("llama"))
    before = bench.logits(bench.row(TEXT, 4))[0]
    (found,) = bench.logits(bench.row(text, 200))
    reference = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path, tiny.llama()), dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0, -200:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(bench.logits(bench.row(TEXT, 4))[0], before)


def test_a_token_outside_the_vocabulary_is_refused(load: Load) -> None:
    bench = Bench(load("llama"))
    with pytest.raises(IndexError, match="96"):
        bench.row((3, tiny.VOCABULARY, 4), 1)


def test_the_kernels_can_be_turned_off(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_compile_or_warn", lambda *_: None)  # the compiler itself takes seconds
    assert load("llama", native="off").native is None
    assert load("llama", compile="on").native is None


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_a_tied_embedding_is_read_from_the_packed_head(dtype: str, quantization: str, load: Load) -> None:
    """Rows of the packed head are those of the table, to the bit; int8 weights are rounded, so the table is kept."""
    model = load("qwen2", dtype=dtype, quantization=quantization)
    assert isinstance(model.native, NativeDecoder)
    table = model.native._embedding
    assert (table is None) is (quantization == "none")
    assert load("llama").native._embedding is not None  # it is not tied
    if table is not None:
        return
    whole = load("qwen2", dtype=dtype, native="off").module.get_input_embeddings().weight
    for ids in ([0], [3, tiny.VOCABULARY - 1, 3], list(range(tiny.VOCABULARY))):
        rows = torch.empty((len(ids), whole.shape[1]))
        for token, row in zip(ids, rows, strict=True):
            model.native._library.pilotfish_row(
                ctypes.byref(model.native._decoder.head), ctypes.c_int64(token), ctypes.c_void_p(row.data_ptr())
            )
        assert torch.equal(rows, whole[ids].float())
