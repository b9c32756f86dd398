"""Fast linear layers compute the same as plain ones at every width, and leave no memory behind."""

from __future__ import annotations

import gc
import shutil
import weakref
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.support.engines.linear_checks import DTYPES, IN, OUT, WIDTHS, check, numbers
from tests.support.models import tiny
from workers.forward import linear
from workers.forward.layer_lists import decoder_layers
from workers.forward.linear import FastLinear, PackedKernel, make_linear_kernel, merge_linears
from workers.forward.replace_linear import replace_linear_layers
from workers.forward.weights.base import LinearKernel
from workers.forward.weights.choice import store
from workers.forward.weights.plain import Cancelling, DenseKernel, OneDnnKernel, exact_widths, padded_rows


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of compiled kernels, for all tests of this file."""
    return str(tmp_path_factory.mktemp("code"))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_plain_numbers_that_the_cpu_kernels_read_are_theirs(dtype: torch.dtype, biased: bool, code: str) -> None:
    weight, bias = numbers(OUT, IN, dtype=dtype), numbers(OUT, dtype=dtype, seed=1) if biased else None
    product = make_linear_kernel(store(weight), bias, code)
    assert isinstance(product, PackedKernel) == (dtype is not torch.float16 and shutil.which("cc") is not None)
    for width in WIDTHS:
        x = numbers(width, IN, dtype=dtype, seed=width)
        check(product.multiply(x), x, weight, bias, roundings=2)
        check(product.multiply(x.t().clone().t()), x, weight, bias, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestOneDnnKernel:
    @pytest.mark.parametrize("biased", [False, True])
    def test_products_equal_those_of_plain_weights_at_every_width(self, dtype: torch.dtype, biased: bool) -> None:
        weight, bias = numbers(OUT, IN, dtype=dtype), numbers(OUT, dtype=dtype, seed=1) if biased else None
        product = store(weight).kernel(bias)
        can_pack = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert isinstance(
            product, OneDnnKernel if can_pack else DenseKernel
        )  # oneDNN packs what the processor multiplies
        for width in WIDTHS:
            x = numbers(width, IN, dtype=dtype, seed=width)
            check(product.multiply(x), x, weight, bias, roundings=2)

    def test_leading_axes_are_preserved(self, dtype: torch.dtype) -> None:
        weight, bias = numbers(OUT, IN, dtype=dtype), numbers(OUT, dtype=dtype, seed=1)
        product = make_linear_kernel(store(weight), bias)
        for shape in ((1, 1), (1, 7), (1, 9), (1, 33), (3, 5), (2, 3, 4)):
            x = numbers(*shape, IN, dtype=dtype)
            check(product.multiply(x), x, weight, bias, roundings=2)

    def test_inputs_need_not_be_contiguous(self, dtype: torch.dtype) -> None:
        weight = numbers(OUT, IN, dtype=dtype)
        product = make_linear_kernel(store(weight.t().contiguous().t()), None)
        for width in (5, 11):
            x = numbers(IN, width, dtype=dtype).t()
            check(product.multiply(x), x, weight, None, roundings=2)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(OUT, IN), (300, 72), (33, 50)])
def test_no_neighbour_changes_a_bit_of_a_row(
    dtype: torch.dtype, quantization: str, outputs: int, inputs: int, code: str
) -> None:
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    for kernel in (
        make_linear_kernel(store(weight, quantization), bias, code),
        store(weight, quantization).kernel(bias),
        make_linear_kernel(store(weight.t().clone().t()), None),
    ):
        rows = numbers(WIDTHS[-1], inputs, dtype=dtype, seed=2)
        expected = torch.cat([kernel.multiply(row[None]) for row in rows])
        for width in WIDTHS:
            for first in {0, (WIDTHS[-1] - width) // 2, WIDTHS[-1] - width}:
                found = kernel.multiply(rows[first : first + width])
                assert torch.equal(found, expected[first : first + width]), (width, first)


class TestExactWidths:
    @staticmethod
    def product(x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] * torch.linspace(-1, 1, IN * OUT).view(IN, OUT)).sum(1)

    @staticmethod
    def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(rows, IN, generator=generator)

    def test_numbers_of_rows_with_other_code_are_left_out(self) -> None:
        def product(x: torch.Tensor) -> torch.Tensor:  # as a library that adds backwards for one row, and for 41 to 60
            return (
                self.product(x) if len(x) != 1 and not 40 < len(x) <= 60 else self.product(x).nextafter(x.new_ones(()))
            )

        widths = exact_widths(product, self.draw, torch.float32)
        assert widths[-1] == 64
        assert {2, 3, 8, 16, 40} <= {*widths}
        assert not {1, 48, 56} & {*widths}

    def test_rows_go_alone_where_their_place_in_a_tile_matters(self) -> None:
        def product(x: torch.Tensor) -> torch.Tensor:
            return self.product(x) + (torch.arange(len(x)) == len(x) - 1)[:, None]

        assert exact_widths(product, self.draw, torch.float32) == (1,)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("outputs", "inputs"), [(OUT, IN), (3, 9)])
    def test_rounding_hides_no_other_order_where_sums_cancel(
        self, dtype: torch.dtype, outputs: int, inputs: int
    ) -> None:
        cancelling = Cancelling(inputs)
        weight = cancelling.weight(outputs).to(dtype).float()

        def product(x: torch.Tensor) -> torch.Tensor:  # adds backwards for five rows, and the last output for seven
            terms = x.float()[:, None] * weight
            ordered, backwards = (reduce(torch.add, each.unbind(2)).to(dtype) for each in (terms, terms.flip(2)))
            ordered[:, -1:] = backwards[:, -1:] if len(x) == 7 else ordered[:, -1:]
            return backwards if len(x) == 5 else ordered

        widths = {*exact_widths(product, cancelling.rows, dtype, 1 << 10)}
        assert {1, 2, 3, 4, 6, 8, 64} <= widths
        assert not {5, 7} & widths


def test_widths_are_padded_to_a_few_sizes_that_are_not_much_wider() -> None:
    padded = [padded_rows(width) for width in range(1, 1025)]
    assert padded[:8] == list(range(1, 9))
    assert all(width <= wide < max(width + 4, 1.25 * width + 1) for width, wide in enumerate(padded, start=1))
    assert padded == sorted(padded)
    assert len(set(padded)) < 45


def together(widths: tuple[int, ...] = (16, 8, 8)) -> tuple[tuple[nn.Module, ...], list[torch.Tensor], list[int]]:
    """Sibling layers, their weights, and the widths of their shared products."""
    weights = [numbers(width, IN, seed=index) for index, width in enumerate(widths)]
    computed: list[int] = []

    class Counting:
        def __init__(self, product: LinearKernel) -> None:
            self.product = product

        def multiply(self, x: torch.Tensor) -> torch.Tensor:
            computed.append(x.shape[-2])
            return self.product.multiply(x)

    return merge_linears(Counting(make_linear_kernel(store(torch.cat(weights)), None)), widths), weights, computed


class TestMergedLinear:
    def test_siblings_share_one_product_per_pass(self) -> None:
        siblings, weights, computed = together()
        for width in (1, 5, 12):
            x = numbers(1, width, IN)
            for sibling, weight in zip(siblings, weights, strict=True):
                found = sibling(x)
                assert found.is_contiguous()
                check(found, x, weight, None, roundings=1)
        assert computed == [1, 5, 12]

    def test_siblings_on_different_inputs_are_correct(self) -> None:
        siblings, weights, _ = together()
        for seed in range(2):
            x, y = numbers(1, 5, IN, seed=seed), numbers(1, 9, IN, seed=seed + 7)
            for sibling, weight, given in zip(siblings, weights, (x, y, y), strict=True):
                check(sibling(given), given, weight, None, roundings=1)

    def test_siblings_may_run_in_any_order_and_more_than_once(self) -> None:
        siblings, weights, _ = together()
        x = numbers(1, 5, IN)
        for index in (2, 0, 0, 1, 1, 2, 2):
            check(siblings[index](x), x, weights[index], None, roundings=1)

    @pytest.mark.parametrize("done", [1, 2])
    def test_a_pass_that_fails_between_siblings_does_not_affect_the_next_one(self, done: int) -> None:
        siblings, weights, _ = together()
        x = numbers(1, 5, IN)
        for sibling in siblings[:done]:
            sibling(x)
        x.copy_(numbers(1, 5, IN, seed=5))  # the next pass may use the same memory
        for sibling, weight in zip(siblings, weights, strict=True):
            check(sibling(x), x, weight, None, roundings=1)

    def test_outputs_of_siblings_do_not_share_memory(self) -> None:
        siblings, _, _ = together()
        x = numbers(1, 1, IN)
        first, *others = (sibling(x) for sibling in siblings)
        before = [other.clone() for other in others]
        first.zero_()
        assert all(torch.equal(other, kept) for other, kept in zip(others, before, strict=True))


def loaded(directory: Path, family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    tiny.save(directory, tiny.FAMILIES[family](), sharpness=1.0)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().requires_grad_(False)


def linears(model: nn.Module) -> list[nn.Module]:
    """The linear layers that were not replaced."""
    return [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_a_model_with_replaced_layers_computes_the_same(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = loaded(tmp_path, family, dtype)
    exact = loaded(tmp_path, family)
    tokens = torch.arange(3, 25)[None]
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits.float()
        rounding = (expected - exact(tokens, use_cache=False).logits).abs().max()
        replace_linear_layers(model)
        found = model(tokens, use_cache=False).logits.float()
    assert not linears(model)
    assert (found - expected).abs().max() <= max(2 * float(rounding), 1e-5)


def test_a_transposed_layer_is_replaced_correctly() -> None:
    parent = nn.ModuleDict({"projection": Conv1D(OUT, IN)})
    nn.init.normal_(parent["projection"].bias)
    weight, bias, x = parent["projection"].weight.detach().t(), parent["projection"].bias.detach(), numbers(1, 7, IN)
    expected = parent["projection"](x)
    replace_in(parent)
    assert isinstance(parent["projection"], FastLinear)
    torch.testing.assert_close(parent["projection"](x), expected)
    check(parent["projection"](x), x, weight, bias, roundings=2)


def replace_in(module: nn.Module) -> None:
    """Call `replace_linear_layers` for a module that is not a whole model."""
    module.tp_plan = None
    replace_linear_layers(module)  # type: ignore[arg-type]


class Attention(nn.Module):
    """An attention block with projections of one input, some of them with a bias."""

    def __init__(self, biases: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(IN, width, bias) for width, bias in zip((16, 8, 8), biases, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True), (True, False, True)])
def test_siblings_are_merged_if_all_have_a_bias_or_none_has(biases: tuple[bool, bool, bool]) -> None:
    parent = Attention(biases)
    x = numbers(1, 6, IN)
    expected = parent(x)
    replace_in(parent)
    joined = isinstance(parent.q_proj, linear.MergedLinear)
    assert joined == (len(set(biases)) == 1)
    torch.testing.assert_close(parent(x), expected)


def test_old_weights_of_layers_that_refer_to_themselves_are_freed_before_garbage_is_collected(
    tmp_path: Path, code: str
) -> None:
    """Sharded layers of `transformers` do. A GPU would hold their weights twice when the KV pool takes what is left."""
    model = loaded(tmp_path, "llama")
    shared = model.get_input_embeddings().weight.data_ptr()
    weights = [weakref.ref(module.weight) for module in linears(model) if module.weight.data_ptr() != shared]
    for module in linears(model):
        module.forward = module.forward  # type: ignore[method-assign]
    gc.disable()
    try:
        replace_linear_layers(model, directory=code)
        assert [reference() for reference in weights] == [None] * len(weights)
    finally:
        gc.enable()


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_old_weights_are_freed_at_once_and_new_ones_with_the_model(
    family: str, quantization: str, tmp_path: Path, code: str
) -> None:
    gc.collect()
    before = len(linear._entries)
    model = loaded(tmp_path, family)
    layers = [weakref.ref(module) for module in linears(model)]
    shared = model.get_input_embeddings().weight.data_ptr()
    weights = [
        weakref.ref(module.weight) for module in linears(model) if module.weight.data_ptr() != shared
    ]  # a tied head shares its weights with the embedding
    replace_linear_layers(model, quantization, code)
    gc.collect()
    assert [reference() for reference in layers] == [None] * len(layers)
    assert [reference() for reference in weights] == [None] * len(weights)
    entries = len(linear._entries) - before
    assert entries > 2 * len(list(decoder_layers(model)))
    del model
    gc.collect()
    assert len(linear._entries) == before


def test_int8_weights_take_one_byte_each(tmp_path: Path, code: str) -> None:
    gc.collect()
    known = set(linear._entries)
    model = loaded(tmp_path, "llama", torch.bfloat16)
    whole = sum(module.weight.numel() for module in linears(model))
    replace_linear_layers(model, "int8", code)
    products = [linear._entries[handle].kernel for handle in linear._entries.keys() - known]
    held = sum(
        tensor.nbytes
        for product in products
        if isinstance(product, PackedKernel)
        for tensor in (product.packed.matrix.weight, *product.packed.matrix.vectors)
    )
    assert whole <= held < 1.2 * whole  # the last block of some matrices is not full


def test_layers_that_cannot_be_packed_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, x = numbers(OUT, IN), numbers(3, IN)
    product = make_linear_kernel(store(weight), None)
    assert isinstance(product, DenseKernel)
    assert product.weight is weight
    check(product.multiply(x), x, weight, None, roundings=1)


def test_an_operator_has_a_shape_function_for_the_compiler() -> None:
    siblings, _, _ = together()
    layer = FastLinear(make_linear_kernel(store(numbers(OUT, IN)), None), OUT)
    x = torch.empty(2, 3, IN, device="meta")
    assert torch.ops.pilotfish.linear(x, layer.handle, OUT).shape == (2, 3, OUT)
    assert [part.shape[-1] for part in torch.ops.pilotfish.joined(x, siblings[0].handle, [16, 8, 8])] == [16, 8, 8]
