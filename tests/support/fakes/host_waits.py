"""Finds the operations in which the host would wait for a GPU, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SYNCHRONIZING_CALLS = ("tolist", "item", "cpu", "nonzero", "masked_select", "__bool__", "__int__", "__float__")


class OnGpu(TorchFunctionMode):
    """A torch function mode: CPU tensors report a CUDA device, and operations that would synchronize are recorded.

    A wait for copies that were launched together is recorded as `copies`.
    """

    def __init__(self, *, notices_copies: bool = False) -> None:
        """`notices_copies`: also record each copy to a device, as if no tensor of the host were in pinned memory."""
        super().__init__()
        self.waits: list[str] = []
        self._notices_copies = notices_copies

    def __enter__(self) -> Self:
        self._patch = patch("workers.transfer.wait_for_device", lambda _: self.waits.append("copies"))
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function == Tensor.is_cuda.__get__:  # the getter is a new object at every access
            return True
        if self._waits(function, args, kwargs):
            self.waits.append(function.__name__)
        return function(*args, **kwargs)

    def _waits(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            return any(_is_host_index(index) for index in (args[1] if isinstance(args[1], tuple) else (args[1],)))
        if function in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            return function is Tensor.new_tensor or kwargs.get("device") is not None
        if function == Tensor.to and self._notices_copies:  # modules of `transformers` name their device by keyword
            return any(isinstance(one, torch.device) for one in args) and "non_blocking" not in kwargs
        return getattr(function, "__name__", "") in SYNCHRONIZING_CALLS


def _is_host_index(index: object) -> bool:
    """Whether an index makes the host wait: a list is copied, and a boolean mask has a size that depends on data."""
    return isinstance(index, list) or (isinstance(index, Tensor) and index.dtype is torch.bool)
