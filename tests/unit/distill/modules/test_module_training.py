"""Every kind of drafting module learns from the target's answers and hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.errors import ConfigurationError
from tests.support.models import drafting_modules
from workers.distill.answers import Answer
from workers.distill.checkpoints import Progress
from workers.distill.loop import TrainingPlan
from workers.distill.modules.batches import tap_batch
from workers.distill.modules.exit_search import search_exit
from workers.distill.modules.learner import ModulePlan, ModuleTraining, TappedModule, measure
from workers.distill.modules.module_pipeline import count_successors
from workers.distill.modules.module_plan import module_training_plan
from workers.distill.modules.paths import predict
from workers.distill.modules.start import copy_layers, fit_context
from workers.distill.modules.tap_cache import TapCache, taps_of
from workers.distill.options import DistillOptions
from workers.model.draft_shapes import BlockShape, EagleShape, LayerShape, TableShape
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import DraftingModule, load_ends, make_module
from workers.model.drafting.table import SuccessorTable

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TAPS = {"heads": (3,), "block": (1, 2, 3), "eagle": (1, 3), "exit": (1,)}
MakeCache = Callable[[tuple[int, ...]], TapCache]


@pytest.fixture
def ends(target_directory: Path) -> TargetEnds:
    card = drafting_modules.card_for(target_directory, "heads", (3,))
    return load_ends(target_directory, card, None, torch.float32, CPU)


def module_of(ends: TargetEnds, kind: str) -> DraftingModule:
    torch.manual_seed(0)
    return make_module(ends, drafting_modules.shapes(48)[kind], TAPS[kind])


def plan(**changes: object) -> TrainingPlan:
    values: dict[str, object] = {"steps": 40, "batch_tokens": 120, "precision": "float32", "learning_rate": 5e-3}
    return TrainingPlan(**(values | changes))  # type: ignore[arg-type]


def train(
    module: DraftingModule,
    ends: TargetEnds,
    cache: TapCache,
    answers: tuple[Answer, ...],
    work: Path,
    module_plan: ModulePlan,
) -> Progress:
    training = ModuleTraining(
        TappedModule(module, ends, cache), answers[:18], answers[18:], module_plan, work / "checkpoint.safetensors"
    )
    return training.run(lambda progress, done: None)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("kind", ["heads", "block", "eagle"])
def test_the_loss_falls_and_the_accepted_length_rises(
    ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...], tmp_path: Path, kind: str, optimizer: str
) -> None:
    module, cache = module_of(ends, kind), tap_cache_of(TAPS[kind])
    before = measure(TappedModule(module, ends, cache), answers[:18], 64, 3, autocast=False)
    rate = 2e-2 if optimizer == "muon" else 5e-3
    module_plan = ModulePlan(plan(learning_rate=rate), paths=0, optimizer=optimizer)

    progress = train(module, ends, cache, answers, tmp_path, module_plan)

    after = measure(TappedModule(module, ends, cache), answers[:18], 64, 3, autocast=False)
    assert progress.losses[-1][2] < 0.8 * progress.losses[0][2]
    assert after.tokens_per_step > before.tokens_per_step + 0.02
    assert len(progress.agreements) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exit_norm_learns_to_agree_with_the_target(
    ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...], tmp_path: Path, dtype: torch.dtype
) -> None:
    """The weights of an early exit are in float32 beside ends of any type: bfloat16 rounds small steps away."""
    ends = ends.to(dtype)
    module = module_of(ends, "exit")
    assert {value.dtype for value in module.parameters()} == {torch.float32}

    progress = train(module, ends, tap_cache_of((1,)), answers, tmp_path, ModulePlan(plan(), paths=0))

    assert progress.losses[-1][2] < progress.losses[0][2]


@pytest.mark.parametrize("kind", ["heads", "block", "eagle"])
def test_an_interruption_changes_no_weight(
    ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...], tmp_path: Path, kind: str
) -> None:
    cache, short = tap_cache_of(TAPS[kind]), plan(steps=8, checkpoint_seconds=0)
    whole, parts, resumed = (module_of(ends, kind) for _ in range(3))
    module_plan = ModulePlan(short, paths=12)
    train(whole, ends, cache, answers, tmp_path / "whole", module_plan)
    interrupted = ModuleTraining(
        TappedModule(parts, ends, cache), answers[:18], (), module_plan, tmp_path / "parts" / "checkpoint.safetensors"
    )

    with pytest.raises(KeyboardInterrupt):
        interrupted.run(lambda progress, done: _stop_at(progress, 5))
    progress = train(resumed, ends, cache, answers, tmp_path / "parts", module_plan)

    assert progress.step == 8
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adamw"}, {"taps": (2,)}, {"training": plan(steps=2, rejection_weight=2.0)}]
)
def test_a_checkpoint_of_another_optimizer_or_of_other_hidden_states_is_refused(
    ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...], tmp_path: Path, changes: dict[str, Any]
) -> None:
    cache, begun = tap_cache_of((3,)), ModulePlan(plan(steps=2), (3,), paths=12)
    train(module_of(ends, "heads"), ends, cache, answers, tmp_path, begun)

    with pytest.raises(ConfigurationError, match="with other settings, or an earlier version wrote it"):
        train(module_of(ends, "heads"), ends, cache, answers, tmp_path, replace(begun, **changes))


def test_a_training_continues_with_another_loss(
    ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...], tmp_path: Path
) -> None:
    cache, begun = tap_cache_of((3,)), ModulePlan(plan(steps=2), (3,), paths=12)
    first = train(module_of(ends, "heads"), ends, cache, answers, tmp_path, begun)

    changed = replace(begun, training=plan(steps=3), decay=0.5, paths=24, measured_depths=2, layer_scale=0.5)
    progress = train(module_of(ends, "heads"), ends, cache, answers, tmp_path, changed)

    assert (first.step, progress.step) == (2, 3)
    assert progress.agreements[:1] == first.agreements[:1]


def test_the_plan_of_a_training_has_its_hidden_states_and_the_weights_of_its_loss() -> None:
    given = {"rejection_weight": 2.0, "overlap_weight": 0.5}
    found = module_training_plan(DistillOptions(kind="heads", plan=True, steps=1, taps=(3,), **given))
    assert (found.taps, found.training.rejection_weight, found.training.overlap_weight) == ((3,), 2.0, 0.5)


class TestPaths:
    @pytest.mark.parametrize("kind", ["heads", "block", "eagle"])
    def test_a_path_depends_on_nothing_that_serving_does_not_know(
        self, ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...], kind: str
    ) -> None:
        """Tokens from position n on and hidden states from n - 1 on change no prediction of depth 0 at n."""
        module = module_of(ends, kind)
        drafting_modules.randomized(module)
        batch = tap_batch(answers[:2], tap_cache_of(TAPS[kind]), ends, 64)
        paths = predict(module, ends, batch)
        n = 9
        batch.tokens[:, n:] = 4
        batch.taps[:, n - 1 :] = 7.0

        changed = predict(module, ends, batch)

        known = paths.starts <= n
        torch.testing.assert_close(changed.hidden[known, 0], paths.hidden[known, 0])
        assert not torch.allclose(changed.hidden[~known, 0], paths.hidden[~known, 0])

    @pytest.mark.parametrize("kind", ["heads", "block"])
    def test_deeper_predictions_do_not_see_the_tokens_between(
        self, ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...], kind: str
    ) -> None:
        module = module_of(ends, kind)
        drafting_modules.randomized(module)
        batch = tap_batch(answers[:2], tap_cache_of(TAPS[kind]), ends, 64)
        paths = predict(module, ends, batch)
        batch.tokens[:, 9:] = 4
        batch.taps[:, 8:] = 7.0

        changed = predict(module, ends, batch)

        known = paths.starts <= 9
        torch.testing.assert_close(changed.hidden[known], paths.hidden[known])

    def test_paths_begin_at_the_second_token_of_an_answer(
        self, ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...]
    ) -> None:
        batch = tap_batch(answers[:1], tap_cache_of((3,)), ends, 64)

        assert predict(module_of(ends, "heads"), ends, batch).starts.tolist() == list(range(6, 19))


class TestStart:
    def test_an_eagle_head_with_all_layers_of_a_draft_starts_as_this_draft(
        self, target: torch.nn.Module, ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...]
    ) -> None:
        """The draft here is the target itself, which reads the text without its first token."""
        tokens = torch.tensor([answer.prompt + answer.answer for answer in answers])
        with torch.inference_mode():
            best = target(input_ids=tokens[:, 1:]).logits.argmax(-1)
        expected = int((best[:, 4:-1] == tokens[:, 6:]).sum())
        layer = LayerShape(48, 6, 3, 8, 80, 10000.0, 1e-6, 64)
        eagle = EagleHead(ends, EagleShape(layer, 3), 1)

        copy_layers(eagle, target.state_dict(), (0, 1, 2))

        found = measure(TappedModule(eagle, ends, tap_cache_of((3,))), answers, 64, 2, autocast=False)
        assert found.reached[0] == expected > 0

    def test_a_fitted_block_drafter_predicts_the_first_token_like_the_draft(
        self, target: torch.nn.Module, ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...]
    ) -> None:
        layer = LayerShape(48, 6, 3, 8, 80, 10000.0, 1e-6, 64)
        block, cache = BlockDrafter(ends, BlockShape(layer, 2, 3, 0), 4), tap_cache_of((0, 1, 2, 3))
        copy_layers(block, target.state_dict(), (0, 1, 2))
        before = measure(TappedModule(block, ends, cache), answers, 64, 2, autocast=False)

        fit_context(block, ends, [tap_batch(answers, cache, ends, 64)])

        after = measure(TappedModule(block, ends, cache), answers, 64, 2, autocast=False)
        assert after.reached[0] > 0.6 * after.paths > before.reached[0]

    def test_a_prompt_that_fills_the_whole_length_is_context_alone(
        self, ends: TargetEnds, tap_cache_of: MakeCache, answers: tuple[Answer, ...]
    ) -> None:
        """Stored hidden states may be of longer texts than a training has."""
        cache = tap_cache_of((1, 2, 3))

        batch = tap_batch(answers[:2], cache, ends, 4)

        assert batch.tokens.tolist() == [list(answer.prompt[:4]) for answer in answers[:2]]
        assert not bool(batch.drafted.any()) and bool((batch.leading == -1).all())
        block = module_of(ends, "block")
        assert isinstance(block, BlockDrafter)
        fit_context(block, ends, [batch])

    def test_layers_of_another_shape_are_refused(self, target: torch.nn.Module, ends: TargetEnds) -> None:
        layer = LayerShape(48, 6, 3, 8, 64)
        eagle = EagleHead(ends, EagleShape(layer, 1), 1)

        with pytest.raises(ConfigurationError, match=r"layers: .*no layers.0.gate_proj.weight of shape \[64, 48\]"):
            copy_layers(eagle, target.state_dict(), (0,))
        with pytest.raises(ConfigurationError, match=r"layers: \[0, 1\] are refused; the module has 1 layers"):
            copy_layers(eagle, target.state_dict(), (0, 1))


class TestTapCache:
    def test_stored_states_are_those_of_the_target(
        self, target: torch.nn.Module, tap_cache_of: MakeCache, answers: tuple[Answer, ...]
    ) -> None:
        tokens = torch.tensor([answers[3].prompt + answers[3].answer])
        with torch.inference_mode():
            expected = target(input_ids=tokens, output_hidden_states=True).hidden_states

        states = tap_cache_of((0, 2)).of(answers[3]).float()

        torch.testing.assert_close(states[:, :48], expected[0][0], atol=0.05, rtol=0.02)
        torch.testing.assert_close(states[:, 48:], expected[2][0], atol=0.05, rtol=0.02)

    def test_missing_answers_are_added_and_an_interrupted_write_is_repaired(
        self, target: torch.nn.Module, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        TapCache(tmp_path, (1,), 48, 64).fill(partial(taps_of, target), answers[:2], lambda done, wanted: None)
        with (tmp_path / "taps-1.bfloat16").open("ab") as rows:
            rows.write(b"cut off")
        reported: list[tuple[int, int]] = []

        cache = TapCache(tmp_path, (1,), 48, 64)
        cache.fill(partial(taps_of, target), answers[:4], lambda done, wanted: reported.append((done, wanted)))

        assert reported[-1] == (38, 38)  # two answers of 19 tokens
        fresh = TapCache(tmp_path / "fresh", (1,), 48, 64)
        fresh.fill(partial(taps_of, target), answers[:4], lambda done, wanted: None)
        for answer in answers[:4]:
            torch.testing.assert_close(cache.of(answer), fresh.of(answer))
        assert not cache.has(answers[5])

    def test_an_answer_that_changed_is_stored_again_and_damages_no_other(
        self, target: torch.nn.Module, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        changed = replace(answers[0], answer=answers[1].answer)
        for few in (answers[:2], (changed,), answers[2:3]):
            TapCache(tmp_path, (1,), 48, 64).fill(partial(taps_of, target), few, lambda done, wanted: None)

        cache = TapCache(tmp_path, (1,), 48, 64)

        assert cache.has(changed)
        assert not cache.has(answers[0])
        fresh = TapCache(tmp_path / "fresh", (1,), 48, 64)
        fresh.fill(partial(taps_of, target), (changed, *answers[1:3]), lambda done, wanted: None)
        for answer in (changed, *answers[1:3]):
            torch.testing.assert_close(cache.of(answer), fresh.of(answer))

    def test_no_state_is_computed_after_the_time(
        self, target: torch.nn.Module, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        cache = TapCache(tmp_path, (1,), 48, 64)

        cache.fill(partial(taps_of, target), answers, lambda done, wanted: None, ends=0.0)

        assert not any(cache.has(answer) for answer in answers)


def test_a_table_has_the_tokens_that_the_target_ranks_highest(answers: tuple[Answer, ...]) -> None:
    table = SuccessorTable(TableShape(3), 96)

    known = count_successors(table, answers[:1])

    first = answers[0]
    assert first.leading is not None
    assert known == len({first.prompt[-1], *first.answer[:-1]})
    if first.prompt[-1] not in first.answer[:-1]:
        assert table.successors[first.prompt[-1]].tolist() == first.leading.tokens[0, :3].tolist()


def test_the_share_of_a_search_for_layers_ascends_to_all(target: torch.nn.Module, answers: tuple[Answer, ...]) -> None:
    shares: list[float] = []

    found = search_exit(target, answers[:2], 64, lambda share, _: shares.append(share))

    assert shares == sorted(set(shares)) and shares[-1] == 1
    assert len(shares) == len(found)


def _stop_at(progress: Progress, step: int) -> None:
    if progress.step == step:
        raise KeyboardInterrupt


def test_a_search_for_layers_leaves_out_prompts_that_fill_the_whole_length(
    target: torch.nn.Module, answers: tuple[Answer, ...]
) -> None:
    """Prompts that fill the whole length leave no position to compare."""
    long = [replace(answer, prompt=answer.prompt * 3) for answer in answers]

    found = search_exit(target, [*long, answers[0]], 2 * len(answers[0].prompt), lambda *_: None)

    assert found == search_exit(target, answers[:1], 2 * len(answers[0].prompt), lambda *_: None)
    with pytest.raises(ConfigurationError, match="--search: needed a held-out answer within --max-length, 10"):
        search_exit(target, long, 10, lambda *_: None)
