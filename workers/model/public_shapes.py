"""The shapes of drafting modules in public checkpoints, and the tensors that each shape has. Needs no torch.

Names of tensors are those that most formats share; a format translates its own names. `drafting.public` computes with
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Sizes = dict[str, tuple[int, ...]]
"""Sizes of tensors by name."""

MASK_HIDDEN = "mask_hidden"
"""Name of P-EAGLE's learned taps beside mask tokens, [1, 1, taps x target's hidden size]."""

TapNorm = Literal["none", "joint", "each"]
"""`joint`: one RMS norm over all taps of a position; `each`: one for each tap."""


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Rotary positions. They are the draft's own, never the target's."""

    theta: float = 10000.0
    kind: str = "default"
    """The scaling, as `transformers` names it: `default`, `linear`, `llama3` or `yarn`."""
    parameters: tuple[tuple[str, float | int | bool], ...] = ()
    """Parameters of the scaling."""
    most_positions: int = 2048
    """The draft's `max_position_embeddings`, which `yarn` reads."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Decoder layers of Llama, Qwen2 or Qwen3: RMS norms, rotary positions, grouped queries, SwiGLU."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate_size: int
    layers: int
    norm_epsilon: float
    rope: RopeShape
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Whether the projection after attention has a bias."""
    has_head_norms: bool = False
    """Whether queries and keys are normalised before they are rotated, each head by its own RMS."""

    def tensors(self, inputs: int | None = None, *, has_first_norm: bool = True) -> Sizes:
        """The tensors of all layers. `inputs` is the width of the first layer's attention inputs if it is another one.

        A first layer with inputs of its own width has no norm before its attention.
        """
        found: Sizes = {}
        for number in range(self.layers):
            wide = self.hidden_size if number or inputs is None else inputs
            own = self._layer(wide)
            if number == 0 and (inputs is not None or not has_first_norm):
                del own["input_layernorm.weight"]
            found |= {f"layers.{number}.{name}": size for name, size in own.items()}
        return found

    def _layer(self, inputs: int) -> Sizes:
        size, width = self.hidden_size, self.head_width
        outputs = {"q": self.heads * width, "k": self.kv_heads * width, "v": self.kv_heads * width}
        found: Sizes = {"input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,)}
        for part, output in outputs.items():
            found[f"self_attn.{part}_proj.weight"] = (output, inputs)
            if self.has_qkv_bias:
                found[f"self_attn.{part}_proj.bias"] = (output,)
        found["self_attn.o_proj.weight"] = (size, outputs["q"])
        if self.has_output_bias:
            found["self_attn.o_proj.bias"] = (size,)
        if self.has_head_norms:
            found |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
        for part in ("gate", "up"):
            found[f"mlp.{part}_proj.weight"] = (self.intermediate_size, size)
        found["mlp.down_proj.weight"] = (size, self.intermediate_size)
        return found


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """A head that drafts token by token from the target's hidden states: EAGLE-1, EAGLE-3, MTP.

    P-EAGLE is EAGLE-3 with a mask token: it predicts several tokens in one pass.

    The input at position i is a feature of the target at i and the embedding of the token at i + 1; the output predicts
    the token at i + 2. Beyond the committed text, the head's own output takes the place of the feature.
    """

    body: DecoderShape
    entry: Literal["joined", "wide"]
    """`joined`: one matrix maps embedding and feature to the layers' input (EAGLE-1, MTP). `wide`: the first layer's
    attention reads both, and the feature is the residual stream (EAGLE-3)."""
    taps: int
    """Number of taps that are fused to the feature; 0: the feature is the target's last state after its final norm."""
    target_hidden_size: int
    """Width of one tap."""
    tap_norm: TapNorm = "none"
    has_entry_bias: bool = False
    has_entry_norms: bool = True
    """Whether embedding and feature are normalised before they enter the layers."""
    has_first_norm: bool = True
    """Whether the first layer of a joined entry normalises its input."""
    has_output_norm: bool = True
    """Whether outputs are normalised before the head."""
    keeps_normed_residual: bool = False
    """Whether the residual stream of a wide entry begins with the normalised feature."""
    feeds_normed: bool = False
    """Whether the output after the norm takes the place of the feature, instead of the one before it."""
    mask_token: int | None = None
    """The token that stands for tokens that are not drafted yet (P-EAGLE)."""
    depths: int = 0
    """Most tokens that one pass predicts; 0 without a mask token."""

    @property
    def is_trainable(self) -> bool:
        """Whether `Eagle3Head` trains it: EAGLE-3 or EAGLE-3.1 with one Llama layer without biases."""
        body = self.body
        plain = FeatureShape(
            replace(body, layers=1, has_qkv_bias=False, has_output_bias=False, has_head_norms=False),
            "wide",
            max(1, self.taps),
            self.target_hidden_size,
            self.tap_norm,
            keeps_normed_residual=self.keeps_normed_residual,
            feeds_normed=self.feeds_normed,
        )
        return self == plain

    def tensors(self) -> Sizes:
        """The tensors of the head, without embedding and output head."""
        size, joint = self.body.hidden_size, self.taps * self.target_hidden_size
        found: Sizes = {}
        if self.tap_norm == "joint":
            found["input_norm.weight"] = (joint,)
        if self.tap_norm == "each":
            found |= {f"fc_norm.{number}.weight": (self.target_hidden_size,) for number in range(self.taps)}
        found["fc.weight"] = (size, joint if self.entry == "wide" else 2 * size)
        if self.has_entry_bias:
            found["fc.bias"] = (size,)
        if self.has_entry_norms:
            found |= {"embedding_norm.weight": (size,), "feature_norm.weight": (size,)}
        if self.has_output_norm:
            found["norm.weight"] = (size,)
        if self.mask_token is not None:
            found[MASK_HIDDEN] = (1, 1, joint)
        inputs = 2 * size if self.entry == "wide" else None
        return found | self.body.tensors(inputs, has_first_norm=self.has_first_norm)


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Medusa heads: blocks `x + SiLU(W x + b)` and an output head for each depth (Cai et al. 2024)."""

    hidden_size: int
    depths: int
    blocks: int
    """Blocks of one head."""
    rows: int
    """Tokens of each own output head; 0: the target's head serves all depths."""
    has_bias: bool = True

    def tensors(self) -> Sizes:
        """The tensors of all heads."""
        size, found = self.hidden_size, Sizes()
        for depth in range(self.depths):
            for block in range(self.blocks):
                found[f"{depth}.{block}.weight"] = (size, size)
                if self.has_bias:
                    found[f"{depth}.{block}.bias"] = (size,)
            if self.rows:
                found[f"{depth}.head.weight"] = (self.rows, size)
        return found


@dataclass(frozen=True, slots=True)
class HydraShape:
    """Hydra heads (Ankner et al. 2024): head i reads the target's last state and the i + 1 tokens after it.

    Its first block is `R x + c + SiLU(W x + b)` of all of them together, the others `x + SiLU(W x + b)`.
    """

    hidden_size: int
    depths: int
    blocks: int
    """Blocks of one head."""
    rows: int
    """Tokens of each output head."""

    def tensors(self) -> Sizes:
        """The tensors of all heads."""
        size, found = self.hidden_size, Sizes()
        for depth in range(self.depths):
            for part in ("0.linear", "0.res_connection"):
                found |= _linear(f"{depth}.{part}", (depth + 2) * size, size)
            for block in range(1, self.blocks):
                found |= _linear(f"{depth}.{block}.linear", size, size)
            found |= _linear(f"{depth}.head", size, self.rows)
        return found


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """DSpark's Markov head: a low-rank bias on the logits of a slot, given the token before it."""

    rank: int
    kind: Literal["vanilla", "gated", "rnn"]
    """`vanilla`: the token before alone decides. `gated`: the slot's hidden vector gates it. `rnn`: a state goes from
    slot to slot."""
    vocabulary: int
    """Tokens that can be before a slot: those of the target."""
    rows: int
    """Tokens of the output head."""

    def tensors(self, hidden_size: int) -> Sizes:
        """The tensors of the head."""
        rank = self.rank
        found: Sizes = {
            "markov_head.markov_w1.weight": (self.vocabulary, rank),
            "markov_head.markov_w2.weight": (self.rows, rank),
        }
        if self.kind == "gated":
            found |= _linear("markov_head.gate_proj", hidden_size + rank, rank)
        if self.kind == "rnn":
            found |= _linear("markov_head.joint_proj", 2 * rank + hidden_size, 3 * rank)
        return found


def _linear(name: str, inputs: int, outputs: int) -> Sizes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


@dataclass(frozen=True, slots=True)
class SelectorShape:
    """DFlash2's selector: it ranks the best candidates of a slot anew, given the token before and the slot's vector."""

    rank: int
    candidates: int
    """Candidates of a slot that are ranked. No other token is drafted."""
    vocabulary: int

    def tensors(self, hidden_size: int) -> Sizes:
        """The tensors of the selector."""
        return {
            "candidate_selector.predecessor_codebook": (self.vocabulary, self.rank),
            "candidate_selector.successor_codebook": (self.vocabulary, self.rank),
            "candidate_selector.hidden_projection.weight": (self.rank, hidden_size),
        }


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """DFlash2's convolutions over the slots of a block, before and after attention and MLP of each layer.

    The kernel at a slot is a learned one for each channel, plus one for each group of channels that depends on the
    slot's normalised input.
    """

    width: int
    """Slots that a kernel reads: the own one and those before it."""
    group: int
    """Channels of a group."""

    def tensors(self, hidden_size: int, layers: int) -> Sizes:
        """The tensors of all layers."""
        found: Sizes = {}
        for number in range(layers):
            for part in ("attention", "mlp"):
                name = f"layers.{number}.{part}_conv"
                found[f"{name}.base_kernel"] = (2, self.width, hidden_size)
                found[f"{name}.kernel_projection.weight"] = (2 * self.width * hidden_size // self.group, hidden_size)
        return found


@dataclass(frozen=True, slots=True)
class MaskedBlockShape:
    """DFlash and DSpark: the last token and mask tokens after it attend to each other, and one pass predicts them all.

    They also attend to the context, whose keys and values come from the target's taps at each position alone.
    """

    body: DecoderShape
    slots: int
    """The last token and the mask tokens."""
    taps: int
    mask_token: int
    predicts_next: bool
    """Whether a slot predicts the token after it, the last token's slot too (DSpark), or the token at it (DFlash)."""
    markov: MarkovShape | None = None
    confidence: Literal["none", "hidden", "markov"] = "none"
    """What the confidence head reads: the slot's hidden vector, or this and the Markov embedding of the token
    before."""
    has_mask_embedding: bool = False
    """Whether a vector of its own takes the place of the mask token's embedding."""
    selector: SelectorShape | None = None
    convolution: ConvolutionShape | None = None
    embedding_scale: float = 1.0
    """Factor on the embeddings of the block."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    logit_cap: float | None = None
    """Soft bound `c` of the scaled logits: `c tanh(x / c)`."""

    @property
    def depths(self) -> int:
        """Tokens that one pass predicts."""
        return self.slots if self.predicts_next else self.slots - 1

    @property
    def is_trainable(self) -> bool:
        """Whether `SparkModule` trains it: a DSpark drafter of Qwen3 layers with both of its heads, no other part."""
        body, markov = self.body, self.markov
        plain = MaskedBlockShape(
            replace(body, has_qkv_bias=False, has_output_bias=False, has_head_norms=True),
            self.slots,
            self.taps,
            self.mask_token,
            predicts_next=True,
            markov=markov,
            confidence="markov",
        )
        return self == plain and markov is not None

    @property
    def changes_scale(self) -> bool:
        """Whether the logits have a factor or a soft bound of the draft's own: the target's factor is then left out."""
        return self.logit_scale != 1.0 or self.logit_cap is not None

    @property
    def corrects_logits(self) -> bool:
        """Whether drafts follow other logits than those of the output head alone."""
        return self.markov is not None or self.selector is not None or self.changes_scale

    def tensors(self) -> Sizes:
        """The tensors in the files of weights, without embedding, output head and mask embedding."""
        size = self.body.hidden_size
        found: Sizes = {
            "fc.weight": (size, self.taps * size),
            "hidden_norm.weight": (size,),
            "norm.weight": (size,),
        }
        found |= self.body.tensors()
        if self.markov is not None:
            found |= self.markov.tensors(size)
        if self.selector is not None:
            found |= self.selector.tensors(size)
        if self.convolution is not None:
            found |= self.convolution.tensors(size, self.body.layers)
        if self.confidence != "none":
            rank = self.markov.rank if self.confidence == "markov" and self.markov is not None else 0
            found |= _linear("confidence_head.proj", size + rank, 1)
        return found


PublicShape = FeatureShape | MedusaShape | HydraShape | MaskedBlockShape
