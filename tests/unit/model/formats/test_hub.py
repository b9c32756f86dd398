"""What is fetched of a repository of a model hub: all files that change what a draft computes, and weights once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deploy.models import resolve_models, with_module_directories
from deploy.settings import load_settings
from deploy.speculative_config import from_speculative_config
from tests.support.models import public_drafts, tiny
from workers.model.draft_card import EARLIER_CARD
from workers.model.formats.hub import draft_description, draft_directory
from workers.model.formats.registry import find_format, read_draft
from workers.model.model_files import resolve_model_directory
from workers.model.public_shapes import MaskedBlockShape


@pytest.fixture
def asked() -> list[str | None]:
    """The revisions that the hub was asked for, in the order of the calls."""
    return []


@pytest.fixture
def repository(asked: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The files of the only repository of a hub."""
    stored, fetched = tmp_path / "stored", tmp_path / "fetched"
    stored.mkdir()
    fetched.mkdir()

    def fits(file: Path, patterns: Sequence[str]) -> bool:
        return any(fnmatch(str(file.relative_to(stored)), pattern) for pattern in patterns)

    def snapshot_download(
        _: str,
        *,
        revision: str | None,
        allow_patterns: Sequence[str],
        ignore_patterns: Sequence[str],
        tqdm_class: Callable[..., Any],
    ) -> str:
        asked.append(revision)
        files = [one for one in stored.rglob("*") if one.is_file()]
        chosen = [one for one in files if fits(one, allow_patterns) and not fits(one, ignore_patterns)]
        with (
            tqdm_class(total=len(chosen), unit="it", desc="Fetching files") as counted,
            tqdm_class(total=0, unit="B", unit_scale=True, desc="Reconstructing") as written,
        ):
            written.total = sum(file.stat().st_size for file in chosen)
            for file in chosen:
                (fetched / file.relative_to(stored)).parent.mkdir(exist_ok=True)
                shutil.copy(file, fetched / file.relative_to(stored))
                written.update(file.stat().st_size)
                counted.update(1)
            written.refresh()
        return str(fetched)

    class Hub:
        def list_repo_files(self, _: str, *, revision: str | None) -> list[str]:
            asked.append(revision)
            return sorted(str(file.relative_to(stored)) for file in stored.rglob("*") if file.is_file())

        def parse_safetensors_file_metadata(self, _: str, name: str, *, revision: str | None) -> Any:
            asked.append(revision)
            with safe_open(stored / name, framework="pt") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
            return SimpleNamespace(tensors={key: SimpleNamespace(shape=shape) for key, shape in shapes.items()})

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    return stored


def names(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def with_second_forms(repository: Path) -> None:
    """Weights under the names of another library and in a folder, with tensors that no model here has."""
    (repository / "original").mkdir()
    for name in ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"):
        save_file({"tok_embeddings.weight": torch.zeros(4)}, repository / name)


def test_weights_that_a_model_has_a_second_time_are_not_fetched(repository: Path, tmp_path: Path) -> None:
    tiny.save(repository, tiny.llama())
    with_second_forms(repository)

    found = names(resolve_model_directory("owner/name", tmp_path / "cache"))

    assert found == {"config.json", "generation_config.json", "model.safetensors"}


def test_weights_that_a_draft_has_a_second_time_are_neither_fetched_nor_counted(repository: Path) -> None:
    public_drafts.write(repository, public_drafts.DFLASH, public_drafts.block())
    with_second_forms(repository)

    _, sizes = draft_description("owner/name")

    assert sizes is not None and "tok_embeddings.weight" not in sizes
    assert names(draft_directory("owner/name")) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("weights", "beside"), [("model.safetensors", ("pytorch_model.bin",)), ("pytorch_model.bin", ())]
)
def test_a_block_drafter_with_a_mask_embedding(weights: str, beside: Sequence[str], repository: Path) -> None:
    public_drafts.write(repository, public_drafts.DFLASH, public_drafts.block(), weights)
    other: dict[str, Any] = {"embedding": torch.zeros(public_drafts.HIDDEN), "mask_token_id": public_drafts.MASK}
    torch.save(other, repository / "mask_embedding.pt")
    for name in (*beside, "training_state.pt"):
        torch.save({}, repository / name)

    directory = draft_directory("owner/name")

    assert names(directory) == {"config.json", weights, "mask_embedding.pt"}
    shape = read_draft(directory).shape
    assert isinstance(shape, MaskedBlockShape) and shape.has_mask_embedding


