"""Which circuits a relay carries: who must give way when there are too many, and which have ended by silence.

Keys are free and networks are not, so places are shared by address range: when there is no place left, the
newest circuit of the range that has most gives way, be that the one that is asked for. No IO. Times in
seconds on the caller's clock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet.identifiers import PeerId

IDLE_SECONDS = 60.0
"""A circuit that carries no byte either way for so long ends. Two peers with links on it send each other a
beat every second (`membership.BEAT_SECONDS`); without links libp2p's yamux sends a ping every 30 s."""


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """How many circuits may be open at once."""

    most: int
    """In all."""
    most_of_peer: int
    """From or to one peer."""
    most_of_range: int
    """That peers of one address range have opened."""


@dataclass(slots=True)
class _Circuit:
    source: PeerId
    target: PeerId
    address_range: str
    """Of the source."""
    carried_at: float
    """When the last byte went through it, or when it was opened."""


class NoCircuit(Exception):
    """A circuit that was asked for is not given; `code` says why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def gives_way(held: Mapping[int, str], newcomer: str) -> int | None:
    """Of places that are numbered in their order, each with its address range: the newest of the range that
    has most, the newcomer's counted with it. None: the newcomer itself gives way."""
    counts = Counter(held.values())
    if not counts or counts[newcomer] + 1 >= max(counts.values()):
        return None
    most = max(counts.values())
    return max(number for number, address_range in held.items() if counts[address_range] == most)


class CircuitTable:
    """The open circuits of one relay."""

    def __init__(self, limits: CircuitLimits) -> None:
        self.limits = limits
        self._circuits: dict[int, _Circuit] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._circuits)

    def open(
        self, *, source: PeerId, target: PeerId, address_range: str, now: float
    ) -> tuple[int, int | None]:
        """Take a place for a circuit from `source` in `address_range` to `target`; its number, and the
        number of the circuit that gives way for it, which the caller ends. Raises NoCircuit."""
        ranges = {number: circuit.address_range for number, circuit in self._circuits.items()}
        if sum(other == address_range for other in ranges.values()) >= self.limits.most_of_range:
            raise NoCircuit("range_full")
        if len(self._with(source)) >= self.limits.most_of_peer:
            raise NoCircuit("peer_full")
        displaced = None
        at_target = self._with(target)
        if len(at_target) >= self.limits.most_of_peer:
            displaced = gives_way({number: ranges[number] for number in at_target}, address_range)
            if displaced is None:
                raise NoCircuit("peer_full")
        elif len(ranges) >= self.limits.most:
            displaced = gives_way(ranges, address_range)
            if displaced is None:
                raise NoCircuit("circuits_full")
        if displaced is not None:
            del self._circuits[displaced]
        number = next(self._numbers)
        self._circuits[number] = _Circuit(source, target, address_range, now)
        return number, displaced

    def carried(self, number: int, now: float) -> None:
        """Bytes went through a circuit."""
        if number in self._circuits:
            self._circuits[number].carried_at = now

    def ends_at(self, number: int) -> float:
        """When a circuit ends if no more bytes go through it; minus infinity if it has no place any more."""
        circuit = self._circuits.get(number)
        return circuit.carried_at + IDLE_SECONDS if circuit is not None else float("-inf")

    def close(self, number: int) -> None:
        """Give its place back. A circuit that has none any more is ignored."""
        self._circuits.pop(number, None)

    def _with(self, peer: PeerId) -> list[int]:
        """Circuits that have this peer at one of their ends."""
        return [number for number, each in self._circuits.items() if peer in (each.source, each.target)]
