"""Peers that lie in the learning benchmark: what they contribute instead of honest votes.

Contributions are those of `sign-muon`: a bit for each number of a fragment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from peers.config.errors import UserError
from swarmnet.identifiers import PeerId

LieKind = Literal[
    "flip", "noise", "zero", "repeat", "copy", "collude", "covert", "lazy", "slow-flip", "honest-first"
]
"""`zero` votes for one sign everywhere. `lazy` computes the same microbatch over and over. `slow-flip` flips
more bits from round to round, at last all."""
Bits: TypeAlias = NDArray[np.uint8]
COVERT_ERRORS = 0.25
"""Share of bits in which a covert liar differs from the common direction. Two of them then have a correlation
of 0.25, as honest peers have early in training."""
HONEST_SHARE = 0.5
"""Share of the steps in which a liar of kind `honest-first` is honest."""


@dataclass(frozen=True, slots=True)
class Liars:
    """The last `count` peers, which lie in one way."""

    count: int = 0
    kind: LieKind = "flip"

    @classmethod
    def parse(cls, text: str, peers: int) -> Liars:
        """Parse `N:KIND`; an empty text has none. Raises UserError."""
        if not text:
            return cls()
        number, _, kind = text.partition(":")
        if not number.isdecimal() or not 0 < int(number) < peers or kind not in get_args(LieKind):
            raise UserError(
                f"--liars {text}: write N:KIND, with N below the {peers} peers and KIND one of "
                f"{', '.join(get_args(LieKind))}"
            )
        return cls(int(number), cast(LieKind, kind))


HONEST = Liars()


class Lies:
    """Replaces the contributions of liars, stage by stage."""

    def __init__(self, liars: Liars, names: Sequence[PeerId], rounds: int, fragments: int, seed: int) -> None:
        self._kind = liars.kind
        self._liars = names[len(names) - liars.count :]
        self._copied = names[0]
        self._rounds = rounds
        self._fragments = fragments
        self._seed = seed
        self._first: dict[tuple[int, int, PeerId], bytes] = {}
        """First contribution to each stage and fragment of each liar, which it repeats."""

    @property
    def any(self) -> bool:
        return bool(self._liars)

    def replace(self, stage: int, round: int, payloads: Mapping[PeerId, bytes]) -> dict[PeerId, bytes]:
        """Return the contributions to a round of a stage, with those of liars replaced."""
        lies = {peer: self._lie(stage, round, peer, payloads) for peer in self._liars if peer in payloads}
        return {**payloads, **lies}

    def _lie(self, stage: int, round: int, peer: PeerId, payloads: Mapping[PeerId, bytes]) -> bytes:
        honest = np.frombuffer(payloads[peer], np.uint8)
        fragment = round % self._fragments
        match self._kind:
            case "flip":
                return (~honest).tobytes()
            case "honest-first" if round >= HONEST_SHARE * self._rounds:
                return (~honest).tobytes()
            case "slow-flip":
                # The same bits of a fragment stay flipped.
                thresholds = self._generator(stage, fragment, peer).random((len(honest), 8))
                flipped = thresholds < (round + 1) / self._rounds
                return (honest ^ np.packbits(flipped, axis=1)[:, 0]).tobytes()
            case "noise":
                return self._bits(len(honest), stage, round, peer).tobytes()
            case "zero":
                return bytes(len(honest))
            case "repeat":
                return self._first.setdefault((stage, fragment, peer), payloads[peer])
            case "copy":
                return payloads[self._copied]
            case "collude":
                return self._bits(len(honest), stage, fragment, PeerId("all")).tobytes()
            case "covert":
                common = self._bits(len(honest), stage, fragment, PeerId("all"))
                errors = self._generator(stage, round, peer).random((len(honest), 8)) < COVERT_ERRORS
                return (common ^ np.packbits(errors, axis=1)[:, 0]).tobytes()
        return payloads[peer]

    def _bits(self, size: int, stage: int, number: int, peer: PeerId) -> Bits:
        return self._generator(stage, number, peer).integers(0, 256, size, np.uint8)

    def _generator(self, stage: int, number: int, peer: PeerId) -> np.random.Generator:
        return np.random.default_rng([self._seed, stage, number, *peer.encode()])
