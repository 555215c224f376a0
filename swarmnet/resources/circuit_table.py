"""Decide which circuits a relay carries, which one ends when there are too many, and which are idle.

A circuit is a libp2p connection between two peers through a third one, the relay. A *place* is one of the
circuits that the relay carries at a time.
Keys are free and networks are not, so places are shared by address range. If no place is left, the newest
circuit of the range with the most circuits ends; this may be the requested one. The module does no IO. All
times are seconds on the caller's clock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from swarmnet.identifiers import PeerId

IDLE_SECONDS = 60.0
"""A circuit without a byte in either direction for this time ends. Two peers with links on it send a
heartbeat every second (`membership.BEAT_SECONDS`); without links libp2p's yamux sends a ping every 30 s."""


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """Maximum numbers of open circuits."""

    most: int
    """Maximum in total."""
    most_of_peer: int
    """Maximum from or to one peer."""
    most_of_range: int
    """Maximum that the peers of one address range have opened."""


@dataclass(slots=True)
class _Circuit:
    source: PeerId
    target: PeerId
    address_range: str
    """Address range of the source."""
    carried_at: float
    """Time of the last byte, or of opening."""


class NoCircuit(Exception):
    """A requested circuit is refused; `code` is the reason."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def circuit_to_displace(held: Mapping[int, str], newcomer: str) -> int | None:
    """Return the number of the circuit that must end for a new one: the newest of the address range with the
    most circuits. `held` maps circuit numbers, which grow with time, to address ranges. `newcomer` is the
    range of the new circuit. None means that no circuit ends and the new one is refused."""
    counts = Counter(held.values())
    most = max(counts.values(), default=0)
    if counts[newcomer] + 1 >= most:  # No range would have more than the newcomer's.
        return None
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
        """Open a circuit from `source` in `address_range` to `target`. Returns its number, and the number of
        the circuit that the caller must end for it (None: no circuit). Raises NoCircuit if the range or the
        source has its maximum, or if no other circuit can end for it."""
        ranges = {number: circuit.address_range for number, circuit in self._circuits.items()}
        if list(ranges.values()).count(address_range) >= self.limits.most_of_range:
            raise NoCircuit("range_full")
        if len(self._circuits_of(source)) >= self.limits.most_of_peer:
            raise NoCircuit("peer_full")
        displaced = None
        at_target = self._circuits_of(target)  # If the target is full, one of these must end.
        if len(at_target) >= self.limits.most_of_peer:
            displaced = circuit_to_displace({number: ranges[number] for number in at_target}, address_range)
            if displaced is None:
                raise NoCircuit("peer_full")
        elif len(ranges) >= self.limits.most:
            displaced = circuit_to_displace(ranges, address_range)
            if displaced is None:
                raise NoCircuit("circuits_full")
        if displaced is not None:
            del self._circuits[displaced]
        number = next(self._numbers)
        self._circuits[number] = _Circuit(source, target, address_range, now)
        return number, displaced

    def carried(self, number: int, now: float) -> None:
        """Record that bytes went through a circuit."""
        if number in self._circuits:
            self._circuits[number].carried_at = now

    def ends_at(self, number: int) -> float:
        """Return when a circuit ends without further bytes; minus infinity if it is not open."""
        circuit = self._circuits.get(number)
        return circuit.carried_at + IDLE_SECONDS if circuit is not None else float("-inf")

    def close(self, number: int) -> None:
        """Free the place of a circuit; ignored if it is not open."""
        self._circuits.pop(number, None)

    def _circuits_of(self, peer: PeerId) -> list[int]:
        """Return the numbers of the circuits that have this peer at one of their ends."""
        return [number for number, each in self._circuits.items() if peer in (each.source, each.target)]
