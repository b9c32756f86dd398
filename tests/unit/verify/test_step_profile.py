"""A target measures the time of its steps during warm-up."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from cluster.core.config.target_section import TargetSection
from cluster.core.request import SamplingParameters
from cluster.core.verification import StepSample
from cluster.speculation.latency import LatencyModel
from tests.support.models import tiny
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling.context import is_truncated
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine
from workers.verify.step_profile import _EVERY_KERNEL, SIZES


def engine_with(directory: Path, blocks: int) -> TargetEngine:
    section = TargetSection(path=str(tiny.save(directory, tiny.llama())), device="cpu")
    model = load_model(section)
    return TargetEngine(model, KvPool(model.kv_spec, section.kv, blocks), LocalDecider())


def test_warm_up_takes_over_what_was_measured_before(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, 200)
    before = (StepSample(1, 1, 0.25),)
    engine.warm_up(before)
    assert engine.info().profile == before
    engine.close()


@pytest.mark.parametrize(("blocks", "sizes"), [(200, SIZES), (4, tuple(size for size in SIZES if size[0] == 1))])
def test_warm_up_measures_steps_and_frees_all_blocks(
    tmp_path: Path, blocks: int, sizes: tuple[tuple[int, int], ...]
) -> None:
    engine = engine_with(tmp_path, blocks)
    assert engine.info().profile == ()
    engine.warm_up()
    info = engine.info()
    engine.close()
    assert tuple((sample.rows, sample.tokens) for sample in info.profile) == sizes
    assert all(sample.seconds > 0 for sample in info.profile)
    assert info.kv.blocks_free == info.kv.blocks_total
    assert LatencyModel.of_profile(info.profile).covers(1)


def test_every_parameter_that_truncates_has_compiled_its_kernels_before_the_first_request() -> None:
    usual = SamplingParameters()
    names = {one.name for one in fields(usual) if is_truncated(replace(usual, **{one.name: 0.5}))}
    assert names >= {"top_k", "top_p", "min_p"}
    assert {name for name in names if all(getattr(one, name) == getattr(usual, name) for one in _EVERY_KERNEL)} == set()
