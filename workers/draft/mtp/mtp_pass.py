"""The passes of a target's own layer for multi-token prediction, by the layer's own module of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ModelLoadError
from workers.draft.common.modules.captured_windows import capture_of
from workers.draft.common.modules.context_store import ContextMemory, ContextStore
from workers.draft.common.modules.context_window import WHOLE_TEXT, ContextShape
from workers.draft.common.modules.pass_of_salt import PassOfSalt
from workers.draft.common.modules.product import make_product
from workers.draft.common.modules.served_module import computed_type, make_shortlist
from workers.draft.common.modules.tap_reader import TapReader
from workers.draft.eagle.eagle_drafter import LEAST_SCRATCH, EagleTreeDrafter
from workers.draft.eagle.eagle_growth import GrowthLimits
from workers.draft.eagle.head_pass import HeadPass, wanted_rows
from workers.draft.mtp import MtpSettings
from workers.forward.window_attention import WindowAttention, WindowBuffers, WindowHeads, WindowRows, WindowStep
from workers.model.devices import choose_device
from workers.model.draft_card import LAST_TAP, DraftDescription
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import load_ends
from workers.model.formats.registry import read_draft
from workers.model.mtp_layers import MtpLayer, load_mtp_layer
from workers.transfer import row_indices

_ATTENTION = "pilotfish_windows"
"""The name of `_attend` in `transformers`."""
_UNREAD = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments of attention that change its result and are not read here."""


class _FoundHeads:
    """The heads, which a pass writes into it that gets it in place of its step."""

    heads = WindowHeads(0, 0, 0, 0)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - windows have their own
    step: WindowStep | _FoundHeads,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a pass's tokens, each over its own window, to which it writes their keys and values.

    `query` is [1, heads, tokens, width], `key` and `value` [1, KV heads, tokens, width]; values may be narrower than
    keys. Returns [1, tokens, heads, width of values].
    """
    wide, narrow = key.shape[-1], value.shape[-1]
    if isinstance(step, _FoundHeads):
        unread = [name for name in _UNREAD if others.get(name) is not None]
        if unread or narrow > wide:
            what = f"its attention reads {unread[0]}" if unread else "its values are wider than its keys"
            raise ModelLoadError(f"draft.method=mtp: {type(module).__name__} is refused; {what}")
        step.heads = WindowHeads(query.shape[1], key.shape[1], wide, narrow)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2), None
    queries, keys, values = (one[0].transpose(0, 1).float() for one in (query, key, value))
    attended = step.attend(0, queries, keys, values, others.get("scaling"))
    return attended.view(1, query.shape[2], query.shape[1], narrow).to(query.dtype), None


class MtpPass(HeadPass):
    """The layer, the target's embedding, and its head. It computes what `EaglePass` computes for EAGLE heads."""

    def __init__(
        self, layer: MtpLayer, ends: TargetEnds, settings: MtpSettings, scratch: int, target: TargetSection
    ) -> None:
        """`scratch` is the largest number of tokens of one sequence in a pass, and in a draft."""
        self._layer, self.ends = layer, ends
        self._dtype = layer.projection.dtype
        self.vocabulary_size = len(ends.embedding)
        self.device = ends.embedding.device
        self._head = make_product(ends.head, settings.weights, target.compile_directory)
        size = ends.hidden_size
        found, first = _FoundHeads(), torch.zeros(1, dtype=torch.int64, device=self.device)
        self._block(torch.zeros(1, size, dtype=self._dtype, device=self.device), first, found)
        self._windows = WindowAttention(found.heads, self.device)
        self.context_shape = ContextShape(1, found.heads.kv_heads, found.heads.width, 0, WHOLE_TEXT, scratch)

    def features(self, taps: Tensor) -> Tensor:
        """Features [tokens, hidden size] of taps [tokens, 1, hidden size]: the target's final norm of them."""
        return self.ends.final_states(taps[:, -1])

    @property
    def windows(self) -> WindowAttention | None:
        return self._windows

    def launched(self, features: Tensor, rows: WindowRows) -> Tensor:
        entered = self._entered(features, row_indices(rows.tokens, self.ends.embedding))
        step = self._windows.plan(rows.pieces, rows.positions)
        return self._normalised(wanted_rows(self._block(entered, step.positions, step), rows))

    def computed(self, inputs: WindowBuffers) -> Tensor:
        entered = self._entered(inputs.features, inputs.tokens)
        return self._normalised(self._block(entered, inputs.step.positions, inputs.step)[inputs.wanted])

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of outputs [rows, hidden size]."""
        return self._head(outputs)

    def _entered(self, features: Tensor, following: Tensor) -> Tensor:
        """What enters the decoder layer [tokens, hidden size]; `following` [tokens] are the next tokens."""
        tokens: Tensor = self._layer.embedding_norm(self.ends.embedding[following].to(self._dtype))
        hidden: Tensor = self._layer.hidden_norm(features.to(self._dtype))
        return functional.linear(torch.cat([tokens, hidden], dim=-1), self._layer.projection)

    def _normalised(self, outputs: Tensor) -> Tensor:
        found: Tensor = self._layer.output_norm(outputs)
        return found.float()

    def _block(self, rows: Tensor, positions: Tensor, step: WindowStep | _FoundHeads) -> Tensor:
        """The decoder layer's output [tokens, hidden size] of its input of this shape."""
        places = positions.unsqueeze(0)
        rotations = self._layer.rotary(rows.unsqueeze(0), places)
        found = self._layer.block(
            rows.unsqueeze(0),
            attention_mask=None,
            position_ids=places,
            past_key_values=None,
            position_embeddings=rotations,
            step=step,
        )
        output: Tensor = found[0] if isinstance(found, tuple) else found.squeeze(0)
        return output


def load_mtp_pass(settings: MtpSettings, target: TargetSection, scratch: int) -> MtpPass:
    """Load the layer of a target; see `MtpPass`. Raises `ModelLoadError`."""
    AttentionInterface.register(_ATTENTION, _attend)
    directory, device, dtype = Path(target.path), choose_device(target.device, 0), computed_type(settings.weights)
    draft = Path(settings.path) if settings.path else None
    card = None if draft is None else read_draft(draft)
    if card is not None and card.kind != settings.draft_kind:
        raise ModelLoadError(f"draft.mtp.path: kind {card.kind!r} is refused; it must be {settings.draft_kind!r}")
    layer = load_mtp_layer(directory, _ATTENTION, dtype, device, draft)
    if card is None:
        sizes = int(layer.config.vocab_size), int(layer.config.hidden_size)
        card = DraftDescription(directory.name, *sizes, (), None, kind="mtp", taps=(LAST_TAP,))
    with torch.inference_mode():
        return MtpPass(layer, load_ends(directory, card, None, dtype, device), settings, scratch, target)


def load_mtp_drafter(settings: MtpSettings, draft: DraftSection, target: TargetSection) -> EagleTreeDrafter:
    """Load the layer and make its drafter; see `EagleTreeDrafter`. Raises `ModelLoadError`."""
    limits = GrowthLimits(settings.candidates, settings.width)
    head = load_mtp_pass(settings, target, max(LEAST_SCRATCH, limits.width * draft.max_depth))
    memory = ContextMemory(
        ContextStore(settings.store_tokens, computed_type(settings.weights)), settings.kept_sequences
    )
    taps = TapReader((LAST_TAP,), target, head.ends.hidden_size)
    head.capture(capture_of(head.device, target), head.ends.hidden_size, limits.width)
    shortlist = make_shortlist(None, target, head.device)
    return EagleTreeDrafter(PassOfSalt(head), shortlist, taps, draft, memory, limits)
