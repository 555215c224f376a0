"""A peer's rounds computed again, from its commitments and what everybody has: settled weights and the text.

A function of these, to the bit: on the same kind of device, with the same numbers and versions, it gives the
payloads that an honest peer contributed; with others it gives nearly these (likeness.py). It uses the method
and the stage of the product, and what peers/worker/rounds/update_compute.py does to them, in its order.

Shapes: P numbers of the flat vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from swarmnet.audits.commitment import Commitment, Stretch
from swarmnet.audits.likeness import likeness
from swarmnet.identifiers import PeerId
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.flat_layout import Layout
from swarmnet.model.stage_compute import StageCompute, StageError
from swarmnet.optimizer.method import GradientError, add_own, steps_before_telling
from swarmnet.optimizer.own_steps.local_steps import LocalSteps


class Unknown(Exception):
    """This auditor has not what it takes; the message says what."""


class Known(Protocol):
    """What an auditor has."""

    def weights(self, applied: int) -> Tensor | None:
        """int32: the group's [P], and what it settles behind them, after that round has settled. None: not
        kept, or not settled yet."""

    def sets(self, settled: int, applied: int) -> bytes | None:
        """`SetNames.between` them, as the sets settled. None: some did not yet, or are forgotten."""

    def factor(self, round: int) -> int | None:
        """Of the learning rate, in thousandths, as it settled."""

    def text(self, peer: PeerId, counter: int) -> tuple[Tensor, Tensor]:
        """inputs_BT and labels_BT of a peer's microbatch. May raise Unknown."""


class Replay:
    """Of one peer's window, from its beginning. `own` has taken no step yet, and nobody else uses these."""

    def __init__(
        self, peer: PeerId, own: LocalSteps, compute: StageCompute, layout: Layout, known: Known
    ) -> None:
        self._peer, self._own, self._compute = peer, own, compute
        self._layout, self._known = layout, known
        self._gathered = self._stepped = 0
        """Tokens."""
        self._weights: Tensor | None = None
        self._at: Stretch | None = None
        compute.use_gradient(lambda _left: None)

    def begin(self, carried: bytes) -> None:
        """With what the peer carried into the window; ContributionError if it can be none."""
        self._own.begin_afresh(carried)

    def carried(self) -> bytes:
        """What an honest peer carries into the next window, after the payloads of this."""
        return self._own.carried()

    def tells_alike(self, one: bytes, other: bytes) -> float:
        """The likeness of two payloads. ContributionError if one of them is none."""
        return likeness(zip(self._own.moves_of(one), self._own.moves_of(other), strict=True))

    def carries_alike(self, carried: bytes) -> float:
        """... of what somebody says that it carried into the next window, with what comes out here."""
        ours = self._own.moves_in_all(self._own.carried())
        return likeness(zip(self._own.moves_in_all(carried), ours, strict=True))

    def payloads(self, window: Sequence[Commitment]) -> Iterator[bytes | None]:
        """What it contributed to each of the rounds, in their order; empty: nothing can come of what it says
        that it did. None whenever a microbatch was computed. Unknown where this auditor has to give up."""
        for commitment in window:
            for stretch in commitment.stretches:
                yield from self._compute_stretch(stretch)
            yield self._tell(commitment.round)

    def _compute_stretch(self, stretch: Stretch) -> Iterator[None]:
        self._require(stretch)
        if stretch.published:
            self._weights = self._known.weights(stretch.applied)
            self._publish(stretch.applied)
        self._at = stretch
        for counter in stretch.counters:
            yield
            inputs_BT, labels_BT = self._known.text(self._peer, counter)
            try:
                finished = self._compute.finish(counter, inputs_BT, labels_BT, inputs_BT)
            except StageError:
                continue
            self._gathered += finished.tokens
            if self._gathered >= self._own.tokens:
                self._step()
                self._publish(stretch.applied)

    def _require(self, stretch: Stretch) -> None:
        applied, rate = stretch.applied, self._known.factor(stretch.applied + 1)
        if stretch.sets != self._known.sets(stretch.settled, applied):
            raise Unknown(f"what it saw of the rounds up to {applied} is not what settled")
        if self._known.weights(applied) is None:
            raise Unknown(f"the weights after round {applied} are not kept here")
        if stretch.factor != rate:
            raise Unknown(
                f"it stepped by {stretch.factor} thousandths of the rate of round {applied + 1}, not {rate}"
            )

    def _publish(self, applied: int) -> None:
        assert self._weights is not None, "the first stretch of a window publishes"
        floats_P = to_floats(self._weights[: self._layout.size])
        add_own(self._own, floats_P, self._layout, applied)
        self._compute.publish([(0, floats_P)])

    def _step(self) -> None:
        assert self._at is not None
        tokens, self._gathered = self._gathered, 0
        round, factor = self._at.applied + 1, self._at.factor
        try:
            self._compute.use_gradient(
                lambda gradient: self._own.step(gradient, max(1, tokens), round, factor)
            )
        except GradientError:
            return
        self._stepped += tokens

    def _tell(self, round: int) -> bytes:
        if steps_before_telling(self._gathered, self._stepped, self._own.tokens):
            self._step()
        stepped, self._stepped = self._stepped, 0
        return self._own.tell(round, self._peer) if stepped else b""
