"""Parts of models whose attention is code of their own, in the form of a family that calls the registered function.

LED and MVP have the parts of BART's decoder, and FSMT those of Marian, under the same names. So they are computed by
that family's code, with their own weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BartConfig, MarianConfig, PreTrainedConfig
from transformers.models.bart.modeling_bart import BartDecoder
from transformers.models.marian.modeling_marian import MarianDecoder, MarianEncoder

from workers.forward.attention import ATTENTION_NAME, UnsupportedModel

_FORMS: dict[str, tuple[Any, Any]] = {
    "FSMTDecoder": (MarianDecoder, MarianConfig),
    "FSMTEncoder": (MarianEncoder, MarianConfig),
    "LEDDecoder": (BartDecoder, BartConfig),
    "MvpDecoder": (BartDecoder, BartConfig),
}
"""By the class of a part, the class with the same parts that computes it, and its configuration."""
_REFUSED = {
    "ProphetNetDecoder": "its decoder attends from several streams, each of which predicts a later token",
    "T5Gemma2Decoder": "its decoder attends to the text and to the source in one softmax",
}
"""By the class of a part, why it is not served."""
_SIZES = ("layers", "ffn_dim", "attention_heads")
_OWN_HEAD = "output_projection."
"""The head of FSMT, which is inside its decoder."""
_POSITIONS = "embed_positions.weight"


def in_known_form(part: Any, config: PreTrainedConfig) -> Any:
    """An encoder or decoder of a model with this configuration in the form of a known family, or else as it is.

    A new form shares the parameters. Raises `UnsupportedModel` for a part that no form computes.
    """
    name = type(part).__name__
    if name in _REFUSED:
        raise UnsupportedModel(_REFUSED[name])
    if name not in _FORMS:
        return part
    if getattr(config, "use_prompt", False):
        raise UnsupportedModel("its layers attend to learned prompts (use_prompt)")
    kind, configuration = _FORMS[name]
    own = {name: values for name, values in part.state_dict().items() if not name.startswith(_OWN_HEAD)}
    skips_padding = hasattr(part.embed_positions, "make_positions")  # FSMT begins at the row behind that of padding
    if skips_padding:
        own[_POSITIONS] = own[_POSITIONS][int(part.embed_positions.padding_idx) + 1 :]
    names = [f"{side}_{size}" for side in ("encoder", "decoder") for size in _SIZES]
    with torch.device("meta"):
        form: nn.Module = kind(
            configuration(
                vocab_size=len(part.embed_tokens.weight),
                pad_token_id=0,  # only training reads it
                max_position_embeddings=len(own[_POSITIONS]),
                d_model=config.d_model,
                activation_function=config.activation_function,
                scale_embedding=bool(getattr(config, "scale_embedding", False)),
                attn_implementation=ATTENTION_NAME,
                **{name: getattr(config, name) for name in names},
            )
        )
    if not skips_padding:
        form.embed_positions = part.embed_positions
    form.load_state_dict(own, assign=True)  # raises for any other parts
    return form.eval().requires_grad_(False)