@pytest.mark.parametrize(
    ("config", "weights", "kind"),
    [
        (public_drafts.DFLASH, public_drafts.block, "block"),
        (public_drafts.LLAMA, public_drafts.eagle1, "eagle"),
        ({"medusa_num_heads": 3}, public_drafts.medusa, "heads"),
    ],
)
def test_the_format_is_known_before_any_weights_are_fetched(
    config: dict[str, Any], weights: Callable[[], dict[str, torch.Tensor]], kind: str, repository: Path
) -> None:
    public_drafts.write(repository, config, weights())

    directory, sizes = draft_description("owner/name")

    assert names(directory) == {"config.json"}
    found = find_format(directory, sizes)
    assert found is not None and found[0].kind(found[1]) == kind
    assert load_settings("cpu", ["draft.path=owner/name"], {}).configuration.draft.name == kind
    assert names(directory) == {"config.json"}
    assert names(draft_directory("owner/name")) == {"config.json", "model.safetensors"}


def test_weights_of_torch_tell_the_format_once_they_are_fetched(repository: Path) -> None:
    public_drafts.write(repository, public_drafts.LLAMA, public_drafts.eagle1(), "pytorch_model.bin")

    directory, sizes = draft_description("owner/name")

    assert (names(directory), sizes) == ({"config.json", "pytorch_model.bin"}, None)


def test_what_an_earlier_version_distilled_is_fetched_with_its_card(repository: Path) -> None:
    public_drafts.write(repository, public_drafts.DFLASH, public_drafts.block())
    (repository / EARLIER_CARD).write_text("{}")

    assert names(draft_directory("owner/name")) == {"config.json", EARLIER_CARD, "model.safetensors"}


@pytest.mark.parametrize("revision", [None, "v2"])
@pytest.mark.parametrize("prefix", ["draft", "draft.block"])
@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_the_revision_of_a_draft_is_that_of_every_call(
    revision: str | None, prefix: str, weights: str, repository: Path, asked: list[str | None]
) -> None:
    public_drafts.write(repository, public_drafts.DFLASH, public_drafts.block(), weights)
    settings = [f"{prefix}.path=owner/name", *([] if revision is None else [f"{prefix}.revision={revision}"])]
    settings += [] if prefix == "draft" else ["draft.method=block"]

    draft = load_settings("cpu", settings, {}).configuration.draft
    with_module_directories(draft)

    assert len(asked) >= 1 and set(asked) == {revision}


def test_the_revision_of_a_model_is_that_of_every_call(
    repository: Path, asked: list[str | None], tmp_path: Path
) -> None:
    tiny.save(repository, tiny.llama())
    given = json.dumps({"model": "owner/name", "revision": "v2", "num_speculative_tokens": 3})
    settings = load_settings(
        "cpu", ["target.path=owner/name", "target.revision=v2"], {}, below=from_speculative_config(given)
    )

    resolve_models(settings.configuration, tmp_path / "cache", lambda _: None)

    assert len(asked) >= 3 and set(asked) == {"v2"}


def test_the_share_that_is_fetched_is_reported_and_no_bar_is_shown(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public_drafts.write(repository, public_drafts.DFLASH, public_drafts.block())
    told: list[str] = []

    draft_directory("owner/name", report=told.append)

    assert told and told[-1] == "fetching owner/name: 0.00 of 0.00 GB"  # a tiny one
    assert capsys.readouterr().err == ""
