"""`--start`: a training of EAGLE-3 or DSpark goes on with a public draft."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.core.errors import ConfigurationError
from deploy.distillation import dspark, eagle3, single_process
from tests.support.models import tiny
from tests.support.models.computed_states import ComputedStates
from tests.unit.distill.training_folder import LAYERS, LENGTH, PROMPT, Folder
from workers.distill.answers import Answer
from workers.distill.eagle3.head import Eagle3Head
from workers.distill.modules import module_plan
from workers.distill.modules.tap_cache import TapCache, states_of
from workers.distill.target_model import load_target
from workers.model import kernel_handover
from workers.model.draft_card import DraftDescription
from workers.model.formats.speculators import write_eagle3
from workers.model.target_ends import read_config

REDUCED = ("--vocabulary-size", "48")
STILL = ("--learning-rate", "0")
"""Options with which a training leaves a draft as it is."""


def draft_of(folder: Folder) -> Path:
    return folder.path / "out"


def write_head(directory: Path, config: Any, taps: tuple[int, ...]) -> None:
    """Write a head that reads these hidden states of a target with this configuration, with random weights."""
    directory.mkdir()
    head = Eagle3Head(eagle3.shape_of(config, taps, is_normed=True), tiny.VOCABULARY)
    card = DraftDescription("tiny", tiny.VOCABULARY, 48, (), tiny.VOCABULARY, kind="eagle", taps=taps, shape=head.shape)
    every = torch.arange(tiny.VOCABULARY)
    write_eagle3(directory, card, head.weights(every), architectures=(), speculative_tokens=2)


@pytest.mark.slow
def test_a_draft_that_is_trained_further_begins_as_it_is_and_keeps_its_tokens(
    folders: Callable[[str], Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = folders("first")
    weights = first.train(*REDUCED)
    assert len(weights["d2t"]) == 48
    start = ("--start", str(draft_of(first)))

    still, further = (folders(name).train(*start, *more) for name, more in (("still", STILL), ("further", ())))

    assert still.keys() == weights.keys() == further.keys()
    for name, value in weights.items():
        assert torch.allclose(still[name].float(), value.float(), rtol=1e-2, atol=1e-6), name
    assert torch.equal(further["d2t"], weights["d2t"])
    assert any(not torch.equal(further[name], value) for name, value in weights.items())


@pytest.mark.slow
def test_a_drafter_keeps_its_own_head_of_all_tokens(
    directory: Path, answers: tuple[Answer, ...], tmp_path: Path
) -> None:
    first, second = (Folder("dspark", tmp_path / name, directory, answers) for name in ("first", "second"))
    weights = first.train()
    head = torch.randn(tiny.VOCABULARY, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file(weights | {"lm_head.weight": head}, draft_of(first) / "model.safetensors")

    found = second.train("--start", str(draft_of(first)), *STILL)

    assert found.keys() == weights.keys() | {"lm_head.weight"}
    assert torch.equal(found["lm_head.weight"], head)


@pytest.mark.slow
def test_a_changed_draft_begins_another_training(folders: Callable[[str], Folder]) -> None:
    first, second = folders("first"), folders("second")
    first.train()
    start = ("--start", str(draft_of(first)), *STILL)
    before = second.train(*start)
    file = draft_of(first) / "model.safetensors"
    save_file(
        {name: torch.ones_like(value) if name == "norm.weight" else value for name, value in before.items()}, file
    )

    after = second.train(*start)

    assert not second.has_told("this training has ended")
    assert bool((after["norm.weight"] == 1).all())
    second.train(*start)
    assert second.has_told("this training has ended")


@pytest.mark.slow
def test_a_draft_that_cannot_be_trained_further_is_refused(
    folders: Callable[[str], Folder], tmp_path: Path, answers: tuple[Answer, ...]
) -> None:
    first = folders("first")
    first.train()
    start = ("--start", str(draft_of(first)))
    other_kind = Folder("dspark" if first.kind == "eagle3" else "eagle3", tmp_path / "kind", first.target, answers)
    with pytest.raises(ConfigurationError, match=r"--start .*: a draft of kind \w+ is refused; it must be "):
        other_kind.train(*start)
    wide = tiny.save(tmp_path / "wide", tiny.llama(hidden_size=96, num_hidden_layers=6, tie_word_embeddings=True))
    with pytest.raises(ConfigurationError, match=r"--start .*: refused for this target; .* hidden size of 48 "):
        Folder(first.kind, tmp_path / "other", wide, answers).train(*start)
    low = tiny.save(tmp_path / "low", tiny.llama(num_hidden_layers=2, tie_word_embeddings=True))
    with pytest.raises(ConfigurationError, match=r"--start .*: its hidden states .* are refused; .* 2 at most"):
        Folder(first.kind, tmp_path / "short", low, answers).train(*start)
    own = tmp_path / "own"
    shutil.copytree(draft_of(first), own)
    tensors = load_file(own / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": torch.zeros(tiny.VOCABULARY, 48)}, own / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"--start .*: an embedding of its own is refused"):
        folders("embedding").train("--start", str(own))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--start-layers", "0,6"), r"--start-layers: \[0, 6\] is refused; it must have 2 numbers within 0 and 5"),
        (("--taps", "1,6"), r"--taps: \[1, 6\] is refused"),
        (("--kv-heads", "4"), "--kv-heads: 4 is refused; it must divide 6"),
        (("--mask-token", "1000"), "--mask-token: 1000 is refused; it must be within 0 and "),
    ],
)
def test_a_drafter_that_the_target_cannot_have_is_refused_before_texts_are_written(
    more: tuple[str, ...], message: str, directory: Path, tmp_path: Path
) -> None:
    folder = Folder("dspark", tmp_path / "folder", directory, ())
    with pytest.raises(ConfigurationError, match=message):
        dspark.Run(dspark.options(folder.words(*more)))


@pytest.mark.parametrize("make", [dspark, eagle3])
@pytest.mark.parametrize("lacks", ["intermediate_size", "max_position_embeddings"])
def test_a_target_of_another_family_is_refused_before_texts_are_written(
    make: ModuleType, lacks: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new draft has layers of the target's sizes, some of which other families do not have."""
    config = {name: value for name, value in read_config(directory).to_dict().items() if name != lacks}
    monkeypatch.setattr(single_process, "read_config", lambda _: SimpleNamespace(**config))
    words = Folder(make.Run.command, tmp_path / "folder", directory, ()).words()

    with pytest.raises(ConfigurationError, match=f"model type 'llama': its layers are unlike Llama's: .*{lacks}"):
        make.Run(make.options(words))


