"""A target that starts from its packed weights computes the same bits, and no damaged or foreign file is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.core.config.target_section import TargetSection
from tests.support.engines.stored_model import TEXT, logits
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel
from workers.model.fingerprint import fingerprint
from workers.model.loading import load_model
from workers.model.packed_weights import store
from workers.model.packed_weights.decoder_regions import plain_angles
from workers.model.packed_weights.region_file import PARTIAL, read_regions, write_regions
from workers.model.packed_weights.store import keep_packed, packed_file, read_packed

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "tied": tiny.llama(tie_word_embeddings=True),
    "untied": tiny.llama(tie_word_embeddings=False),
    "biases": tiny.qwen2(),
    "head norms": tiny.qwen3(),
    "window": tiny.mistral(),
    "scaled rope": tiny.llama(
        rope_parameters=ROPE | {"rope_theta": 10000.0, "original_max_position_embeddings": 16},
    ),
}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the compiled kernels."""
    return tmp_path_factory.mktemp("code")


@pytest.fixture
def section(code: Path, tmp_path: Path) -> TargetSection:
    """A tiny target without packed weights."""
    shutil.rmtree(code / store.FOLDER, ignore_errors=True)
    return section_of(tiny.save(tmp_path / "model", tiny.llama()), code)


def section_of(directory: Path, code: Path, **settings: object) -> TargetSection:
    values = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(code)}
    return TargetSection.model_validate(values | settings)


def keep(section: TargetSection) -> LoadedModel:
    """Load the target with `transformers`, and wait until its packed weights are kept."""
    file = packed_file(section)
    model = load_model(section, max_context_len=section.max_context_len)
    writer = None if file is None else keep_packed(section, file, model)
    if writer is not None:
        writer.join()
    return model


def read(section: TargetSection) -> LoadedModel | None:
    file = packed_file(section)
    return None if file is None else read_packed(section, file)


