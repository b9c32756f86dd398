"""One process on one device writes texts and trains an EAGLE-3 head on them; `pilotfish distill --kind eagle3`.

The head is written as a checkpoint of the library `speculators`, which other engines read as well. `python -m
deploy.distillation.eagle3` has more options, and takes the target from a directory instead of a configuration.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from deploy.distillation.execute import execute, run_command
from deploy.distillation.single_process import SingleProcess, Texts, checked, common_options
from workers.distill.answers import Answer
from workers.distill.divergence import DIVERGENCES, FORWARD_KL
from workers.distill.eagle3.head import LM_HEAD, Eagle3Head
from workers.distill.eagle3.memory import text_bytes
from workers.distill.eagle3.states import TextStates
from workers.distill.eagle3.training import RollOutPlan, RollOutTraining
from workers.distill.modules.module_plan import layers_like
from workers.model.draft_card import DraftDescription
from workers.model.formats.speculators import write_eagle3
from workers.model.public_shapes import FeatureShape
from workers.model.target_ends import scaled_head

_STATE_TOKENS = 16384
"""Tokens whose hidden states are read at once, padding included."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line. Raises `ConfigurationError` for one out of bounds."""
    parser = common_options("eagle3", __doc__)
    add = parser.add_argument
    add("--vocabulary-size", type=int, default=8192, help="Tokens that the head can propose.")
    add("--tap-norm", choices=("each", "none"), default="each", help="Whether each hidden state is normalised.")
    add("--depths", type=int, default=5, help="Steps of a roll-out.")
    add("--loss", choices=tuple(DIVERGENCES), default=FORWARD_KL, help="Divergence to minimise.")
    add("--overlap", type=float, default=0.0, help="Weight of the common share of draft and target in the loss.")
    add("--learning-rate", type=float, default=1e-3)
    add("--batch-tokens", type=int, default=16384, help="Tokens of a batch, padding included.")
    add("--pack", action="store_true", help="Let texts share rows of --max-length, instead of padding similar ones.")
    return checked(parser.parse_args(arguments), {"depths": (1, 64), "batch_tokens": (1, 1 << 24)})


def default_taps(layers: int) -> tuple[int, ...]:
    """The hidden states that a head reads unless others are chosen, for a target of so many layers."""
    return tuple(sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)}))


def shape_of(config: Any, taps: Sequence[int], *, is_normed: bool) -> FeatureShape:
    """A head with one layer of the target's sizes. `config` is a Llama-like configuration of `transformers`."""
    return FeatureShape(
        layers_like(config, 1),
        entry="wide",
        taps=len(taps),
        target_hidden_size=int(config.hidden_size),
        tap_norm="each" if is_normed else "none",
        keeps_normed_residual=True,
    )


