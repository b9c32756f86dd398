"""DFlash2's convolutions over the slots of a block; see `ConvolutionShape`."""

from __future__ import annotations

from torch import Tensor

from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import make_product
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import ConvolutionShape


class BlockConvolution:
    """The two convolutions around one sub-layer, over its input and its output. No block reads another one."""

    def __init__(
        self,
        module: PublicModule,
        name: str,
        shape: ConvolutionShape,
        slots: int,
        *,
        weights: Weights,
        directory: str | None = None,
    ) -> None:
        """`name` is that of the tensors; blocks have `slots` tokens. `directory` keeps the compiled CPU kernels."""
        self._shape, self._slots = shape, slots
        self._project = make_product(module.tensors[f"{name}.kernel_projection.weight"], weights, directory)
        base = module.tensors[f"{name}.base_kernel"].float()
        self._base = base.view(2, shape.width, -1, shape.group)  # [sides, width, groups, channels]

    def before(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The convolved inputs [tokens, hidden size] of the sub-layer, and the kernels for `after`.

        `inputs`, float32 [tokens, hidden size], are normalised, and those of whole blocks.
        """
        kernels = self._project(inputs).view(len(inputs), 2, self._shape.width, -1)
        return self._convolved(inputs, kernels[:, 0], 0), kernels[:, 1]

    def after(self, outputs: Tensor, kernels: Tensor) -> Tensor:
        """The convolved outputs [tokens, hidden size] of the sub-layer."""
        return self._convolved(outputs, kernels, 1)

    def _convolved(self, rows: Tensor, kernels: Tensor, side: int) -> Tensor:
        blocks = rows.view(-1, self._slots, *self._base.shape[2:])  # [blocks, slots, groups, channels]
        factors = kernels.reshape(-1, self._slots, *kernels.shape[1:]).unsqueeze(-1) + self._base[side]
        found = factors[:, :, 0] * blocks
        for back in range(1, self._shape.width):
            found[:, back:] += factors[:, back:, back] * blocks[:, :-back]
        return found.view_as(rows)
