"""The leading logits of a screened head have the bits of the whole head's, and no leader is missing."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import NO_DRAFT, DraftBudget
from cluster.core.request import SamplingParameters
from deploy.implied_settings import with_implied_settings
from tests.support.engines.colocated_decoding import decode_together
from tests.support.models import tiny
from tests.support.slow import slow_but
from workers.draft.registry import create
from workers.forward.encoder_decoder import native_decoder
from workers.forward.loaded_model import WHOLE_PASS, LoadedModel, PassOptions
from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import linear_function
from workers.forward.native.screen import HeadScreen
from workers.forward.runner import ForwardRow, ModelRunner
from workers.forward.weights.base import Kind
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model.loading import load_model
from workers.sampling.context import common_leaders, leaders_of
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

VOCABULARY = 5003
FITTING_TILES = {"d_model": 64, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
GREEDY = SamplingParameters(temperature=0.0)


@pytest.fixture(scope="module", params=slow_but(["marian"], ["marian", "bart"]))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"marian": tiny.marian, "bart": tiny.bart}[request.param](vocab_size=VOCABULARY, **FITTING_TILES)
    return tiny.save(tmp_path_factory.mktemp(request.param), config)


def load(directory: Path) -> LoadedModel:
    return load_model(ModelSection(path=str(directory), device="cpu"))


@pytest.fixture(scope="module")
def model(directory: Path) -> LoadedModel:
    return load(directory)


def logits(model: LoadedModel, leaders: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """The logits of one token of each of some rows."""
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=500)
    runner, store = ModelRunner(model, pool), SourceStore(pool)
    found = []
    for row in range(rows):
        source = store.acquire(tuple((17 * (index + row + seed)) % 90 + 3 for index in range(9)), "")
        if not source.is_encoded:
            runner.encode([source], store)
        table = pool.new_table()
        pool.reserve(table, 3)
        found.append(ForwardRow(table, (5, 8 + row, 11 + seed), select=(2,), source=source))
    return runner.forward(found, PassOptions(leaders=leaders)).clone()


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "emulated"])
def test_no_logit_is_beyond_the_bounds_of_the_screen(kernels: str, emulated: str) -> None:
    """Inputs of 128 numbers are multiplied as two rows of integers, where the processor multiplies integers."""
    library = load_library(emulated if kernels == "emulated" else None)
    assert library is not None
    weight, bias = values(1003, 128), values(1003, seed=1)
    weight[7] *= 1000.0
    screen = HeadScreen(weight, bias, library)
    assert kernels == "native" or (screen.structure.matrix.kind, screen.most_rows) == (Kind.INT8_TILES, 64)
    x = torch.cat([values(20, 128, seed=2), values(20, 128, seed=3).exp() ** 3, torch.zeros(1, 128)])
    x[3, 5] = 1e4  # one large number makes the fine steps of the others coarse
    found, buffer = torch.empty(len(x), len(weight)), torch.empty(x.shape)
    addresses = (x.data_ptr(), buffer.data_ptr(), found.data_ptr())
    linear_function(library)(ctypes.addressof(screen.structure.matrix), None, *addresses, len(x))
    error = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * len(weight)).from_address(screen.structure.error)))
    wanted = x.double() @ weight.double().T + bias.double()
    missed = (found.double() - wanted).abs() / (error.double() * (1.0 + x.double().norm(dim=1, keepdim=True)))
    assert 0.01 < float(missed.max()) <= 1.0


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("leaders", [1, 2, 5])
def test_leaders_are_those_of_the_whole_head(model: LoadedModel, leaders: int, rows: int) -> None:
    for seed in range(3):
        whole, leading = (logits(model, count, rows, seed) for count in (0, leaders))
        is_computed = leading > -torch.inf
        assert torch.equal(leading[is_computed], whole[is_computed])
        best = whole.topk(leaders, dim=1)
        assert torch.equal(leading.topk(leaders, dim=1).values, best.values)
        assert bool(is_computed.gather(1, best.indices).all())
        assert torch.equal(leading.argmax(dim=1), whole.argmax(dim=1))
        assert torch.isfinite(whole).all()


def test_the_head_is_not_computed_as_a_whole(model: LoadedModel) -> None:
    assert bool((logits(model, 1) == -torch.inf).any())


def test_many_rows_and_many_leaders_compute_the_whole_head(model: LoadedModel) -> None:
    assert torch.equal(logits(model, 9), logits(model, 0))
    assert torch.equal(logits(model, 1, rows=65), logits(model, 0, rows=65))


def test_a_small_vocabulary_has_no_screen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decoder, "_LEAST_SCREENED", VOCABULARY + 1)
    assert torch.isfinite(logits(load(directory), 1)).all()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (GREEDY, 1),
        (SamplingParameters(temperature=0.0, bad_words=((7,), (8, 9))), 3),
        (SamplingParameters(temperature=0.0, min_tokens=4, end_token_ids=(0, 2)), 3),
        (SamplingParameters(temperature=0.0, end_token_ids=(0, 2)), 1),
        (SamplingParameters(temperature=0.7), 0),
        (SamplingParameters(temperature=0.0, logprobs=0), 0),
        (SamplingParameters(temperature=0.0, prompt_logprobs=0), 0),
        (SamplingParameters(temperature=0.0, logit_bias=((3, 1.0),)), 0),
        (SamplingParameters(temperature=0.0, repetition_penalty=1.1), 0),
        (SamplingParameters(temperature=0.0, frequency_penalty=0.1), 0),
        (SamplingParameters(temperature=0.0, allowed_token_ids=(3, 4)), 0),
        (SamplingParameters(temperature=0.0, no_repeat_ngram_size=3), 0),
    ],
)
def test_what_a_decision_needs(sampling: SamplingParameters, expected: int) -> None:
    assert leaders_of(sampling) == expected
    assert common_leaders([sampling, GREEDY]) == expected
    assert common_leaders([]) == 0


def test_every_parameter_needs_all_logits_unless_it_is_known_not_to() -> None:
    known = {"temperature", "top_k", "top_p", "min_p", "seed", "logprob_token_ids"}
    known |= {"min_tokens", "end_token_ids", "bad_words"}
    others = {field.name for field in fields(SamplingParameters)} - known
    assert {name for name in others if leaders_of(replace(GREEDY, **{name: 3})) != 0} == set()


def test_a_method_that_reads_ranks_asks_for_as_many_leaders_and_drafts_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    forward = ModelRunner.forward

    def recorded(self: ModelRunner, rows: Sequence[ForwardRow], options: PassOptions = WHOLE_PASS) -> torch.Tensor:
        asked.append(options.leaders)
        return forward(self, rows, options)

    monkeypatch.setattr(ModelRunner, "forward", recorded)
    requests = dict.fromkeys(("a", "b"), ((5, 8), GREEDY))
    sources = {"a": tuple(range(3, 12)), "b": tuple(range(40, 60))}
    target = {"path": str(directory), "device": "cpu", "kv": {"block_size": 4, "pool_bytes": 4 << 20}}
    found = []
    for least in (native_decoder._LEAST_SCREENED, VOCABULARY + 1):
        monkeypatch.setattr(native_decoder, "_LEAST_SCREENED", least)
        configuration = with_implied_settings(load_configuration({"target": target, "draft": {"method": "recycling"}}))
        method = create(configuration.draft, configuration.target)
        engine = build_engine(configuration.target, method=method)
        asked.clear()
        drafted = decode_together(engine.step, requests, 12, DraftBudget(7, 7), sources)
        assert set(asked) == {configuration.target.evidence.top}
        engine.release_all()
        asked.clear()
        plain = decode_together(engine.step, requests, 12, NO_DRAFT, sources)
        assert set(asked) == {1}  # a step that nothing is drafted after shows nothing
        assert all(drafted[name].answer[:12] == plain[name].answer[:12] for name in requests)
        assert sum(one.deepest for one in drafted.values()) > 0
        found.append([proposal.tree for one in drafted.values() for proposal in one.proposals])
        engine.close()
    assert found[0] == found[1]
