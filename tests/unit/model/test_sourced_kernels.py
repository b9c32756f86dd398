"""The CPU kernels compute the decoders of Marian and BART: logits and hidden states are those of the modules."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from cluster.core.tree import TokenTree
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel, PassOptions
from workers.forward.partial_pass import PartialPass
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model import kernel_handover
from workers.model.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

SOURCE = tuple((11 * index) % 90 + 3 for index in range(21))
TOKENS = tuple((7 * index) % 90 + 3 for index in range(30))


def load(directory: Path, **settings: str) -> LoadedModel:
    return load_model(ModelSection.model_validate({"path": str(directory), "device": "cpu"} | settings))


def run(model: LoadedModel, tree: TokenTree | None = None, partial: PartialPass | None = None) -> torch.Tensor:
    """Logits of all tokens, then the hidden states before the first and after the last layer."""
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=60)
    store, table = SourceStore(pool), pool.new_table()
    runner = ModelRunner(model, pool, taps=() if partial else (0, 2))
    source = store.acquire(SOURCE, "")
    runner.encode([source], store)
    tree = tree or TokenTree()
    pool.reserve(table, len(TOKENS) + len(tree))
    row = ForwardRow(table, TOKENS, tree, tuple(range(len(TOKENS) + len(tree))), source=source)
    logits = runner.forward([row], PassOptions(partial)) if partial else runner.forward([row])
    states = [] if runner.hidden is None else [runner.hidden.float()]
    return torch.cat([logits.float().clone(), *states], dim=1)


@pytest.mark.parametrize(
    ("settings", "bound"),
    [({}, 1e-5), ({"dtype": "bfloat16"}, 0.03), ({"quantization": "int8"}, 1e-3), ({"quantization": "int4"}, 1e-3)],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_logits_and_hidden_states_are_those_of_the_modules(
    sourced_directory: Path, settings: dict[str, str], bound: float
) -> None:
    kernels, modules = (
        load(sourced_directory, **settings),
        load(sourced_directory, native="off", compile="off", **settings),
    )
    assert kernels.native is not None and modules.native is None
    tree = TokenTree((4, 5, 6, 7), (-1, -1, 0, 2))
    assert kernel_handover.relative_error(run(kernels, tree), run(modules, tree)) < bound


def test_logits_are_those_of_transformers(sourced_directory: Path) -> None:
    reference = AutoModelForSeq2SeqLM.from_pretrained(sourced_directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([SOURCE]), decoder_input_ids=torch.tensor([TOKENS])).logits[0]
    found = run(load(sourced_directory))[:, : tiny.VOCABULARY]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "partial",
    [PartialPass(layers=1), PartialPass(skip_attention=frozenset({0}), skip_mlp=frozenset({1}))],
    ids=["layers", "skipped"],
)
def test_parts_of_the_model_are_those_of_the_modules(sourced_directory: Path, partial: PartialPass) -> None:
    found, expected = (run(load(sourced_directory, native=native), partial=partial) for native in ("auto", "off"))
    assert kernel_handover.relative_error(found, expected) < 1e-5


def test_a_norm_after_a_part_of_the_layers_is_refused(sourced_directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="exit_norm is refused"):
        run(load(sourced_directory), partial=PartialPass(layers=1, exit_norm=torch.ones(48)))


def test_a_model_whose_logits_differ_keeps_its_modules(
    sourced_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernel_handover._MAX_RELATIVE_ERROR, torch.float32, 0.0)
    model = load(sourced_directory)
    assert model.native is None
    assert kernel_handover.relative_error(run(model), run(load(sourced_directory, native="off"))) < 1e-6


@pytest.mark.parametrize("config", [tiny.t5(), tiny.marian(activation_function="tanh")], ids=["t5", "tanh"])
def test_other_decoders_keep_their_modules(config: PreTrainedConfig, tmp_path: Path) -> None:
    assert load(tiny.save(tmp_path, config)).native is None
