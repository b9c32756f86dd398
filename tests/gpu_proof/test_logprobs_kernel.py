"""One pass over the logits finds the ranks, sums and most probable tokens that PyTorch's operators find."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu_proof.device import DEVICE, needs_kernels
from tests.support.fakes.host_waits import OnGpu
from workers.sampling.logprobs import numbers_of_blocks, numbers_together, token_logprobs
from workers.verify.step_profile import _EVERY_KERNEL

pytestmark = needs_kernels()


def logits_of(rows: int, size: int, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator) * 5
    if kind == "coarse":
        logits = logits.round()
    if kind == "odd":
        for value in (math.nan, math.inf, -math.inf, -0.0, 0.0):
            logits[torch.rand(rows, size, generator=generator) < 0.1] = value
        logits[-1] = -math.inf
    if kind == "low":
        logits -= 1e4
    return logits


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 64, 100, 2048, 5000]),
    st.integers(1, 3),
    st.sampled_from(["wide", "coarse", "odd", "low"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0, 1, 7, 20]),
    st.integers(0, 99),
)
def test_the_numbers_are_those_of_the_operators(
    size: int, rows: int, kind: str, dtype: torch.dtype, count: int, seed: int
) -> None:
    from workers.sampling.triton.logprobs import read_rows

    logits = logits_of(rows, size, kind, seed).to(dtype)
    draw = torch.Generator().manual_seed(seed)
    tokens, listed = (torch.randint(size, shape, generator=draw) for shape in ((rows,), (rows, 3)))
    count = min(count, size // 64)
    expected = numbers_together(logits, tokens, count, listed)
    found = numbers_of_blocks(read_rows, logits.to(DEVICE), tokens.to(DEVICE), count, listed.to(DEVICE)).cpu()
    sums, expected_sums = found[:, 1].clone(), expected[:, 1].clone()
    found[:, 1] = expected[:, 1] = 0
    assert torch.equal(found, expected)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-14, atol=1e-13)


def test_a_row_has_the_same_bits_alone() -> None:
    from workers.sampling.triton.logprobs import read_rows

    logits, tokens = logits_of(4, 5000, "wide", 1).to(DEVICE), torch.tensor([0, 4999, 70, 3000], device=DEVICE)
    together = read_rows(logits, tokens, 64)
    for row in range(4):
        alone = read_rows(logits[row : row + 1], tokens[row : row + 1], 64)
        assert all(torch.equal(one, of[row : row + 1]) for one, of in zip(alone, together, strict=True))


def test_reported_log_probabilities_are_those_of_a_cpu_after_one_wait() -> None:
    logits = logits_of(3, 5000, "coarse", 2)
    tokens, counts, listed = [5, 4999, 0], [20, 0, 3], [[], [7, 7, 300], []]
    expected = token_logprobs(logits, tokens, counts, listed)
    there = logits.to(DEVICE)
    with OnGpu() as gpu:
        found = token_logprobs(there, tokens, counts, listed)
    assert gpu.waits == ["copies"]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token, ours.rank, [one for one, _ in ours.top]) == (
            theirs.token,
            theirs.rank,
            [one for one, _ in theirs.top],
        )
        assert [ours.logprob, *(one for _, one in ours.top)] == pytest.approx(
            [theirs.logprob, *(one for _, one in theirs.top)], abs=1e-12
        )


def test_a_request_for_log_probabilities_waits_for_no_compiler() -> None:
    assert any(one.logprobs for one in _EVERY_KERNEL)
