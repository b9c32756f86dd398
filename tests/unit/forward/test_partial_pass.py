"""A partial pass computes what the model without the other parts computes, and leaves no trace in later passes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from cluster.core.tree import TokenTree
from tests.support.engines.graph_replay import FakeRecorder, gemma3, open_bench
from tests.support.models import tiny
from workers.forward.graph_sizes import GraphSize
from workers.forward.layer_lists import decoder_list
from workers.forward.loaded_model import PassOptions
from workers.forward.partial_pass import PartialPass
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model

NATIVE = ("llama", "qwen2", "qwen3", "mistral")
TEXT = tuple((7 * index) % 90 + 3 for index in range(30))
OTHER = TEXT[5:14]
BRANCHING = TokenTree((7, 8, 9, 7, 11, 12), (-1, -1, 0, 2, 1, 3))
LAYERS = 3
WAYS = [(family, "off") for family in (*tiny.FAMILIES, "gemma3", "gpt_oss")] + [(family, "auto") for family in NATIVE]
NORM = 1.0 + torch.arange(48.0) / 48
PARTS = {
    "first layer": PartialPass(layers=1),
    "first layers with their own norm": PartialPass(layers=2, exit_norm=NORM),
    "without an attention": PartialPass(skip_attention=frozenset({1})),
    "without some parts": PartialPass(skip_attention=frozenset({0}), skip_mlp=frozenset({0, 2})),
    "first layers without a part": PartialPass(layers=2, skip_mlp=frozenset({1})),
}


def configuration(family: str) -> PreTrainedConfig:
    if family == "gemma3":
        return gemma3()
    if family == "gpt_oss":
        return tiny.gpt_oss(num_hidden_layers=LAYERS)
    return tiny.FAMILIES[family](**{"n_layer" if family == "gpt2" else "num_hidden_layers": LAYERS})


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of compiled code, for all tests of this file."""
    return tmp_path_factory.mktemp("code")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), configuration("llama"))


class Bench:
    """A runner over a pool that no test can fill."""

    def __init__(self, directory: Path, code: Path, native: str, **settings: str) -> None:
        if native == "auto" and shutil.which("cc") is None:
            pytest.skip("needs a C compiler")
        values = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(code)}
        self.model = load_model(ModelSection.model_validate(values | {"native": native} | settings))
        assert (self.model.native is not None) == (native == "auto")
        self.pool = KvPool(self.model.kv_spec, KvSection(block_size=4), blocks=1000)
        self.runner = ModelRunner(self.model, self.pool)

    def row(self, *arguments: Any, **options: Any) -> ForwardRow:
        row = ForwardRow(*arguments, **options)
        self.pool.reserve(row.table, row.end)
        return row

    def store(self, text: tuple[int, ...]) -> ForwardRow:
        """A sequence that stores `text`."""
        row = self.row(self.pool.new_table(), text)
        self.runner.forward([row])
        self.runner.commit(row)
        return row


