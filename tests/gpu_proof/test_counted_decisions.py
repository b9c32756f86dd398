"""Decisions on a fake device: the code of a GPU runs, its launches are counted, and the host waits once a step."""

from __future__ import annotations

import copy

import pytest
import torch

from deploy.simulation.device.decisions import ALL_GATHER, GATHER
from deploy.simulation.device.fake_device import KernelCounter, fake_device
from deploy.simulation.device.models import MODELS, RankModel
from deploy.simulation.device.prediction import predict
from deploy.simulation.device.step import Rows, StepCount, count_step
from workers.sampling import winners

pytestmark = pytest.mark.slow

LAYERS = 2
WHOLE, RANK = RankModel("Llama-3.1-8B"), RankModel("Llama-3.3-70B", ranks=8)
ROW = 128256 * 2
"""Bytes of the logits of a row."""
SLOT = 2 * 8 * 128 * 2
"""Bytes of a token's key and value in a layer."""


@pytest.fixture(autouse=True)
def _few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (WHOLE.name, RANK.name):
        config = copy.deepcopy(MODELS[name])
        config.num_hidden_layers = LAYERS
        monkeypatch.setitem(MODELS, name, config)


def names(step: StepCount) -> list[str]:
    return [kernel.name for kernel in step.decisions]


def count_of(step: StepCount, name: str) -> int:
    return names(step).count(name)


def test_a_list_of_numbers_on_the_device_is_one_copy_to_the_host() -> None:
    with fake_device() as device, KernelCounter() as counter:
        assert torch.empty((2, 3), dtype=torch.int64, device=device).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (counter.waits, counter.copies) == (1, 0)


@pytest.mark.parametrize("rows", [
    (Rows(1, 300),), (Rows(8, 300, top_p=True),), (Rows(8, 300, has_penalty=True),), (Rows(4, 300, nodes=7),),
    (Rows(4, 300, nodes=7, top_p=True, branches=True),), (Rows(1, 0, fresh=600),),
    (Rows(3, 300, top_p=True), Rows(2, 300), Rows(1, 64, fresh=400)),
], ids=["decode", "top-p", "penalties", "verify", "trees with top-p", "prompt", "mixed"])  # fmt: skip
def test_the_host_waits_once_in_a_step(rows: tuple[Rows, ...]) -> None:
    step = count_step(WHOLE, rows)
    assert step.waits == 1
    assert step.beside == 0
    assert count_of(step, "best_of_tiles") == count_of(step, "join_tiles") == 1


def test_a_wait_among_the_decisions_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    truncations = winners._truncations

    def waiting(*arguments: object) -> object:
        found = truncations(*arguments)  # type: ignore[arg-type]
        found[1].sum().item()
        return found

    monkeypatch.setattr(winners, "_truncations", waiting)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        count_step(WHOLE, (Rows(2, 300, top_p=True),))


def test_a_second_list_of_numbers_is_a_second_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    truncations = winners._truncations

    def waiting(*arguments: object) -> object:
        found = truncations(*arguments)  # type: ignore[arg-type]
        found[1].tolist()
        return found

    monkeypatch.setattr(winners, "_truncations", waiting)
    assert count_step(WHOLE, (Rows(2, 300, top_p=True),)).waits == 2


def test_rows_without_truncation_launch_two_kernels_and_what_fills_their_inputs() -> None:
    """The index of each row's truncation is filled, and tokens of rows without any score are marked."""
    step = count_step(WHOLE, (Rows(8, 300),))
    found = [name for name in names(step) if name not in ("full", "fill_", "eq", "masked_fill", "clone", "copy_")]
    assert [name for name in found if name != "masked_fill_"] == ["best_of_tiles", "join_tiles"]
    assert len(step.decisions) <= 6
    (read,) = (kernel.bytes for kernel in step.decisions if kernel.name == "best_of_tiles")
    assert 8 * ROW < read < 8.05 * ROW


def test_top_p_reads_its_rows_in_six_more_passes() -> None:
    step = count_step(WHOLE, (Rows(3, 300, top_p=True), Rows(5, 300)))
    assert [count_of(step, name) for name in ("largest_logits", "sum_digits", "choose_digits")] == [1, 5, 5]
    assert all(kernel.bytes == 3 * ROW for kernel in step.decisions if kernel.name == "sum_digits")
    assert "where" in names(step), "largest logits are found as integers"


def test_penalties_set_the_bits_of_their_tokens_in_masks_that_are_zero_before() -> None:
    step = count_step(WHOLE, (Rows(8, 300, has_penalty=True),))
    assert count_of(step, "exclude_entries") == 1
    (entries,) = (kernel.bytes for kernel in step.decisions if kernel.name == "exclude_entries")
    assert entries == 8 * 301 * 5 * 4
    plain = count_step(WHOLE, (Rows(8, 300),))
    assert len(step.decisions) == len(plain.decisions) + 2


def test_ranks_exchange_sums_by_digits_of_rows_with_top_p_and_winners_of_all_rows() -> None:
    """Each reads its own logits alone, in one more pass than one GPU: digits are smaller."""
    step = count_step(RANK, (Rows(3, 300, top_p=True), Rows(2, 300)))
    largest, digits, winners = 3 * 4, 3 * 256 * 8, 5 * 2 * 8
    exchanged = [kernel.bytes for kernel in step.decisions if kernel.name == ALL_GATHER]
    assert exchanged == [7 * own for own in (largest, *[digits] * 4, winners)]
    assert count_of(step, GATHER) == 0
    assert [kernel.bytes for kernel in step.decisions if kernel.name == "sum_digits"] == [3 * ROW // 8] * 6
    assert [kernel.bytes * 8 // ROW for kernel in step.decisions if kernel.name == "best_of_tiles"] == [5]
    assert {"amax", "amin", "masked_fill"} <= set(names(step)), "winners of all ranks are merged on each"
    assert step.waits == 1
    assert len(step.all_reduces) == 2 * LAYERS
    alone = count_step(RANK, (Rows(5, 300),))
    assert alone.waits == 1
    assert predict(step).sampling_seconds > predict(alone).sampling_seconds


def test_a_chain_that_is_accepted_stays_where_it_is() -> None:
    assert count_step(WHOLE, (Rows(4, 300, nodes=7),)).moves == ()


@pytest.mark.parametrize("rows", [1, 8])
def test_accepted_nodes_of_all_rows_and_layers_are_moved_by_one_launch(rows: int) -> None:
    step = count_step(WHOLE, (Rows(rows, 300, nodes=7, branches=True),))
    listed = 8 * (1 + rows + 2 * 6 * rows)
    assert [(one.name, one.bytes) for one in step.moves] == [("copy_entries", 2 * rows * 6 * LAYERS * SLOT + listed)]
    chain = count_step(WHOLE, (Rows(rows, 300, nodes=7),))
    assert predict(step).seconds > predict(chain).seconds


def test_moves_of_keys_and_values_in_8_bits_are_counted_in_their_own_type() -> None:
    step = count_step(RankModel(WHOLE.name, kv_dtype="int8"), (Rows(2, 300, nodes=7, branches=True),))
    listed = 8 * (1 + 2 + 2 * 6 * 2)
    assert [kernel.bytes - listed for kernel in step.moves] == [2 * 2 * 6 * LAYERS * 2 * 8 * (128 + 4)]
