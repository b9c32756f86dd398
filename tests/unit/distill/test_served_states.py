"""The hidden states of texts that a serving target shows are those that a model of `transformers` computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import EvidenceSection, KvSection
from cluster.core.errors import ConfigurationError, TargetUnavailable
from deploy.distillation import rank_writer
from tests.support.engines.engine_port import EngineTarget
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_group import RankGroup, rank_group
from tests.support.models import tiny
from tests.unit.distill.training_folder import LAYERS
from workers.distill.modules.tap_cache import taps_of
from workers.distill.served_states import served_states
from workers.distill.target_model import load_target
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine

TAPS = (1, 4, LAYERS)
WIDTH = len(TAPS) * 48
LENGTHS = (9, 40, 1, 23)
ROWS = [[(7 * place + 11 * row) % 90 + 3 for place in range(length)] for row, length in enumerate(LENGTHS)]
STEP_TOKENS = 16

Make = Callable[..., EngineTarget]


@pytest.fixture(scope="module")
def serving(directory: Path) -> Make:
    """Makes a target that shows hidden states, with so many blocks of four tokens, which crashes in some steps."""
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    shown = EvidenceSection(taps=TAPS, is_sent=True)

    def make(blocks: int = 40, crashes: Sequence[int] = (), evidence: EvidenceSection = shown) -> EngineTarget:
        pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=blocks)
        return EngineTarget(TargetEngine(model, pool, LocalDecider(), EngineOptions(evidence=evidence)), crashes)

    return make


def assert_equal_in_bfloat16(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [len(one) for one in found] == list(LENGTHS)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype is torch.bfloat16
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-7, atol=2e-3)


async def test_states_of_texts_in_chunks_are_those_of_the_model(serving: Make, target: PreTrainedModel) -> None:
    shown = serving()

    found = await served_states(shown, ROWS, WIDTH, STEP_TOKENS)

    assert_equal_in_bfloat16(found, taps_of(target, ROWS, TAPS))
    assert shown.steps >= sum(LENGTHS) / STEP_TOKENS
    assert shown.is_empty


async def test_more_texts_than_tokens_of_a_step_are_read(serving: Make, target: PreTrainedModel) -> None:
    assert_equal_in_bfloat16(await served_states(serving(), ROWS, WIDTH, 2), taps_of(target, ROWS, TAPS))


async def test_texts_without_room_together_are_read_one_after_another(serving: Make, target: PreTrainedModel) -> None:
    """The pool has room for the longest text alone."""
    shown = serving(blocks=10)

    found = await served_states(shown, ROWS, WIDTH, STEP_TOKENS)

    assert_equal_in_bfloat16(found, taps_of(target, ROWS, TAPS))
    assert shown.fewest_free <= 1 and shown.is_empty


async def test_a_text_that_the_target_cannot_read_is_refused(serving: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"target\.kv: no room for a text of 40 tokens"):
        await served_states(serving(blocks=9), ROWS, WIDTH, STEP_TOKENS)
    with pytest.raises(ConfigurationError, match="token 96 must be below the vocabulary size 96"):
        await served_states(serving(), [[5, 96]], WIDTH, STEP_TOKENS)


@pytest.mark.parametrize("evidence", [EvidenceSection(), EvidenceSection(taps=(1,), is_sent=True)])
async def test_a_target_that_shows_other_states_is_refused(serving: Make, evidence: EvidenceSection) -> None:
    with pytest.raises(ConfigurationError, match=r"target\.evidence: needed the hidden states of 9 tokens of 144"):
        await served_states(serving(evidence=evidence), ROWS[:1], WIDTH, STEP_TOKENS)


@dataclass
class Serving:
    """Ranks that are there again at once. They are `TargetRanks`."""

    target: EngineTarget
    starts: int = 0

    async def serving(self) -> None:
        self.starts += 1


async def test_texts_whose_target_is_lost_are_read_again(
    serving: Make, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_writer, "_PAUSES", (0.0,) * 3)
    told: list[str] = []
    once, ever = (Serving(serving(crashes=crashes)) for crashes in ((3,), range(100)))
    whole, none = (
        rank_writer._States(one, WIDTH, STEP_TOKENS, told.append)  # type: ignore[arg-type]
        for one in (once, ever)
    )

    assert_equal_in_bfloat16(await whole.of(ROWS), taps_of(target, ROWS, TAPS))

    assert once.starts == 2 and told == ["hidden states: the target restarts; 4 texts are read again"]
    assert once.target.is_empty
    with pytest.raises(TargetUnavailable, match="the target was lost 3 times in a row"):
        await none.of(ROWS)


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with rank_group(2) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("native", ["auto", "off"])
async def test_several_ranks_show_the_states_of_one(native: str, group: RankGroup, tmp_path: Path) -> None:
    config = tiny.llama(num_hidden_layers=LAYERS, num_key_value_heads=2, initializer_range=0.15)
    directory = tiny.save(tmp_path, config)
    section: dict[str, object] = {"path": str(directory), "device": "cpu", "tensor_parallel": 2}
    section |= {"compile": "off", "compile_directory": str(KEPT), "native": native}
    section |= {"kv": {"block_size": 4, "pool_bytes": 1 << 20}, "evidence": {"taps": TAPS, "is_sent": True}}

    shown = EngineTarget(group.form(load_configuration({"target": section})))  # type: ignore[arg-type]
    found = await served_states(shown, ROWS, WIDTH, STEP_TOKENS)

    assert_equal_in_bfloat16(found, taps_of(load_target(directory, torch.device("cpu")), ROWS, TAPS))
    assert shown.steps >= sum(LENGTHS) / STEP_TOKENS
