"""An independent draft model: a small language model that drafts with the target's sampling noise.

It ranks tokens as the target would, with the sequence's parameters, seed and position. Where the two distributions are
similar, the drafted tokens mostly equal the target's. A PARD model drafts all depths in one pass instead. A model with
another tokenizer drafts by text, greedily.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from cluster.core.config.base import Choice
from cluster.core.config.draft_section import DraftModelSection, DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from cluster.core.ports import DraftMethod
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_drafter import TreeDrafter
from workers.draft.registry import Placement, Places, register
from workers.model.draft_card import LAYERS
from workers.model.weight_files import is_encoder_decoder
from workers.sampling.acceptance import RULES, DrawnDrafts

if TYPE_CHECKING:
    from workers.forward.loaded_model import LoadedModel


class DraftModelSettings(DraftModelSection, ExpansionSettings):
    """The draft model, and how its trees are expanded."""

    draft_kind: ClassVar[str] = LAYERS
    learns: ClassVar[bool] = True
    renamed: ClassVar[dict[str, str]] = {name: name for name in ("mode", "width", "candidates", "lookup", "kv")}

    candidates: Annotated[int, Field(ge=1, le=16)] = 3
    """Drafted tokens below each expanded node."""
    lookup: Choice[Literal["off", "on"]] = "on"
    """`on` adds tokens that followed the same tokens earlier in the sequence. They need no forward pass."""
    quantization: Literal["auto", "none", "int8", "int4", "stored"] = "auto"  # type: ignore[assignment] # resolved before loading
    """`int8` and `int4` store the weights of linear layers in 8 or 4 bits on CPU, which takes less time and changes no
    answer; `auto` takes int8 for a draft with the encoder of its target; `stored` keeps a checkpoint's own bits."""
    distributions: Choice[Literal["auto", "on", "off"]] = "auto"
    """`on` draws drafts at random in trees of a fixed shape, and sends the distributions that they were drawn from, for
    the acceptance rules `rejection` and `block`. `candidates` siblings are drawn at each depth (1 with `block`), and
    `mode`, `width` and `lookup` have no effect. `auto` is `on` where `target.acceptance` is such a rule and the draft
    has the target's tokenizer. For the same seed, the text then differs from decoding without drafts; its distribution
    does not."""

    @property
    def has_lookup(self) -> bool:
        """Whether tokens that followed the same tokens earlier in the sequence are added to the trees."""
        return self.lookup == "on"


def _preferred(target: TargetSection) -> Placement:
    """On CPU, a translator's draft takes less time than a call to another process, and reads no source there."""
    return "target" if target.device != "cuda" and is_encoder_decoder(Path(target.path)) else "drafter"


def _resolved(settings: DraftModelSettings) -> DraftModelSettings:
    """The settings with `quantization` settled. A draft's pass reads all weights, so smaller ones take less time."""
    from workers.model.devices import choose_device
    from workers.model.draft_card import is_distilled

    if settings.quantization != "auto":
        return settings
    directory = Path(settings.path)
    is_small = is_encoder_decoder(directory) and is_distilled(directory)
    on_cpu = choose_device(settings.device, 0).type == "cpu"
    return settings.model_copy(update={"quantization": "int8" if is_small and on_cpu else "none"})


@register("model", DraftModelSettings, places=Places(preferred=_preferred))
def create_model(settings: DraftModelSettings, draft: DraftSection, target: TargetSection) -> DraftMethod:
    """Create the method `model`: load the weights and warm up.

    Raises `ConfigurationError` when the draft's vocabulary is not the target's and it cannot draft by text, and
    `ModelLoadError`.
    """
    from workers.draft.model.drawing_drafter import DrawingDrafter
    from workers.draft.model.model_expander import ModelExpander
    from workers.draft.model.text_drafter import TextDrafter, inner_section
    from workers.draft.model.token_drawer import TokenDrawer
    from workers.draft.model.vocabularies import compare_vocabularies
    from workers.kv.pool import KvPool
    from workers.model.loading import check_truncatable, load_model

    settings = _resolved(settings)
    check_truncatable(Path(settings.path))
    drawn = RULES.get(target.acceptance).drawn_drafts
    is_drawn = settings.distributions == "on" or (settings.distributions == "auto" and drawn != DrawnDrafts.NONE)
    if draft.learn == "on":
        _check_learning(settings, target, is_drawn=is_drawn)
        return _create_learning(settings, draft, target)
    model = load_model(settings, target_directory=Path(target.path))
    vocabularies = compare_vocabularies(model, Path(settings.path), target)
    if vocabularies.tokenizers is not None:
        if settings.distributions == "on":
            raise ConfigurationError(
                f"draft.model.distributions: on is refused with draft.model.path: {settings.path}, whose tokenizer is "
                "not the target's; it must be off"
            )
        inner = _create_undrawn(settings, inner_section(draft), target, model)
        return TextDrafter(inner, vocabularies.tokenizers)
    if not is_drawn:
        return _create_undrawn(settings, draft, target, model)
    if model.source is not None:
        raise ConfigurationError(
            f"draft.model.distributions: {settings.distributions} is refused for an encoder-decoder model with the "
            f"rule {target.acceptance}; it must be off"
        )
    expander = ModelExpander(model, KvPool(model.kv_spec, settings.kv, truncatable=True), settings.candidates)
    expander.warm_up()
    siblings = 1 if drawn == DrawnDrafts.CHAIN else settings.candidates
    return DrawingDrafter(TokenDrawer(expander, vocabularies.target_size), draft, siblings)


