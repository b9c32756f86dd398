"""`load_format: dummy`: random weights in the shape of a model's configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ConfigurationError
from deploy.doctor.models import model_findings
from deploy.models import Models, resolve_models
from deploy.placement import Resources, plan
from deploy.preflight import model_problems
from deploy.settings import load_settings
from tests.support.engines.engine_sequence import generate
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import quantized, tiny
from tests.support.slow import slow_but
from workers.model.loading import load_model, read_decoder
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine

MXFP4 = {"quant_method": "mxfp4"}
FORMATS = {"plain": None, "mxfp4": MXFP4} | {name: how[1] for name, how in quantized.checkpoints(16, (16, 16)).items()}
"""What `config.json` says of quantized weights, by the name of the format."""
FEW = ("plain", "awq", "mxfp4")
POOL = 1 << 20


@pytest.fixture
def shape_only(tmp_path: Path) -> Path:
    """A directory with the configuration of a tiny model, without weights."""
    tiny.save(tmp_path / "whole", tiny.llama())
    (tmp_path / "shape").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "shape")
    return tmp_path / "shape"


def resolved(path: str | Path, cache: Path, **target: str) -> Models:
    """The configuration of a target with random weights, as `serve` settles it."""
    values = {"path": str(path), "load_format": "dummy", "device": "cpu", "kv.pool_bytes": POOL}
    values |= {"compile": "off", "compile_directory": str(KEPT)} | target
    named = {f"target.{name}": value for name, value in values.items()} | {"draft.method": "none"}
    return resolve_models(load_configuration({}, named), cache, lambda _: None)


def fits(models: Models, memory: int) -> bool:
    """Whether a plan has room for the target in so many bytes, beside its KV pool."""
    machine = Resources(cpus=8, gpus=0, memory_bytes=POOL + memory)
    placement = plan(models.configuration, [machine])
    return not list(model_problems(models.configuration, placement, [machine], models.target, None))


def held_bytes(section: ModelSection) -> int:
    """Bytes of the weights that are drawn, before any kernel packs them."""
    return sum(one.nbytes for one in read_decoder(section, None)[0].parameters())


def test_dummy_weights_need_only_the_configuration_and_are_the_same_at_each_start(shape_only: Path) -> None:
    section = ModelSection(path=str(shape_only), load_format="dummy", native="off", device="cpu")
    torch.manual_seed(1)
    first = load_model(section).module.state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    second = load_model(section).module.state_dict()
    assert torch.equal(drawn, torch.rand(1)), "the caller's random numbers are not disturbed"
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_several_ranks_are_refused(shape_only: Path) -> None:
    section = ModelSection(path=str(shape_only), load_format="dummy", device="cpu")
    with pytest.raises(ConfigurationError, match=r"^target\.tensor_parallel: 3 is refused; with target\.load"):
        load_model(section, tensor_parallel=3)


@pytest.mark.parametrize("name", slow_but(FEW, FORMATS))
def test_a_target_with_random_weights_is_planned_as_plain_numbers_and_serves(
    name: str, shape_only: Path, tmp_path: Path
) -> None:
    """A checkpoint's quantized numbers are neither read nor de-quantized: its directory may have none."""
    config = json.loads((shape_only / "config.json").read_text())
    config |= {} if FORMATS[name] is None else {"quantization_config": FORMATS[name]}
    (shape_only / "config.json").write_text(json.dumps(config))

    found = resolved(shape_only, tmp_path / "cache")

    target = found.configuration.target
    assert (found.target, target.quantization) == (shape_only, "none")
    assert not (tmp_path / "cache").exists()
    (finding, *_) = model_findings(found.configuration, tmp_path / "cache")
    assert finding.remedy is None
    held = held_bytes(target)
    assert fits(found, held)
    assert not fits(found, held - 1)
    engine = build_engine(target)
    try:
        assert len(generate(engine, [5, 17, 33], 8)) == 8
    finally:
        engine.close()


def test_random_weights_have_another_fingerprint_than_those_of_the_files(tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "whole", tiny.llama())
    drawn = resolved(path, tmp_path).configuration.target
    engines = [build_engine(one) for one in (drawn, drawn.model_copy(update={"load_format": "auto"}))]
    first, second = (engine.info().fingerprint for engine in engines)
    assert first != second
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("section", "others"), [("target", "auto, none, int8"), ("draft.model", "auto, none, int8, int4")]
)
def test_random_weights_that_stay_as_they_are_stored_are_refused(section: str, others: str) -> None:
    values = {f"{section}.load_format": "dummy", f"{section}.quantization": "stored"}
    message = rf"{section}: quantization \(stored\) is refused with load_format \(dummy\).*must be one of {others}"
    with pytest.raises(ConfigurationError, match=message):
        load_configuration({}, values)


@pytest.mark.weights
def test_random_weights_of_the_packaged_model_take_the_bytes_of_its_plain_numbers(tmp_path: Path) -> None:
    found = resolved("smollm2-135m-instruct", load_settings().cache_directory)
    assert found.configuration.target.quantization == "none"
    held = held_bytes(found.configuration.target)
    assert held == 134_515_008 * 4
    assert fits(found, held)
    assert not fits(found, held - 1)
    engine = build_engine(found.configuration.target)
    try:
        assert len(generate(engine, [5, 17, 33], 4)) == 4
    finally:
        engine.close()