def test_a_draft_that_the_training_would_replace_is_refused(directory: Path, tmp_path: Path) -> None:
    """A training is found again by the files of the draft that it began with, so these must not be replaced."""
    folder = Folder("dspark", tmp_path / "folder", directory, ())
    (folder.path / "link").symlink_to("out")
    with pytest.raises(ConfigurationError, match=r"--start .*: refused as --out, which the training replaces"):
        dspark.Run(dspark.options(folder.words("--start", str(folder.path / "link"))))


@pytest.mark.slow
@pytest.mark.parametrize("is_native", [True, False], ids=["native kernels", "plain"])
def test_a_head_may_read_the_state_after_the_last_layer(
    is_native: bool, tmp_path: Path, answers: tuple[Answer, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training has this state as one that the head reads, and as the one of which the target's logits are made."""
    directory = tiny.save(tmp_path / "target", tiny.llama(num_hidden_layers=LAYERS, tie_word_embeddings=True))
    target = load_target(directory, torch.device("cpu"))
    taps = (1, LAYERS)
    write_head(tmp_path / "start", target.config, taps)
    used: list[bool] = []
    load = kernel_handover.try_native_kernels

    def kernels(*given: Any) -> Any:
        found = load(*given) if is_native else None
        used.append(found is not None)
        return found

    monkeypatch.setattr("workers.model.loading.try_native_kernels", kernels)
    folder = Folder("eagle3", tmp_path / "folder", directory, answers[:4])

    folder.train("--start", str(tmp_path / "start"), "--precision", "float32", "--long-share", "0")

    assert used == [is_native]
    (states,) = folder.path.glob("states*")
    stored = TapCache(states_of(directory, states), (*taps, LAYERS), 48, 2 * (PROMPT + LENGTH))
    for answer in answers[:4]:
        first, last = ComputedStates(target, (1,)).of(answer).chunk(2, dim=-1)
        expected = torch.cat([first, last, last], dim=-1)
        torch.testing.assert_close(stored.of(answer).float(), expected, rtol=2**-7, atol=2e-3)


@pytest.mark.slow
def test_a_head_goes_on_for_a_target_whose_layers_a_new_one_could_not_have(
    directory: Path, tmp_path: Path, answers: tuple[Answer, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of a mixture of experts has no size of a dense layer."""
    write_head(tmp_path / "start", read_config(directory), (1, 2))

    def refuse(*_: object) -> None:
        raise ConfigurationError("its layers are unlike Llama's")

    monkeypatch.setattr(module_plan, "layer_shape", refuse)

    folder = Folder("eagle3", tmp_path / "folder", directory, answers[:4])
    weights = folder.train("--start", str(tmp_path / "start"), "--precision", "float32", "--long-share", "0")

    assert "lm_head.weight" in weights