def _create_undrawn(
    settings: DraftModelSettings, draft: DraftSection, target: TargetSection, model: LoadedModel
) -> DraftMethod:
    """A drafter that proposes the most probable tokens of the model, with the sequence's noise."""
    from workers.draft.common.modules.served_module import make_shortlist
    from workers.draft.model.model_expander import ModelExpander
    from workers.draft.model.parallel_model import ParallelModelDrafter, mask_token_of
    from workers.kv.pool import KvPool
    from workers.model.draft_card import is_distilled

    directory = Path(settings.path)
    pool = KvPool(model.kv_spec, settings.kv, truncatable=True)
    mask_token = None if model.source is not None else mask_token_of(directory)
    if mask_token is not None:
        shortlist = make_shortlist(model.vocabulary, target, model.device)
        return ParallelModelDrafter(model, pool, mask_token, draft, settings.candidates, shortlist)
    expander = ModelExpander(model, pool, settings.candidates, has_target_encoder=is_distilled(directory))
    expander.warm_up()
    return TreeDrafter(expander, settings, draft)


def _check_learning(settings: DraftModelSettings, target: TargetSection, *, is_drawn: bool) -> None:
    """Raise `ConfigurationError` for a draft model that cannot be trained while it drafts."""
    from workers.draft.model.parallel_model import mask_token_of
    from workers.model.devices import choose_device

    directory, place = Path(settings.path), f"draft.model.path: {settings.path}"
    problems = (
        (is_encoder_decoder(directory), f"{place}, which has an encoder; it must be a decoder alone"),
        (mask_token_of(directory) is not None, f"{place}, a PARD model; it must draft one token after another"),
        (
            is_drawn,
            f"draft.model.distributions: {settings.distributions} and target.acceptance: {target.acceptance}, with "
            "which drafts are drawn at random; distributions must be off",
        ),
        (settings.quantization == "stored", "draft.model.quantization: stored; it must be none, int8 or int4"),
        (choose_device(settings.device, 0).type != "cpu", "a draft model on a GPU; draft.model.device must be cpu"),
    )
    for is_wrong, problem in problems:
        if is_wrong:
            raise ConfigurationError(f"draft.learn: on is refused with {problem}")


def _create_learning(settings: DraftModelSettings, draft: DraftSection, target: TargetSection) -> DraftMethod:
    """A draft model whose weights can be replaced; see `LearningTreeDrafter`."""
    from workers.draft.model.learning_drafter import LearnedModels, LearningTreeDrafter
    from workers.draft.model.model_expander import ModelExpander
    from workers.draft.model.vocabularies import compare_vocabularies
    from workers.kv.pool import KvPool
    from workers.model.decoder_copies import DecoderCopies

    copies = DecoderCopies(settings, Path(target.path))
    stored = copies.stored_weights()
    model = copies.make(stored)
    if compare_vocabularies(model, Path(settings.path), target).tokenizers is not None:
        raise ConfigurationError(
            f"draft.learn: on is refused with draft.model.path: {settings.path}, whose tokenizer is not the target's"
        )
    pool = KvPool(model.kv_spec, settings.kv, truncatable=True)
    own = ModelExpander(model, pool, settings.candidates)
    own.warm_up()
    return LearningTreeDrafter(LearnedModels(own, stored, copies, settings, settings.candidates), settings, draft)