class Run(SingleProcess):
    """One run of the command."""

    command = "eagle3"
    shape_type = FeatureShape

    def default_taps(self) -> tuple[int, ...]:
        return default_taps(int(self.config.num_hidden_layers))

    def first_layers(self) -> tuple[int, ...]:
        return (int(self.config.num_hidden_layers) - 1,)

    def shape(self) -> FeatureShape:
        if self.begun is None:
            return shape_of(self.config, self.taps(), is_normed=self.options.tap_norm == "each")
        shape = self.begun.card.shape
        if not isinstance(shape, FeatureShape):
            raise TypeError(f"{type(shape).__name__} is no shape of an EAGLE-3 head")
        return shape

    def vocabulary(self, texts: Texts) -> tuple[int, ...]:
        """The tokens that are frequent in the answers, or those of the head that is trained further."""
        if self.begun is None:
            return self.frequent(texts)
        return self.begun.vocabulary or tuple(range(int(self.config.vocab_size)))

    def train(self, texts: Texts) -> None:
        """Train, measure and save. Raises `PilotfishError`."""
        chosen = self.options
        size = int(self.config.vocab_size)
        begun = self.directory_of_training
        vocabulary = self.vocabulary(texts) if begun is None else begun.vocabulary
        taps = self.taps()
        train = self.lengthened(texts.train)
        self.check_memory(train, texts, text_bytes(self.shape(), self.dtype.itemsize))
        states = self._states(train, (self.peers.rank, self.peers.count))
        measured = {name: self._states(answers) for name, answers in texts.measured.items()}
        head = self._head(taps, vocabulary)
        self.drop_layers()
        plan = RollOutPlan(
            **self.plan_values(),
            depths=chosen.depths,
            batch_tokens=chosen.batch_tokens,
            packs=chosen.pack,
            loss=chosen.loss,
            overlap=chosen.overlap,
        )
        rows = torch.tensor(vocabulary, device=self.device)
        self.peers.shard(head)
        training = RollOutTraining(self.target, head, rows, plan, self.peers)
        name = chosen.name or self.directory.name
        card = DraftDescription(
            name, size, int(self.config.hidden_size), (), len(vocabulary), kind="eagle", taps=taps, shape=head.shape
        )

        self.fit(training, states, measured, lambda: self._save(card, head, rows))

    def _states(self, answers: Sequence[Answer], part: tuple[int, int] = (0, 1)) -> TextStates:
        chosen = self.options
        states = TextStates(
            self.target,
            answers,
            max_length=chosen.max_length,
            batch_tokens=min(_STATE_TOKENS, chosen.batch_tokens),
            part=part,
        )
        self.tell(f"hidden states of {len(answers):,} texts, {states.tokens:,} tokens")
        return states

    def _head(self, taps: Sequence[int], vocabulary: Sequence[int]) -> Eagle3Head:
        """A head on the target's device. It begins as another one, or as the target's last layer."""
        torch.manual_seed(self.options.seed)
        begun = self.begun
        head = Eagle3Head(self.shape(), len(vocabulary)).to(self.device)
        if begun is not None:
            head.load_state_dict(begun.tensors(self.device) | {LM_HEAD: begun.head(scaled_head(self.target)).float()})
        else:
            decoder = self.target.get_decoder()
            (number,) = self.first_layers()
            layer = {name: value.detach() for name, value in decoder.layers[number].named_parameters()}
            rows = scaled_head(self.target)[torch.tensor(vocabulary, device=self.device)]
            head.start(layer, decoder.norm.weight.detach(), rows)
        self.tell(f"head of {sum(one.numel() for one in head.parameters()):,} parameters reads layers {list(taps)}")
        return head

    def _save(self, card: DraftDescription, head: Eagle3Head, vocabulary: torch.Tensor) -> None:
        """Write the checkpoint and its model card, in the place of an earlier one."""
        chosen = self.options
        introduction = f"""\
An EAGLE-3 head (Li et al. 2025) as the library `speculators` stores it: one decoder layer on the target's hidden
states after {", ".join(map(str, card.taps))} layers. It proposes tokens for {card.target} and works with no other
target. Every token that a client reads is the target's own decision. It has
{sum(one.numel() for one in head.parameters()):,} parameters, stored in bfloat16, and can propose
{card.vocabulary_size:,} different tokens. The embedding is the target's."""
        method = f"""\
The target wrote texts (Seq-KD, Kim & Rush 2016), and the head learned the target's probabilities in its own roll-outs
of {chosen.depths} steps. `slots` are the shares of right tokens after right ones in greedy chains."""
        weights = head.weights(vocabulary)
        self.save(
            introduction,
            method,
            lambda scratch: write_eagle3(
                scratch,
                card,
                weights,
                architectures=self.config.architectures or (),
                speculative_tokens=chosen.depths,
                file_bytes=chosen.file_bytes,
            ),
        )


def main() -> int:
    """Run the command. Returns its exit code."""
    return run_command(lambda: execute(Run, options()))


if __name__ == "__main__":
    sys.exit(main())
