"""Taps are the hidden states that `transformers` computes, in every family and on every way of computing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.engines.graph_replay import FakeRecorder, gemma3, open_bench
from tests.support.models import tiny
from workers.forward.layer_lists import decoder_list
from workers.forward.loaded_model import PassOptions
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model

FAMILIES = tiny.FAMILIES | {"gemma3": gemma3}
NATIVE = ("llama", "qwen2", "qwen3", "mistral")
NORMS = ("norm", "final_layer_norm", "ln_f")
PROMPT = tuple((7 * index) % 90 + 3 for index in range(30))
OTHER = tuple((11 * index) % 90 + 3 for index in range(17))
BRANCHING = TokenTree((7, 8, 9, 7, 11, 12), (-1, -1, 0, 2, 1, 3))
HIDDEN = 48

Reference = Callable[[tuple[int, ...]], torch.Tensor]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of compiled code, for all tests of this file."""
    return tmp_path_factory.mktemp("code")


def open_runner(directory: Path, code: Path, taps: tuple[int, ...], **settings: str) -> tuple[ModelRunner, KvPool]:
    values = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(code)} | settings
    model = load_model(ModelSection.model_validate(values))
    assert (model.native is not None) == (settings["native"] == "auto")
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=200)
    return ModelRunner(model, pool, taps), pool


def plain_taps(directory: Path) -> tuple[Reference, int]:
    """The residual stream of plain `transformers` before, between and after all layers, and the number of layers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    parent, name = decoder_list(model)
    norm = next(getattr(parent, name) for name in NORMS if hasattr(parent, name))
    entered: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))

    def taps(text: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            # The last of `hidden_states` has passed the final norm.
            torch.testing.assert_close(norm(entered[-1]), states[-1])
        return torch.cat([*states[:-1], entered[-1]], dim=-1)[0]

    return taps, len(getattr(parent, name))


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding to bfloat16."""
    assert found.dtype is torch.bfloat16
    assert found.is_contiguous()
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2e-3)


def path_to(tree: TokenTree, node: int) -> list[int]:
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, tree.parents[path[0]])
    return path


def check_prompts_and_trees(runner: ModelRunner, pool: KvPool, reference: Reference) -> None:
    """A prompt, then a batch of a branching tree, a prompt in the middle, and a chain."""
    first, second, third = (pool.new_table() for _ in range(3))
    prompt = [ForwardRow(first, PROMPT[:-2]), ForwardRow(second, OTHER[:5])]
    for row in prompt:
        pool.reserve(row.table, row.end)
    runner.forward(prompt)
    check_equal(runner.hidden_of(0), reference(PROMPT[:-2]))
    check_equal(runner.hidden_of(1), reference(OTHER[:5]))
    for row in prompt:
        runner.commit(row)
    rows = [
        ForwardRow(first, PROMPT[-2:], BRANCHING, select=(1,)),
        ForwardRow(second, OTHER[5:]),
        ForwardRow(third, PROMPT[:1], TokenTree.chain(PROMPT[1:4]), select=(0,)),
    ]
    for row in rows:
        pool.reserve(row.table, row.end)
    runner.forward(rows)
    hidden = runner.hidden
    assert hidden is not None
    assert len(hidden) == sum(len(row.tokens) + len(row.tree) for row in rows)
    for node in range(len(BRANCHING)):
        path = path_to(BRANCHING, node)
        expected = reference(PROMPT + tuple(BRANCHING.tokens[step] for step in path))[len(PROMPT) - 2 :]
        check_equal(runner.hidden_of(0, path), expected)
    check_equal(runner.hidden_of(1), reference(OTHER)[5:])
    check_equal(runner.hidden_of(2, (0, 1)), reference(PROMPT[:3]))


WAYS = [(family, "off") for family in FAMILIES] + [(family, "auto") for family in NATIVE]


