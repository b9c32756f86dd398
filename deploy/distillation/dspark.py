"""One process on one device writes texts and trains a DSpark drafter on them; `pilotfish distill --kind dspark`.

The drafter is written as a checkpoint of the library `speculators`, which other engines read as well. `python -m
deploy.distillation.dspark` has more options, and takes the target from a directory instead of a configuration.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cluster.core.errors import ConfigurationError
from deploy.dataclass_options import number_list
from deploy.distillation.execute import execute, run_command
from deploy.distillation.single_process import SingleProcess, Texts, checked, common_options
from workers.distill.answers import Answer
from workers.distill.dspark.memory import text_bytes
from workers.distill.dspark.module import SparkModule
from workers.distill.dspark.rows import TextRows
from workers.distill.dspark.training import BlockPlan, BlockTraining
from workers.distill.modules.module_plan import layers_like
from workers.model.draft_card import DraftDescription
from workers.model.formats.registry import DraftWeights
from workers.model.formats.speculators import write_dspark
from workers.model.public_shapes import MarkovShape, MaskedBlockShape
from workers.model.target_ends import scaled_head


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line. Raises `ConfigurationError` for one out of bounds."""
    parser = common_options("dspark", __doc__)
    add = parser.add_argument
    add("--slots", type=int, default=6, help="Tokens of a block, and most tokens of a draft.")
    add("--layers", type=int, default=3, help="Layers of the drafter.")
    add("--start-layers", default="", help="Layers of the target that it begins as. Unset: the first and the last.")
    add("--kv-heads", type=int, default=0, help="Heads of keys and values. Unset: as many as of queries.")
    add("--inner", type=int, default=0, help="Width inside an MLP. Unset: ten ninths of the hidden size.")
    add("--rank", type=int, default=16, help="Rank of the Markov head.")
    add("--markov", choices=("vanilla", "gated", "rnn"), default="rnn", help="Kind of the Markov head.")
    add("--mask-token", type=int, help="The token in the place of unknown ones. Unset: the last one.")
    add("--batch-rows", type=int, default=12, help="Rows of --max-length tokens in a batch.")
    add("--blocks", type=int, default=224, help="Blocks of each row of a batch.")
    add("--vocabulary-size", type=int, default=0, help="Tokens that the drafter can propose. Unset: all.")
    add("--learning-rate", type=float, default=1.5e-3)
    add("--overlap", type=float, default=1.0, help="Weight of the common share of draft and target in the loss.")
    add("--goal-temperature", type=float, default=0.7, help="Temperature of the target's probabilities in the loss.")
    parser.set_defaults(long_share=0.05)
    chosen = parser.parse_args(arguments)
    bounds = {"slots": (2, 256), "layers": (1, 64), "rank": (1, 4096), "batch_rows": (1, 4096)}
    return checked(chosen, bounds | {"blocks": (1, chosen.max_length), "vocabulary_size": (0, 1 << 24)})


