"""The shipped form of a translator's draft runs on the CPU kernels, in 8 bits by default, and changes no token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection, TargetSection
from tests.support.engines.sourced import SOURCE, SourcedModel
from tests.support.models import tiny
from tests.unit.forward.encoder_decoder.test_colocated_drafts import Colocated
from workers.distill.seq2seq_data import decoder_start
from workers.distill.seq2seq_student import make_seq2seq_student
from workers.distill.student import StudentPlan, export
from workers.distill.target_model import load_seq2seq_target
from workers.draft.common.trees.tree_drafter import TreeDrafter
from workers.draft.model import DraftModelSettings
from workers.draft.model.model_expander import ModelExpander
from workers.draft.registry import create
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model.loading import load_model
from workers.verify.decider import LocalDecider, decider_of_model
from workers.verify.engine import EngineOptions, TargetEngine

pytestmark = pytest.mark.slow

needs_kernels = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
VOCABULARY = tuple(range(0, 96, 2))
TOKENS = (3, 8, 11, 40)


@pytest.fixture(scope="module", params=["marian", "bart"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SourcedModel:
    config = tiny.ENCODER_DECODER_FAMILIES[request.param]()
    return SourcedModel(tiny.save(tmp_path_factory.mktemp(request.param), config))


@pytest.fixture(scope="module")
def draft(target: SourcedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distilled draft: the target's second decoder layer, and the head of every other token."""
    loaded = load_seq2seq_target(target.directory, torch.device("cpu"))
    student = make_seq2seq_student(loaded, StudentPlan((1,), vocabulary=VOCABULARY), decoder_start(loaded), 0)
    directory = tmp_path_factory.mktemp("drafts") / "draft"
    export(student, directory, target.directory.name, "", {})
    return directory


def logits(draft: Path, target: SourcedModel, native: str, quantization: str) -> torch.Tensor:
    """Logits of a few tokens that follow in passes of one token each, as a draft grows."""
    values = {"path": str(draft), "device": "cpu", "native": native, "quantization": quantization}
    model = load_model(ModelSection.model_validate(values), target_directory=target.directory)
    assert (model.native is not None) == (native == "auto")
    pool = KvPool(model.kv_spec, KvSection(block_size=4), 100, truncatable=True)
    runner, store = ModelRunner(model, pool), SourceStore(pool)
    source = store.acquire(SOURCE, "")
    runner.encode([source], store)
    table, found = pool.new_table(), []
    for token in TOKENS:
        row = ForwardRow(table, (token,), select=(0,), source=source)
        pool.reserve(table, row.end)
        found.append(runner.forward([row]).float().clone())
        runner.commit(row)
    return torch.cat(found)


@needs_kernels
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_native_pass_is_the_modules_pass(draft: Path, target: SourcedModel, quantization: str) -> None:
    found, expected = (logits(draft, target, native, quantization) for native in ("auto", "off"))
    assert found.shape == (len(TOKENS), len(VOCABULARY))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def created(draft: Path, target: SourcedModel, **settings: str) -> tuple[TreeDrafter, ModelExpander]:
    """The method `model` as a target creates it."""
    values = {"path": str(draft), "device": "cpu", "kv": {"pool_bytes": 1 << 20}} | settings
    own = {"model": DraftModelSettings.model_validate(values)}
    section = DraftSection.model_validate(
        {"method": "model", "placement": "target", "max_nodes": 6, "max_depth": 4} | own
    )
    method = create(section, TargetSection(path=str(target.directory), device="cpu"))
    assert isinstance(method, TreeDrafter)
    assert isinstance(method._expander, ModelExpander)
    return method, method._expander


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_drafts_change_no_token(draft: Path, target: SourcedModel, quantization: str, sampled: bool) -> None:
    method, expander = created(draft, target, quantization=quantization)
    model = load_model(ModelSection(path=str(target.directory), device="cpu"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4), 300)
    engine = TargetEngine(model, pool, decider_of_model(model, LocalDecider()), EngineOptions(method=method))
    cluster = Colocated(engine, pool, expander.memory, expander)
    expected = cluster.decode(drafts=False, sampled=sampled)
    engine.release_all()
    assert cluster.decode(sampled=sampled) == expected
    engine.release_all()
    assert pool.blocks_free == pool.blocks_total
    assert expander.memory.blocks_free == expander.memory.blocks_total


def test_a_draft_with_its_targets_encoder_is_stored_in_8_bits_unless_configured(
    draft: Path, target: SourcedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.model import loading

    seen: list[str] = []

    def loaded(section: ModelSection, **_: object) -> None:
        seen.append(section.quantization)
        raise InterruptedError

    monkeypatch.setattr(loading, "load_model", loaded)
    for path, quantization in (
        (draft, "auto"),
        (draft, "none"),
        (target.directory, "auto"),
        (target.directory, "int8"),
    ):
        with pytest.raises(InterruptedError):
            created(path, target, quantization=quantization)
    assert seen == ["int8", "none", "none", "int8"]
