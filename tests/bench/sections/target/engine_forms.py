"""One target in several forms: layers fused by Triton kernels or compiled, steps run as they come or recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from cluster.core.config.target_section import TargetSection
from tests.bench.decoding import Decoding, decoding
from workers.forward import cuda_graphs
from workers.forward.backends import choice
from workers.forward.backends.base import REFERENCE, AttentionSetting, StepKind, all_backends
from workers.forward.backends.choice import ChosenBackend
from workers.forward.cuda_graphs import CudaGraphRunner
from workers.forward.loaded_model import LoadedModel
from workers.model import loading
from workers.model.devices import choose_device

GATHERED = "sdpa"


@dataclass(frozen=True, slots=True)
class Form:
    """How a target computes its steps."""

    name: str
    compile: str
    """Value of `target.compile`."""
    recorded: bool
    """Whether steps are CUDA graphs, captured before the first one. On CPU they are only padded and called again."""


FORMS = (
    Form("fused", "auto", False),
    Form("fused, recorded", "auto", True),
    Form("compiled, recorded", "on", True),
)
"""Layers of families that are not fused are compiled with `auto`, too."""


@dataclass(slots=True)
class Measured:
    """A target in one form."""

    engine: Decoding
    attention: str = GATHERED
    """What computes attention, and what the trials of the backends found."""
    replayed: int = 0
    """Steps that were replayed so far."""


@contextmanager
def built(section: TargetSection, form: Form, chunk: int) -> Iterator[Measured]:
    """The target in this form."""
    device = choose_device(section.device, 0).type
    said = _Messages()
    load = loading.load_model

    def load_in_form(*arguments: Any, **options: Any) -> LoadedModel:
        return replace(load(*arguments, **options), uses_cuda_graphs=form.recorded)

    with ExitStack() as stack:
        stack.enter_context(patch.object(loading, "load_model", load_in_form))
        stack.enter_context(said.of(choice.logger))
        if device == "cpu":
            stack.enter_context(patch.object(cuda_graphs, "CudaGraphCapture", lambda _: _call_again))
            stack.enter_context(patch.object(cuda_graphs, "choose_backend", _choose_reference))
        measured = Measured(stack.enter_context(decoding(section, chunk)))
        measured.attention = _attention(measured.engine, said)
        replay = CudaGraphRunner.run

        def counted(*arguments: Any) -> Any:
            found = replay(*arguments)
            measured.replayed += found is not None
            return found

        stack.enter_context(patch.object(CudaGraphRunner, "run", counted))
        yield measured


def _call_again(function: Callable[[], None]) -> Callable[[], None]:
    """Stands for the capture of a CUDA graph where there is no GPU."""
    function()
    return function


def _choose_reference(setting: AttentionSetting, kind: StepKind, ranks: int) -> ChosenBackend:
    """Run the trials, and use the reference: on CPU, the kernels of FlexAttention compile for minutes."""
    tried = choice.choose_backend(setting, kind, ranks)
    if tried.name == REFERENCE:
        return tried
    choice.logger.info("it is not used on CPU")
    reference = [one for one in all_backends() if one.name == REFERENCE]
    return choice.choose_backend(setting, kind, ranks, reference)


def _attention(engine: Decoding, said: _Messages) -> str:
    """What computes attention in recorded steps, or in all steps if none is recorded."""
    runner = engine.engine._runner
    graphs = runner.graphs
    if graphs is None:
        return "the CPU kernels" if runner._attention is None else runner._attention.name
    return f"{graphs._attention.name} ({'; '.join(said.messages) or 'no trial'})"


class _Messages(logging.Handler):
    """Keeps what a logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @contextmanager
    def of(self, logger: logging.Logger) -> Iterator[None]:
        """Keep everything that `logger` says inside, from information on."""
        level = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(level)