def files(section: TargetSection) -> list[Path]:
    return sorted(Path(section.compile_directory or "", store.FOLDER).glob("*"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_packed_weights_compute_the_same_bits(
    name: str, dtype: str, quantization: str, code: Path, tmp_path: Path
) -> None:
    section = section_of(tiny.save(tmp_path, MODELS[name]), code, dtype=dtype, quantization=quantization)
    assert read(section) is None
    model = keep(section)
    found = read(section)
    assert found is not None
    assert torch.equal(logits(found, TEXT), logits(model, TEXT))
    for field in ("name", "layers", "hidden_size", "vocabulary_size", "max_context_len", "eos_token_ids", "dtype"):
        assert getattr(found, field) == getattr(model, field)
    assert fingerprint(section, found, None) == fingerprint(section, model, None)


def test_a_bound_of_the_context_has_a_file_of_its_own(section: TargetSection) -> None:
    keep(section)
    shorter = section.model_copy(update={"max_context_len": 24})
    assert read(shorter) is None
    keep(shorter)
    found = read(shorter)
    assert found is not None and found.max_context_len == 24


@pytest.mark.parametrize("place", [0, 9, 30, 100, -1, -5000])
def test_a_damaged_file_is_refused_and_written_again(
    place: int, section: TargetSection, caplog: pytest.LogCaptureFixture
) -> None:
    keep(section)
    (file,) = files(section)
    content = bytearray(file.read_bytes())
    content[place] ^= 64
    file.write_bytes(content)
    assert read(section) is None
    assert "refused" in caplog.text
    keep(section)
    assert read(section) is not None


@pytest.mark.parametrize("size", [0, 10, 60, 4000, -1])
def test_a_truncated_file_is_refused(size: int, section: TargetSection) -> None:
    keep(section)
    (file,) = files(section)
    file.write_bytes(file.read_bytes()[:size])
    assert read(section) is None


def test_a_file_of_another_model_is_refused(section: TargetSection, tmp_path: Path, code: Path) -> None:
    keep(section)
    (file,) = files(section)
    other = section_of(tiny.save(tmp_path / "other", tiny.llama(), seed=1), code)
    keep(other)
    (foreign,) = set(files(section)) - {file}
    shutil.copyfile(foreign, file)
    assert read(section) is None


def test_a_file_that_others_may_write_is_refused(section: TargetSection) -> None:
    keep(section)
    (file,) = files(section)
    file.chmod(0o666)
    assert read(section) is None


def test_a_link_is_refused(section: TargetSection, tmp_path: Path) -> None:
    keep(section)
    (file,) = files(section)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert read(section) is None


def test_changed_weights_are_packed_anew(section: TargetSection) -> None:
    keep(section)
    tiny.save(Path(section.path), tiny.llama(), seed=5)
    assert read(section) is None


def test_weights_that_are_edited_in_place_are_packed_anew(section: TargetSection) -> None:
    """The edit is in no sampled place, and the file gets its old time back."""
    keep(section)
    weights = Path(section.path, "model.safetensors")
    before = weights.stat()
    with weights.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x3c")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert read(section) is None


def test_other_kernels_or_other_code_pack_anew(section: TargetSection, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(section)
    with monkeypatch.context() as patch:
        patch.setattr(store, "kernel_identity", lambda _: "of another processor")
        assert read(section) is None
    with monkeypatch.context() as patch:
        patch.setattr(store, "code_digest", lambda: "of other code")
        assert read(section) is None
    assert read(section) is not None


def test_files_that_were_used_last_are_kept_within_the_bound(
    section: TargetSection, tmp_path: Path, code: Path
) -> None:
    sections = [
        section_of(tiny.save(tmp_path / str(seed), tiny.llama(), seed=seed), code, packed_bytes=0) for seed in range(3)
    ]
    keep(section)
    (file,) = files(section)
    bounded = [one.model_copy(update={"packed_bytes": 2 * file.stat().st_size + 4096}) for one in sections]
    file.unlink()
    for age, one in zip((300, 200), bounded, strict=False):
        before = set(files(section))
        keep(one)
        (new,) = set(files(section)) - before
        os.utime(new, (new.stat().st_mtime - age,) * 2)
    assert read(bounded[0]) is not None  # it is used, so the other one is the oldest now
    keep(bounded[2])
    assert [read(one) is not None for one in bounded] == [True, False, True]


def test_nothing_is_kept_without_room(section: TargetSection) -> None:
    for bound in (0, 1000):
        keep(section.model_copy(update={"packed_bytes": bound}))
        assert files(section) == []


def test_a_directory_that_cannot_be_written_is_no_error(section: TargetSection, code: Path) -> None:
    (code / store.FOLDER).write_bytes(b"")
    keep(section)
    assert read(section) is None
    (code / store.FOLDER).unlink()


def test_an_abandoned_partial_file_is_removed(section: TargetSection, code: Path) -> None:
    (code / store.FOLDER).mkdir()
    old, young = (code / store.FOLDER / f"{name}{PARTIAL}" for name in ("old", "young"))
    for file in (old, young):
        file.write_bytes(b"begun")
    os.utime(old, (1, 1))
    keep(section)
    assert not old.exists()
    assert young.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_regions(tmp_path / "taken", "key", {}, [torch.ones(3)])
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
    assert read_regions(tmp_path / "taken", "key") is None


def test_regions_keep_their_bytes_in_whole_cache_lines(tmp_path: Path) -> None:
    regions = [torch.arange(5.0), torch.arange(3_000_000), torch.tensor([1, 2], dtype=torch.int8)]
    write_regions(tmp_path / "file", "key", {"a": 1}, regions)
    found = read_regions(tmp_path / "file", "key")
    assert found is not None
    content, memory = found
    assert content == {"a": 1}
    assert torch.equal(memory[:20].view(torch.float32), regions[0])
    assert torch.equal(memory[64 : 64 + 24_000_000].view(torch.int64), regions[1])
    assert memory[64 + 24_000_000 :].tolist() == [1, 2, *[0] * 62]


def test_angles_that_are_computed_otherwise_are_not_kept() -> None:
    class Rotary:
        inv_freq = torch.tensor([1.0, 0.5])
        attention_scaling = 1.0

        def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = (positions[..., None].float() * self.inv_freq).repeat_interleave(2, dim=-1)
            return angles.cos(), angles.sin()

    assert plain_angles(Rotary(), 8) is None
    assert plain_angles(object(), 8) is None


def test_a_target_with_packed_weights_starts_without_transformers(section: TargetSection) -> None:
    section = section.model_copy(update={"quantization": "none"})
    keep(section)
    script = (
        "import sys\n"
        "from cluster.core.config.target_section import TargetSection\n"
        "import workers.verify.group\n"
        "from workers.verify.build import build_engine\n"
        f"engine = build_engine(TargetSection.model_validate_json({section.model_dump_json()!r}))\n"
        "engine.close()\n"
        "sys.exit('transformers' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_model_that_was_exchanged_while_it_was_loaded_is_not_kept(tmp_path: Path, code: Path) -> None:
    first = tiny.save(tmp_path / "first", tiny.llama())
    second = tiny.save(tmp_path / "second", tiny.llama(intermediate_size=96))
    link = tmp_path / "current"
    link.symlink_to(first)
    section = section_of(link, code)
    file = packed_file(section)
    assert file is not None
    model = load_model(section, max_context_len=section.max_context_len)
    link.unlink()
    link.symlink_to(second)
    assert keep_packed(section, file, model) is None
