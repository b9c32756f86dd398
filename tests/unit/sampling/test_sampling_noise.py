"""The noise is a function of (seed, position, token), has pinned bits, and has the Gumbel distribution."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sampling import noise
from workers.sampling.noise import gumbel

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**20)
OFFSETS = st.integers(0, 200_000)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def reference_uniform(seed: int, position: int, token: int) -> float:
    """The construction in the module's docstring, in Python's integers."""

    def mix64(value: int) -> int:
        value &= 2**64 - 1
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) % 2**64
        return value ^ value >> 31

    def mix32(value: int) -> int:
        value = ((value ^ value >> 16) * 0x7FEB352D) % 2**32
        value = ((value ^ value >> 15) * 0x846CA68B) % 2**32
        return value ^ value >> 16

    key = mix64(mix64(seed + 0x9E3779B97F4A7C15) ^ mix64(position + 0xD1B54A32D192ED03))
    word = mix32((mix32(mix32(token) ^ key >> 32) + key) % 2**32)
    return (word + 0.5) / 2**32


@settings(deadline=None)
@given(SEEDS, POSITIONS, OFFSETS)
def test_noise_is_the_gumbel_quantile_of_the_documented_hash(seed: int, position: int, token: int) -> None:
    uniform = reference_uniform(seed, position, token)
    quantile = -math.log(-math.log(uniform)) if uniform < 0.5 else -math.log(-math.log1p(uniform - 1))
    assert gumbel([seed], [position], token, 1, "cpu").item() == pytest.approx(quantile, abs=3.4e-6)


def test_bits_are_pinned() -> None:
    drawn = gumbel([0, 1, 2**64 - 1], [0, 1, 1_000_000], 0, 4, "cpu")
    words = [[f"{word & 0xFFFFFFFF:08x}" for word in row] for row in drawn.view(torch.int32).tolist()]
    assert words == [
        ["3ea37600", "bf7e5f64", "3f0dfa5c", "400d76aa"],
        ["bf46da8a", "3ed7daa8", "3d7beb00", "3ed8ba8c"],
        ["3de7a630", "400eaac9", "3f8b9a2c", "3fcc0c95"],
    ]


def test_a_whole_vocabulary_of_bits_is_pinned() -> None:
    drawn = gumbel(range(4), range(100, 104), 0, 49_152, "cpu")
    assert (
        hashlib.sha256(drawn.numpy().tobytes()).hexdigest()
        == "5465edfd448ed792fd8e14374593406f61cb82bcf31300b48b553f6cbce2b080"
    )


@settings(deadline=None)
@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=5), st.randoms())
def test_a_row_does_not_depend_on_its_batch(keys: list[tuple[int, int]], random) -> None:
    together = gumbel([seed for seed, _ in keys], [position for _, position in keys], 0, 50, "cpu")
    row = random.randrange(len(keys))
    alone = gumbel([keys[row][0]], [keys[row][1]], 0, 50, "cpu")
    assert torch.equal(together[row], alone[0])


@settings(deadline=None)
@given(SEEDS, POSITIONS, OFFSETS, st.integers(1, 300), st.integers(0, 300))
def test_a_token_does_not_depend_on_its_shard(seed: int, position: int, offset: int, size: int, inside: int) -> None:
    shard = gumbel([seed], [position], offset, size, "cpu")[0]
    inside %= size
    assert torch.equal(shard[inside:], gumbel([seed], [position], offset + inside, size - inside, "cpu")[0])


def test_rows_longer_and_shorter_than_a_chunk_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gumbel([7] * 20, range(20), 0, 1000, "cpu")
    monkeypatch.setattr(noise, "_CPU_CHUNK", 3000)
    assert torch.equal(gumbel([7] * 20, range(20), 0, 1000, "cpu"), whole)


def test_the_number_of_threads_changes_nothing(threads: None) -> None:
    torch.set_num_threads(1)
    alone = gumbel([5], [6], 0, 100_000, "cpu")
    torch.set_num_threads(4)
    assert torch.equal(gumbel([5], [6], 0, 100_000, "cpu"), alone)


def test_the_table_is_near_the_exact_quantile_over_its_whole_range() -> None:
    distances = torch.cat(
        [torch.arange(2000), 2 ** torch.arange(1, 31), 2 ** torch.arange(1, 31) - 1, torch.arange(2**31 - 500, 2**31)]
    )
    words = torch.cat([distances, -1 - distances]).to(torch.int32)
    exact_distance = (words.double() + 0.5).abs() * 2.0**-32
    exact = torch.where(words >= 0, -(-exact_distance.log()).log(), -(-torch.log1p(-exact_distance)).log())
    read = torch.empty(len(words))
    noise._quantile(words.clone(), out=read)
    assert (read.double() - exact).abs().max().item() < 3.4e-6


def test_zero_rows_and_zero_tokens_are_allowed() -> None:
    assert gumbel([], [], 0, 10, "cpu").shape == (0, 10)
    assert gumbel([1], [1], 5, 0, "cpu").shape == (1, 0)


@pytest.mark.parametrize(
    ("seeds", "positions", "offset"),
    [([1], [1, 2], 0), ([-1], [0], 0), ([2**64], [0], 0), ([0], [-1], 0), ([0], [0], -1), ([0], [0], 2**31)],
)
def test_arguments_out_of_range_are_refused(seeds: list[int], positions: list[int], offset: int) -> None:
    with pytest.raises(ValueError, match=r"seed|tokens"):
        gumbel(seeds, positions, offset, 10, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_draws_the_same_bits() -> None:
    here = gumbel(range(16), range(16), 1000, 128_256, "cpu")
    assert torch.equal(gumbel(range(16), range(16), 1000, 128_256, "cuda").cpu(), here)