@pytest.mark.parametrize(("family", "native"), WAYS)
def test_taps_are_the_hidden_states_of_transformers(family: str, native: str, code: Path, tmp_path: Path) -> None:
    if native == "auto" and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    directory = tiny.save(tmp_path, FAMILIES[family](), sharpness=1.5)
    reference, layers = plain_taps(directory)
    runner, pool = open_runner(directory, code, tuple(range(layers + 1)), native=native)
    check_prompts_and_trees(runner, pool, reference)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_layers_have_the_same_taps(family: str, code: Path, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, FAMILIES[family](), sharpness=1.5)
    reference, layers = plain_taps(directory)
    runner, pool = open_runner(directory, code, tuple(range(layers + 1)), native="off", compile="on")
    check_prompts_and_trees(runner, pool, reference)


@pytest.mark.parametrize("native", ["auto", "off"])
def test_taps_come_in_the_order_in_which_they_were_asked_for(native: str, code: Path, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama(), sharpness=1.5)
    reference, layers = plain_taps(directory)
    runner, pool = open_runner(directory, code, (layers, 0), native=native)
    row = ForwardRow(pool.new_table(), OTHER)
    pool.reserve(row.table, row.end)
    runner.forward([row])
    expected = reference(OTHER).view(len(OTHER), layers + 1, HIDDEN)[:, [layers, 0]]
    check_equal(runner.hidden_of(0), expected.flatten(1))


@pytest.mark.parametrize("native", ["auto", "off"])
def test_taps_change_no_bit_of_the_logits(native: str, code: Path, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    found = []
    for taps in ((), (0, 1, 2)):
        runner, pool = open_runner(directory, code, taps, native=native)
        row = ForwardRow(pool.new_table(), PROMPT, BRANCHING, tuple(range(len(PROMPT) + len(BRANCHING))))
        pool.reserve(row.table, row.end)
        found.append(runner.forward([row]).clone())
    assert torch.equal(*found)


def test_replayed_graphs_have_the_taps_of_plain_passes(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama(), sharpness=1.5)
    reference, layers = plain_taps(directory)
    tape = FakeRecorder()
    bench = open_bench(directory, tape, taps=tuple(range(layers + 1)))
    check_prompts_and_trees(bench.runner, bench.pool, reference)
    assert tape.replayed == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_recorded_passes_on_a_gpu_have_the_taps_of_transformers(compiled: str, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama(), sharpness=1.5)
    reference, layers = plain_taps(directory)
    model = load_model(ModelSection.model_validate({"path": str(directory), "device": "cuda", "compile": compiled}))
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=200)
    runner = ModelRunner(model, pool, tuple(range(layers + 1)))
    runner.warm_up()
    for _ in range(2):
        check_prompts_and_trees(runner, pool, lambda text: reference(text).cuda())


@pytest.mark.parametrize("tap", [-1, 3])
def test_a_tap_that_the_model_does_not_have_is_refused(tap: int, code: Path, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    with pytest.raises(ConfigurationError, match=rf"taps: {tap} .* between 0 and 2"):
        open_runner(directory, code, (1, tap), native="off")


def test_without_taps_nothing_is_recorded(code: Path, tmp_path: Path) -> None:
    runner, pool = open_runner(tiny.save(tmp_path, tiny.llama()), code, (), native="off")
    row = ForwardRow(pool.new_table(), OTHER, EMPTY_TREE)
    pool.reserve(row.table, row.end)
    runner.forward([row])
    assert runner.hidden is None
    with pytest.raises(ValueError, match="without taps"):
        runner.hidden_of(0)


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_pass_without_taps_computes_the_same_and_shows_nothing(native: str, code: Path, tmp_path: Path) -> None:
    runner, pool = open_runner(tiny.save(tmp_path, tiny.llama()), code, (0, 1), native=native)
    row = ForwardRow(pool.new_table(), PROMPT, select=(len(PROMPT) - 1,))
    pool.reserve(row.table, row.end)
    expected = runner.forward([row]).clone()
    assert runner.hidden is not None
    assert torch.equal(runner.forward([row], PassOptions(with_taps=False)), expected)
    assert runner.hidden is None