def part_of(directory: Path, partial: PartialPass) -> PreTrainedModel:
    """The model of plain `transformers` without the other parts: hooks replace their outputs by zeros."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    parent, name = decoder_list(model)
    layers = list(getattr(parent, name))

    def no_output(_: nn.Module, __: object, output: Any) -> Any:
        return (torch.zeros_like(output[0]), None) if isinstance(output, tuple) else torch.zeros_like(output)

    for layer in partial.skip_attention:
        getattr(layers[layer], "attn" if hasattr(layers[layer], "attn") else "self_attn").register_forward_hook(
            no_output
        )
    for layer in partial.skip_mlp:
        getattr(layers[layer], "mlp" if hasattr(layers[layer], "mlp") else "fc2").register_forward_hook(no_output)
    if partial.layers is not None:
        setattr(parent, name, nn.ModuleList(layers[: partial.layers]))
    if partial.exit_norm is not None:
        norm = next(getattr(parent, name) for name in ("norm", "final_layer_norm", "ln_f") if hasattr(parent, name))
        norm.weight = nn.Parameter(partial.exit_norm)
    return model


def logits_of(model: PreTrainedModel, text: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([text])).logits[0]


def check_part(bench: Bench, reference: PreTrainedModel, partial: PartialPass) -> None:
    """Two rows from their first token on, one with a branching tree."""
    rows = [
        bench.row(bench.pool.new_table(), TEXT, BRANCHING, tuple(range(len(TEXT) + len(BRANCHING)))),
        bench.row(bench.pool.new_table(), OTHER, select=tuple(range(len(OTHER)))),
    ]
    found = bench.runner.forward(rows, PassOptions(partial))
    first, second = torch.split(found, [len(row.select) for row in rows])
    torch.testing.assert_close(first[: len(TEXT)], logits_of(reference, TEXT), rtol=1e-4, atol=1e-4)
    for node, path in ((5, (0, 2, 3)), (4, (1,))):
        text = TEXT + tuple(BRANCHING.tokens[step] for step in (*path, node))
        torch.testing.assert_close(first[len(TEXT) + node], logits_of(reference, text)[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, logits_of(reference, OTHER), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "native"), WAYS)
def test_a_partial_pass_computes_the_model_without_the_other_parts(
    family: str, native: str, code: Path, tmp_path: Path
) -> None:
    directory = tiny.save(tmp_path, configuration(family), sharpness=2.0)
    bench = Bench(directory, code, native)
    for partial in PARTS.values():
        check_part(bench, part_of(directory, partial), partial)
    check_part(bench, part_of(directory, PartialPass()), PartialPass())  # the whole model, after its parts


@pytest.mark.slow
def test_a_partial_pass_of_compiled_layers_computes_the_same(llama: Path, code: Path) -> None:
    bench = Bench(llama, code, "off", compile="on")
    for partial in (PARTS["first layer"], PARTS["without some parts"], PartialPass()):
        check_part(bench, part_of(llama, partial), partial)


def test_recorded_partial_passes_compute_the_same(llama: Path) -> None:
    tape = FakeRecorder()
    bench = open_bench(llama, tape, sizes=())
    assert bench.graphs is not None
    for name in ("first layers with their own norm", "without some parts"):
        assert bench.graphs.capture(GraphSize(1, 64, 64, 32, 64), PARTS[name])
        reference = part_of(llama, PARTS[name])
        for text in (TEXT, OTHER):
            row = ForwardRow(bench.pool.new_table(), text, select=(len(text) - 1,))
            bench.pool.reserve(row.table, row.end)
            found = bench.runner.forward([row], PassOptions(PARTS[name]))[0]
            torch.testing.assert_close(found, logits_of(reference, text)[-1], rtol=1e-4, atol=1e-4)
    assert tape.replayed == 4


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("name", ["first layer", "without some parts"])
def test_a_draft_grows_token_by_token_without_being_committed(name: str, native: str, llama: Path, code: Path) -> None:
    """The draft is a continuation by the part; the whole model then computes as if there had been no draft."""
    partial, bench = PARTS[name], Bench(llama, code, native)
    tables = [bench.store(text[:-2]).table for text in (TEXT, OTHER)]
    free = bench.pool.blocks_free
    fresh: list[tuple[int, ...]] = [TEXT[-2:], OTHER[-2:]]
    drafts: list[list[int]] = [[], []]
    found = []
    for _ in range(6):
        before = [0 if not draft else 1 + len(draft) for draft in drafts]
        rows = [
            bench.row(table, tokens, select=(len(tokens) - 1,), uncommitted=count)
            for table, tokens, count in zip(tables, fresh, before, strict=True)
        ]
        found.append(bench.runner.forward(rows, PassOptions(partial)).clone())
        for draft, token in zip(drafts, found[-1].argmax(dim=1).tolist(), strict=True):
            draft.append(token)
        fresh = [(draft[-1],) for draft in drafts]
    whole_text = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    for index, text in enumerate((TEXT, OTHER)):
        expected = continuation(whole_text, partial, llama, text, drafts[index])
        for step, logits in enumerate(found):
            torch.testing.assert_close(logits[index], expected[step], rtol=1e-3, atol=1e-3)
    for table in tables:
        bench.pool.truncate(table, table.stored_len)
    assert bench.pool.blocks_free == free
    verify(bench, tables[0], TEXT, drafts[0])


def continuation(
    whole: PreTrainedModel, partial: PartialPass, directory: Path, text: tuple[int, ...], draft: list[int]
) -> torch.Tensor:
    """The part's logits for each drafted token, where the stored tokens' keys and values come from the whole model."""
    part = part_of(directory, partial)
    with torch.inference_mode():
        cache = whole(torch.tensor([text[:-2]]), use_cache=True).past_key_values
        return part(torch.tensor([text[-2:] + tuple(draft[:-1])]), past_key_values=cache).logits[0, 1:]


def verify(bench: Bench, table: Any, text: tuple[int, ...], draft: list[int]) -> None:
    """The whole model verifies the draft with the bits that a sequence without a draft has."""
    tree = TokenTree.chain(draft)
    select = tuple(range(1, 2 + len(draft)))
    drafted = bench.runner.forward([bench.row(table, text[-2:], tree, select)]).clone()
    plain = bench.row(bench.store(text[:-2]).table, text[-2:], tree, select)
    assert torch.equal(drafted, bench.runner.forward([plain]))


@pytest.mark.parametrize("native", ["auto", "off"])
def test_given_inputs_replace_the_embeddings(native: str, llama: Path, code: Path) -> None:
    bench = Bench(llama, code, native)
    reference = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    torch.manual_seed(3)
    inputs = torch.randn(len(TEXT), 48)
    table = bench.pool.new_table()
    first = bench.row(table, TEXT[:20])
    bench.runner.forward([first], PassOptions(inputs=inputs[:20]))
    bench.runner.commit(first)
    found = bench.runner.forward(
        [bench.row(table, TEXT[20:], select=tuple(range(10)))], PassOptions(inputs=inputs[20:])
    )
    with torch.inference_mode():
        expected = reference(inputs_embeds=inputs[None]).logits[0, 20:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"\(9, 48\) is refused; it must be \(10, 48\)"):
        bench.runner.forward([bench.row(table, TEXT[20:])], PassOptions(inputs=inputs[:9]))


def test_parts_that_the_model_does_not_have_are_refused(llama: Path, code: Path) -> None:
    bench = Bench(llama, code, "off")
    row = bench.row(bench.pool.new_table(), TEXT)
    for partial, message in (
        (PartialPass(layers=0), "layers: 0 is refused; it must be between 1 and 3"),
        (PartialPass(layers=4), "layers: 4 is refused; it must be between 1 and 3"),
        (PartialPass(skip_attention=frozenset({3})), "skip_attention: 3 is refused; it must be between 0 and 2"),
        (PartialPass(skip_mlp=frozenset({-1})), "skip_mlp: -1 is refused; it must be between 0 and 2"),
        (PartialPass(exit_norm=torch.ones(3)), r"exit_norm: the shape \(3,\) is refused; it must be \(48,\)"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            bench.runner.forward([row], PassOptions(partial))


def test_uncommitted_positions_cannot_be_committed_over(llama: Path, code: Path) -> None:
    bench = Bench(llama, code, "off")
    row = bench.row(bench.store(TEXT).table, (5,), uncommitted=1)
    with pytest.raises(ValueError, match="1 uncommitted"):
        bench.runner.commit(row)
