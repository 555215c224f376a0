"""The model, training text and held-out text that all methods of the learning benchmark share. No network.

The flat vector of the whole model is the concatenation of the stages' layouts. A method of the product
therefore sees what it sees on its stage, and any other optimizer sees each parameter as a view. Hidden states
pass from stage to stage through the run's codec and boundaries, as they would between peers.

Shape suffixes: P numbers of the flat vector, B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from peers.compute.stage_part import build_compute
from peers.config.errors import UserError
from peers.config.run_file import find_source_text
from peers.data.documents import TextError, held_out_text, read_text, text_at
from peers.data.tokenizer import ByteTokenizer, Tokenizer
from peers.data.tokens import encoded
from peers.lab.bench.learning.text_split import TextSplit
from peers.state.start_folder import start_state
from peers.tools.model.evaluate import Pair, Windows, cut, cut_answers, labels_of, nats_of
from peers.tools.owner.run_check import tokenizer_beside
from swarmnet.identifiers import MicrobatchId, PeerId, RunId
from swarmnet.model.activation_codec import decode, encode, rounding_generator
from swarmnet.model.computing.choices import PLAIN, Computing
from swarmnet.model.computing.private_compute import DocumentNoise
from swarmnet.model.decoder import forward, scaled
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import Layout, frozen_layout, trained_layout, views_of
from swarmnet.model.parameters import whole
from swarmnet.model.sampling import inputs_and_labels, learned, window_starts
from swarmnet.model.stage_compute import copied
from swarmnet.model.state_layout import first_state
from swarmnet.run.activation_sizes import Codec
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import STANDARD_LIBRARY

RUN = RunId("00" * 32)
"""Run id that seeds the sampling of text, so that a peer's n-th microbatch is the same for all methods."""
SCORED_BYTES = 128 * 1024
"""Bytes of held-out text. `swarmnet evaluate` takes half, but the losses of methods lie close together."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, and its position in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.size)

    def view(self, flat_P: Tensor) -> Tensor:
        """Return the parameter as a view of the flat vector, in the parameter's shape."""
        return flat_P[self.place].view(self.shape)


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of some microbatches at one version of the weights."""

    summed: Tensor
    """Gradient of the summed loss: float32 [P]."""
    loss: float
    """Mean loss in nats per token."""
    tokens: int


@dataclass(frozen=True, slots=True)
class BenchTexts:
    """Tokens to train on, and held-out windows to evaluate."""

    owners: tuple[Tensor, ...]
    """Training tokens of each owner, int64 with one dimension. Owners have peers in turn."""
    held_out: Windows
    held_out_of_owners: tuple[Windows, ...] = ()
    """The parts of `held_out` that belong to each owner; empty: it belongs to none."""


class Ground:
    """One model and its texts, with one seed: computes gradients and held-out losses for any method."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        texts: BenchTexts,
        seed: int,
        start: Path | None = None,
        computing: Computing = PLAIN,
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare a run. `start` is the folder of the model that it starts from; None: its seed draws the
        weights. Raises UserError if they do not fit."""
        self.manifest = manifest
        self.seed = seed
        self.device = torch.device(device)
        self._texts = texts
        self.owners = len(texts.owners)
        stages = range(len(manifest.stages))
        self._rules = manifest.path_rules()
        self.layouts = [trained_layout(manifest, stage) for stage in stages]
        seeded = replace(manifest, seed=manifest.seed + seed)
        states = [
            first_state(seeded, stage) if start is None else start_state(start, seeded, stage)
            for stage in stages
        ]
        self._first = [units[: layout.size] for units, layout in zip(states, self.layouts, strict=True)]
        frozen = [frozen_layout(manifest, stage) for stage in stages]
        frozen_units = [
            units[len(units) - layout.size :] for units, layout in zip(states, frozen, strict=True)
        ]
        self._frozen_views = [
            views_of(to_floats(units).to(self.device), layout)
            for units, layout in zip(frozen_units, frozen, strict=True)
        ]
        noise = None
        if manifest.data.adds_noise:
            # Each microbatch is a sum of its own here, so no document is in one twice.
            chance = torch.Generator(self.device).manual_seed(seed)
            noise = DocumentNoise.from_manifest(manifest, chance, lambda: manifest.data.micro_batch_size)
        self._computes = [
            build_compute(manifest, stage, self.layouts[stage], frozen[stage], computing, self.device, noise)
            for stage in stages
        ]
        for compute, units in zip(self._computes, frozen_units, strict=True):
            compute.freeze(units)
        starts = [sum(layout.size for layout in self.layouts[:stage]) for stage in stages]
        self.slices = [
            slice(start, start + layout.size) for start, layout in zip(starts, self.layouts, strict=True)
        ]
        self.size = sum(layout.size for layout in self.layouts)
        self.parameters = tuple(_parameters(self.layouts, starts))
        self.count = sum(parameter.size for parameter in self.parameters)
        """Number of the trained parameters, without padding."""

    def initial_units(self) -> list[Tensor]:
        """Return each stage's trained weights at first, int32 [layout.size]: those of the model that the run
        starts from, or drawn by the run's and the trial's seed."""
        return [units.clone() for units in self._first]

    def initial_weights(self) -> Tensor:
        """Return the trained weights of the whole model at first: float32 [P]."""
        return torch.cat([to_floats(units) for units in self.initial_units()]).to(self.device)

    def gradient(self, weights_P: Tensor, peer: int, counter: int) -> Gradient:
        """Return the gradient of a peer's `counter`-th microbatch at these weights."""
        self._publish(weights_P)
        microbatch = MicrobatchId(PeerId(f"peer {peer}"), counter)
        inputs_BT, labels_BT = inputs_and_labels(self._windows(peer, counter))
        hidden, path = inputs_BT, self._path(microbatch)
        for stage in path[:-1]:
            scale = self._rules.branch_scale(stage, len(path))
            sent = self._computes[stage].forward(0, hidden, scale, inputs_BT)
            hidden = _carried(sent, self.manifest.activation_codec)
        finished = self._computes[-1].finish(0, hidden, labels_BT, inputs_BT)
        back = finished.hidden_gradient
        for stage in reversed(path[:-1]):
            assert back is not None, "only the first stage has tokens for inputs"
            by_chance = self.manifest.gradient_rounding == "stochastic"
            chance = rounding_generator(RunId(f"{self.seed}"), microbatch, stage + 1) if by_chance else None
            back = self._computes[stage].backward(
                0, _carried(back, self.manifest.effective_gradient_codec, chance)
            )
        summed_P = torch.cat([compute.use_gradient(torch.clone) for compute in self._computes])
        return Gradient(summed_P, finished.loss_sum / max(1, learned(labels_BT)), finished.tokens)

    def gradient_of_all(self, weights_P: Tensor, peers: int, counter: int) -> Gradient:
        """Return the summed gradient of all peers' `counter`-th microbatches at the same weights.

        A model in one stage computes them as one batch, which is faster, unless each peer adds noise.
        """
        if len(self._computes) > 1 or self.manifest.data.adds_noise:
            each = [self.gradient(weights_P, peer, counter) for peer in range(peers)]
            summed_P = torch.stack([one.summed for one in each]).sum(0)
            tokens = sum(one.tokens for one in each)
            return Gradient(summed_P, sum(one.loss * one.tokens for one in each) / tokens, tokens)
        self._publish(weights_P)
        drawn = [window for peer in range(peers) for window in self._windows(peer, counter)]
        inputs_BT, labels_BT = inputs_and_labels(drawn)
        finished = self._computes[0].finish(0, inputs_BT, labels_BT, inputs_BT)
        summed_P = self._computes[0].use_gradient(torch.clone)
        return Gradient(summed_P, finished.loss_sum / max(1, learned(labels_BT)), finished.tokens)

    def _publish(self, weights_P: Tensor) -> None:
        for compute, part in zip(self._computes, self.slices, strict=True):
            compute.publish(copied(weights_P[part]))

    def _windows(self, peer: int, counter: int) -> list[Tensor]:
        """Return the sequences of a peer's `counter`-th microbatch, with one token more each, from the text
        of its owner."""
        microbatch = MicrobatchId(PeerId(f"peer {peer}"), counter)
        data, corpus = self.manifest.data, self._texts.owners[peer % self.owners]
        if data.adds_noise:
            return self._documents(peer, counter, corpus)
        starts = window_starts(RUN, self.seed, microbatch, len(corpus), data.micro_batch_size, data.seq_len)
        return [corpus[start : start + data.seq_len + 1] for start in starts]

    def _documents(self, peer: int, counter: int, corpus: Tensor) -> list[Tensor]:
        """Return the documents of a peer's `counter`-th microbatch. Consecutive sequences of its owner's text
        stand for documents. Raises UserError if one would be used too often."""
        data, length = self.manifest.data, self.manifest.data.seq_len + 1
        numbers = list(range(len(corpus) // length))
        microbatches = len(numbers) // data.micro_batch_size
        if peer >= self.owners or counter >= microbatches * data.privacy.epochs:
            raise UserError(
                f"data.privacy: {self.owners} owners have one peer each, and owner {peer % self.owners} has "
                f"{len(numbers):,} documents, for {microbatches * data.privacy.epochs:,} microbatches in all "
                "epochs; lower --peers or --microbatches, or raise data.privacy.epochs"
            )
        Random(f"documents {self.seed} {peer}").shuffle(numbers)
        first = counter % microbatches * data.micro_batch_size
        chosen = numbers[first : first + data.micro_batch_size]
        return [corpus[number * length : (number + 1) * length] for number in chosen]

    def _path(self, microbatch: MicrobatchId) -> list[int]:
        """Return the stages that the microbatch visits; the middle ones are drawn at random.

        The run's path rules give their number for a round; the microbatch's counter is used as the round.
        """
        last = len(self._computes) - 1
        if not last:
            return [0]
        length = self._rules.length(microbatch.counter, microbatch.counter)
        chance = Random(f"{self.seed} {microbatch.origin} {microbatch.counter}")
        return [0, *sorted(chance.sample(range(1, last), length - 2)), last]

    def held_out_loss(self, weights_P: Tensor, every: int = 1) -> float:
        """Return the loss on every `every`-th batch of the held-out text, in nats per token."""
        return self._loss_on(weights_P, self._texts.held_out.pairs[::every])

    def losses_of_owners(self, weights_P: Tensor) -> tuple[float, ...]:
        """Return the loss on the held-out text of each owner; empty if owners have none."""
        return tuple(self._loss_on(weights_P, each.pairs) for each in self._texts.held_out_of_owners)

    def _loss_on(self, weights_P: Tensor, pairs: Sequence[Pair]) -> float:
        views: dict[str, Tensor] = {}
        for stage, (layout, part) in enumerate(zip(self.layouts, self.slices, strict=True)):
            scale = self._rules.branch_scale(stage, len(self.layouts))
            views |= scaled(views_of(weights_P[part], layout) | self._frozen_views[stage], scale)
        model = self.manifest.model
        nats = nats_of(
            lambda tokens_BT: forward(views, model, whole(model), tokens_BT.to(self.device)).cpu(), pairs
        )
        return nats / labels_of(pairs)

    def bits_per_byte(self, loss: float) -> float:
        """Convert a loss in nats per token to bits per byte, which does not depend on the tokenizer."""
        held_out = self._texts.held_out
        return held_out.score(loss * held_out.tokens).bits_per_byte


def _carried(tensor: Tensor, codec: Codec, chance: torch.Generator | None = None) -> Tensor:
    """Return what a peer receives if another sends `tensor` through `codec`."""
    return decode(encode(tensor, codec, chance), tuple(tensor.shape), codec, tensor.device)


def read_texts(
    run_file: Path, manifest: Manifest, eval_text: Path | None, tokenizer: Path | None, split: TextSplit
) -> BenchTexts:
    """Read the run's texts from the folder of the run file, divided among owners. Raises TextError if one is
    missing, UserError if they cannot be divided."""
    data, folder = manifest.data, run_file.parent
    reads = tokenizer_beside(manifest, folder, tokenizer) or ByteTokenizer()
    places = list(_places(folder, manifest))
    sources = [
        torch.cat(list(encoded(text_at(of, parse_line=reads.parse_line), reads, lambda done, total: None)))
        for of in ([[place] for place in places] if split.by_kind else [places])
    ]
    window = min(data.seq_len, manifest.model.max_position_embeddings)
    if split.by_kind and eval_text is None and reads.parse_line is None:
        sources, of_owners = _hold_out(sources, reads, window)
        pairs = tuple(pair for each in of_owners for pair in each.pairs)
        held_out = Windows(b"".join(each.scored for each in of_owners), window, pairs)
        return BenchTexts(split.cut(sources, data.seq_len + 1), held_out, of_owners)
    tokens = split.cut(sources, data.seq_len + 1)
    if reads.parse_line is not None and eval_text is not None:
        answers = text_at([str(eval_text)], parse_line=reads.parse_line)
        return BenchTexts(tokens, cut_answers(answers, reads, window=window, limit=SCORED_BYTES))
    if eval_text is not None:
        scored = read_text(str(eval_text), lambda message: None)
    elif reads.parse_line is None and any(source.path == STANDARD_LIBRARY for source in data.sources):
        scored = held_out_text()
    else:
        raise TextError(f"{run_file}: there is no held-out text to evaluate: add --eval-text FILE")
    return BenchTexts(tokens, cut(scored, reads, window=window, batch=8, limit=SCORED_BYTES))


def _hold_out(
    sources: Sequence[Tensor], reads: Tokenizer | ByteTokenizer, window: int
) -> tuple[list[Tensor], tuple[Windows, ...]]:
    """Cut an equal number of tokens off the end of each source, and return what is left to train on and the
    held-out text of each. Their joint loss is the mean of the owners'. Raises UserError."""
    size = SCORED_BYTES // len(sources)
    for number, tokens in enumerate(sources):
        if len(tokens) < 2 * size:
            raise UserError(
                f"--split: source {number} has {len(tokens):,} tokens, of which {size:,} would be held out: "
                f"it needs {2 * size:,}; add text, or name the held-out text: --eval-text FILE"
            )
    ends = (reads.decode(tokens[-size:].tolist()) for tokens in sources)
    held_out = tuple(cut(end, reads, window=window, batch=8, limit=size) for end in ends)
    return [tokens[:-size] for tokens in sources], held_out


def _places(folder: Path, manifest: Manifest) -> Iterable[str]:
    for source in manifest.data.sources:
        place = find_source_text(folder, source)
        if place is None:
            raise TextError(
                f"data.sources: {source.path} is not next to the run file, in {folder.absolute()}"
            )
        yield place


def _parameters(layouts: Iterable[Layout], starts: Iterable[int]) -> Iterator[Parameter]:
    for layout, start in zip(layouts, starts, strict=True):
        for entry in layout.entries:
            yield Parameter(entry.name, entry.shape, start + entry.offset, entry.size)