def default_taps(layers: int) -> tuple[int, ...]:
    """The hidden states that a drafter reads unless others are chosen, for a target of so many layers."""
    return tuple(sorted({min(3, layers // 3), min(layers // 2 + 1, layers - 1), layers - 1}))


def block_shape(config: Any, chosen: argparse.Namespace, taps: int) -> MaskedBlockShape:
    """The shape by the options, for a target with a configuration of `transformers`. Raises `ConfigurationError`."""
    vocabulary = int(config.vocab_size)
    body = layers_like(config, chosen.layers)
    kv_heads = chosen.kv_heads or body.heads
    if body.heads % kv_heads:
        raise ConfigurationError(f"--kv-heads: {kv_heads} is refused; it must divide {body.heads}")
    inner = chosen.inner or min(body.intermediate_size, body.hidden_size * 10 // 9)
    mask = vocabulary - 1 if chosen.mask_token is None else chosen.mask_token
    if not 0 <= mask < vocabulary:
        raise ConfigurationError(f"--mask-token: {mask} is refused; it must be within 0 and {vocabulary - 1}")
    return MaskedBlockShape(
        body=replace(body, kv_heads=kv_heads, intermediate_size=inner, has_head_norms=True),
        slots=chosen.slots,
        taps=taps,
        mask_token=mask,
        predicts_next=True,
        markov=MarkovShape(
            chosen.rank, chosen.markov, vocabulary, min(chosen.vocabulary_size or vocabulary, vocabulary)
        ),
        confidence="markov",
    )


class Run(SingleProcess):
    """One run of the command."""

    command = "dspark"
    shape_type = MaskedBlockShape

    def default_taps(self) -> tuple[int, ...]:
        return default_taps(int(self.config.num_hidden_layers))

    def first_layers(self) -> tuple[int, ...]:
        layers, last = self.options.layers, int(self.config.num_hidden_layers) - 1
        if given := number_list("--start-layers", int)(self.options.start_layers):
            if len(given) != layers or not all(0 <= number <= last for number in given):
                raise ConfigurationError(
                    f"--start-layers: {list(given)} is refused; it must have {layers} numbers within 0 and {last}"
                )
            return tuple(given)
        return tuple(max(0, number) for number in ((0, *range(last - layers + 2, last + 1)) if layers > 1 else (last,)))

    def shape(self) -> MaskedBlockShape:
        if self.begun is None:
            return block_shape(self.config, self.options, len(self.taps()))
        shape = self.begun.card.shape
        if not isinstance(shape, MaskedBlockShape):
            raise TypeError(f"{type(shape).__name__} is no shape of a DSpark drafter")
        return shape

    def vocabulary(self, texts: Texts) -> tuple[int, ...]:
        """The tokens that the drafter can propose: the frequent ones in the answers, or all."""
        if self.begun is not None:
            return self.begun.vocabulary
        is_reduced = 0 < self.options.vocabulary_size < int(self.config.vocab_size)
        return self.frequent(texts) if is_reduced else ()

    def train(self, texts: Texts) -> None:
        """Train, measure and save. Raises `PilotfishError`."""
        chosen = self.options
        begun = self.directory_of_training
        vocabulary = self.vocabulary(texts) if begun is None else begun.vocabulary
        tokens = torch.tensor(vocabulary, device=self.device) if vocabulary else None
        taps = self.taps()
        train = self.lengthened(texts.train)
        self.check_memory(train, texts, text_bytes(len(taps), int(self.config.hidden_size), self.dtype.itemsize))
        rows = self._rows(train, (self.peers.rank, self.peers.count))
        measured = {name: self._rows(answers) for name, answers in texts.measured.items()}
        module = self._module(taps, rows.tap_scale(self.peers))
        self.drop_layers()
        self.peers.shard(module, list(module.layers))
        plan = BlockPlan(
            **self.plan_values(),
            rows=chosen.batch_rows,
            blocks=chosen.blocks,
            overlap=chosen.overlap,
        )
        whole = scaled_head(self.target)
        head = self.begun.head(whole) if self.begun is not None else whole if tokens is None else whole[tokens]
        training = BlockTraining(head, module, plan, self.peers, tokens)
        own = None if head is whole else head  # also a head of all tokens that a draft began with
        self.fit(
            training,
            rows,
            measured,
            lambda: self._save(taps, module, replace(module.weights(), vocabulary=tokens, head=own)),
        )

    def _rows(self, answers: Sequence[Answer], part: tuple[int, int] = (0, 1)) -> TextRows:
        chosen = self.options
        rows = TextRows(self.target, answers, length=chosen.max_length, temperature=chosen.goal_temperature, part=part)
        self.tell(f"hidden states of {len(answers):,} texts, {rows.tokens:,} tokens in {rows.rows:,} rows")
        return rows

    def _module(self, taps: Sequence[int], scale: torch.Tensor) -> SparkModule:
        """A drafter on the target's device. It begins as another one, or as the target's first layer and last ones."""
        chosen, begun = self.options, self.begun
        torch.manual_seed(chosen.seed)
        decoder = self.target.get_decoder()
        embedding = self.target.get_input_embeddings().get_parameter("weight").detach()
        module = SparkModule(self.shape(), embedding, scale).to(self.device)
        if begun is not None:
            module.load(begun.tensors(self.device))
        else:
            layers = [
                {name: value.detach() for name, value in decoder.layers[number].named_parameters()}
                for number in self.first_layers()
            ]
            module.start(layers, decoder.norm.weight.detach())
        size = sum(one.numel() for one in module.parameters())
        self.tell(f"drafter of {size:,} parameters reads hidden states {list(taps)}")
        return module

    def _save(self, taps: tuple[int, ...], module: SparkModule, weights: DraftWeights) -> None:
        """Write the checkpoint and its model card, in the place of an earlier one."""
        chosen, shape = self.options, module.shape
        name, size = chosen.name or self.directory.name, int(self.config.vocab_size)
        card = DraftDescription(
            name,
            size,
            int(self.config.hidden_size),
            (),
            None if weights.vocabulary is None else len(weights.vocabulary),
            kind="block",
            taps=taps,
            shape=shape,
        )
        has_own = self.begun is not None and self.begun.weights.head is not None
        shared = "The embedding is" if has_own else "Embedding and output head are"
        introduction = f"""\
A DSpark drafter as the library `speculators` stores it: {shape.body.layers} decoder layers propose {shape.slots}
tokens in one pass, from the target's hidden states after {", ".join(map(str, taps))} layers. It proposes tokens for
{name} and works with no other target. Every token that a client reads is the target's own decision. It has
{sum(one.numel() for one in module.parameters()):,} parameters, stored in bfloat16, and can propose
{card.vocabulary_size or size:,} different tokens. {shared} the target's."""
        method = """\
The target wrote texts (Seq-KD, Kim & Rush 2016), and the drafter learned the target's probabilities in blocks after
random positions of the answers. `slots` are the shares of right tokens after right ones in greedy chains; tokens per
step are those of steps that follow one another, with greedy answers."""
        self.save(
            introduction,
            method,
            lambda scratch: write_dspark(
                scratch,
                card,
                weights,
                architectures=self.config.architectures or (),
                file_bytes=chosen.file_bytes,
            ),
        )


def main() -> int:
    """Run the command. Returns its exit code."""
    return run_command(lambda: execute(Run, options()))


if __name__ == "__main__":
    sys.exit(main())
