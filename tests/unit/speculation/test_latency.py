"""The latency model: between samples, beyond them, and when everything becomes slower."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.verification import StepSample
from cluster.speculation.latency import LatencyModel, bucket_of
from tests.support.fakes.simulated_time import cpu_step, gpu_step

SIZES = (1, 2, 4, 8, 16, 32, 64)


def observing(*samples: tuple[int, int, float], grows_from_zero: bool = False) -> LatencyModel:
    model = LatencyModel(grows_from_zero=grows_from_zero)
    for rows, size, seconds in samples:
        model.observe(rows, size, seconds)
    return model


def trained(
    step_time: object, samples: int = 600, noise: float = 0.0, rows: tuple[int, ...] = (1, 4, 8)
) -> LatencyModel:
    rng, model = random.Random(1), LatencyModel()
    for _ in range(samples):
        row, size = rng.choice(rows), rng.choice(SIZES)
        model.observe(row, size, step_time(row, size) * rng.uniform(1 - noise, 1 + noise))  # type: ignore[operator]
    return model


@pytest.mark.parametrize("step_time", [cpu_step, gpu_step])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_step_times_of_any_form_are_learned(step_time: object, noise: float) -> None:
    model = trained(step_time, noise=noise)
    for size in (1, 2, 4, 8, 12, 16, 24, 32, 64):
        assert model.seconds(4, size) == pytest.approx(step_time(4, size), rel=0.12)  # type: ignore[operator]


def test_a_profile_gives_the_step_times_before_the_first_step() -> None:
    sizes = [(1, size) for size in SIZES] + [(8, 8), (8, 32), (32, 32)]
    model = LatencyModel.of_profile([StepSample(rows, size, cpu_step(rows, size)) for rows, size in sizes])
    assert model.seconds(2, 8) - model.seconds(1, 8) == pytest.approx(0.0001, rel=0.01)
    for rows, size in [*sizes, (4, 12), (16, 24), (16, 48)]:
        assert model.seconds(rows, size) == pytest.approx(cpu_step(rows, size), rel=0.05)


def test_without_samples_every_size_takes_the_floor() -> None:
    assert LatencyModel(floor_seconds=0.25).seconds(3, 99) == 0.25
    assert not LatencyModel().has_samples


def test_one_sample_predicts_the_same_time_for_all_sizes_or_less_where_it_grows_from_zero() -> None:
    flat = observing((1, 8, 0.008))
    assert [flat.seconds(1, size) for size in (1, 8, 64)] == [0.008] * 3
    growing = observing((1, 8, 0.008), grows_from_zero=True)
    assert [growing.seconds(1, size) for size in (2, 4, 8, 64)] == pytest.approx([0.002, 0.004, 0.008, 0.008])


def test_the_line_continues_beyond_the_largest_size() -> None:
    model = observing((1, 8, 0.010), (1, 16, 0.014))
    assert model.seconds(1, 32) == pytest.approx(0.022)


def test_an_outlier_teaches_little_and_a_slowdown_is_followed() -> None:
    model, outlier, slow = trained(cpu_step), trained(cpu_step), trained(cpu_step)
    plain = model.seconds(4, 16)
    outlier.observe(4, 16, 10.0)
    assert outlier.seconds(4, 16) < 1.25 * plain
    for _ in range(40):
        slow.observe(4, 16, 1.5 * cpu_step(4, 16))
    assert slow.seconds(4, 16) == pytest.approx(1.5 * plain, rel=0.03)
    assert slow.seconds(4, 32) > 1.15 * model.seconds(4, 32)  # a size without new samples is slowed down too


def test_a_single_size_that_becomes_slow_is_learned() -> None:
    model = trained(cpu_step)
    plain = model.seconds(4, 4)
    for _ in range(200):
        model.observe(4, 16, 0.040)
        model.observe(4, 4, cpu_step(4, 4))
    assert model.seconds(4, 16) == pytest.approx(0.040, rel=0.05)
    assert model.seconds(4, 4) == pytest.approx(plain, rel=0.05)


def test_buckets_are_exact_up_to_8_and_a_quarter_of_an_octave_above() -> None:
    assert [bucket_of(size) for size in range(1, 9)] == list(range(1, 9))
    assert [bucket_of(size) for size in (9, 10, 15, 16, 17, 20, 21, 32)] == [9, 9, 12, 12, 13, 13, 14, 16]


samples = st.tuples(st.integers(1, 64), st.integers(1, 512), st.floats(1e-5, 10.0))


@settings(deadline=None, max_examples=50)
@given(st.lists(samples, max_size=40))
def test_a_larger_size_never_takes_less_time(history: list[tuple[int, int, float]]) -> None:
    model = LatencyModel()
    for rows, size, seconds in history:
        model.observe(rows, size, seconds)
    expected = model.seconds_upto(4, 1, 600)
    assert all(0 < before <= after * (1 + 1e-9) for before, after in itertools.pairwise(expected))
    assert expected == [model.seconds(4, size) for size in range(1, 601)]
