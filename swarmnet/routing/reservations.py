"""Places on one peer for microbatches that are here or on their way: who asked, from when, until when.

Whoever sends a body asks first (reservation_requests.py). The answer follows from the bookings alone: when a
microbatch that arrives then could begin. It is a no where that is later than the asker thought, and where the
asker has as many places as it may have. A place is kept until its microbatch is done, until the asker gives
it back or is gone, or until the time has passed at which all should have been over.

What others claim decides little: how long a microbatch stays is worked out here, from the own table of costs
to go, and bodies that do not come cost their sender its places for a while that doubles.

No IO. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.backoff import doubled
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.capacity import Booking, Load, earliest_start
from swarmnet.run.path_rules import Header

TOLERANCE = 0.25
"""Who could begin no more than so many times its own compute later than asked says yes."""
PLACES_PER_SLOT = 4
"""Microbatches on their way to a peer, for each that it has memory for: they come one after another.
Those that come early wait with nothing but their input; 40 of these are as large as one graph
(pipeline/flow_control.py)."""
MOST_PLACES = 64
"""On their way: a list that is told to every neighbour."""
SHARE = 0.5
"""Of the places, the most that one asker may have."""
LATE_SECONDS = 5.0
"""After the time at which all should have been over, a microbatch that has not come is no longer expected."""
LONGEST_SECONDS = 600.0
"""No place is booked for longer, or for later than that."""
SMOOTHING = 0.1
"""Weight of a new measurement of the own compute."""
FIRST_SHUN_SECONDS, LONGEST_SHUN_SECONDS = 5.0, 300.0
MOST_SHUNNED = 1024


@dataclass(slots=True)
class Place:
    asker: PeerId
    header: Header
    """The microbatch's, here."""
    booking: Booking
    came: bool = False


class Places:
    """Of one peer. `forward_seconds` and `backward_seconds`: its own compute, as measured so far."""

    def __init__(self, slots: int, is_last: bool) -> None:
        """`slots`: microbatches between forward and backward that it has memory for. The last stage does both
        passes at once, one after another."""
        self.memory = 1 if is_last else slots
        self.most = max(2, min(MOST_PLACES, PLACES_PER_SLOT * slots))
        self.is_last = is_last
        self.forward_seconds = self.backward_seconds = 0.0
        self.held: dict[MicrobatchId, Place] = {}
        self._lapsed: dict[PeerId, tuple[int, float]] = {}
        """Asker -> how often in a row bodies did not come, and until when it gets no place; newest last."""

    @property
    def load(self) -> Load:
        """What to tell others."""
        bookings = tuple(place.booking for place in self.held.values())
        return Load(self.memory, self.forward_seconds, self.backward_seconds, bookings)

    def forward_took(self, seconds: float) -> None:
        self.forward_seconds = _smoothed(self.forward_seconds, seconds)

    def backward_took(self, seconds: float) -> None:
        self.backward_seconds = _smoothed(self.backward_seconds, seconds)

    def ask(
        self, key: MicrobatchId, asker: PeerId, header: Header, arrival: float, wanted: float, rest: float,
        firm: bool, now: float,
    ) -> float | None:  # fmt: skip
        """When a microbatch that arrives then begins; None: not here. `wanted`: when the asker thought that
        it would, and a no is the answer if that is much too early, unless it is `firm`. `rest`: what the path
        takes from the end of the forward here, without compute here."""
        known = self.held.get(key)
        if known is not None and (known.came or known.asker != asker):
            return None  # Nobody takes another's place by naming its microbatch.
        if not self._may_have(asker, key, now) or arrival > now + LONGEST_SECONDS:
            return None
        load = self.load
        if known is not None:
            others = tuple(place.booking for k, place in self.held.items() if k != key)
            load = Load(self.memory, self.forward_seconds, self.backward_seconds, others)
        seconds = min(LONGEST_SECONDS, load.compute_seconds + rest)
        start = earliest_start(load, max(arrival, now), seconds, now)
        if start > now + LONGEST_SECONDS:
            return None
        if not firm and start - max(wanted, now) > TOLERANCE * load.compute_seconds:
            return None
        self.held[key] = Place(asker, header, Booking(start, start + seconds))
        return start

    def came(self, key: MicrobatchId, sender: PeerId, header: Header, rest: float, now: float) -> None:
        """Its body is here and was taken, whether it was expected or not."""
        place = self.held.get(key)
        if place is None:
            seconds = min(LONGEST_SECONDS, self.load.compute_seconds + rest)
            place = self.held[key] = Place(sender, header, Booking(now, now + seconds))
        place.asker, place.header, place.came = sender, header, True
        self._lapsed.pop(sender, None)

    def begins(self, key: MicrobatchId, start: float) -> None:
        """Its forward begins then, it is known by now."""
        place = self.held.get(key)
        if place is not None:
            late = max(0.0, start - place.booking.start)
            place.booking = Booking(start, place.booking.release + late)

    def answered_at(self, key: MicrobatchId, back: float) -> None:
        """Its gradient is expected here then."""
        place = self.held.get(key)
        if place is not None:
            place.booking = Booking(place.booking.start, back + self.backward_seconds)

    def expects(self, key: MicrobatchId, sender: PeerId) -> bool:
        """Whether this one has booked a place for it that it has not come to yet."""
        place = self.held.get(key)
        return place is not None and not place.came and place.asker == sender

    def end(self, key: MicrobatchId) -> bool:
        """It is done, or nobody wants it any more. Whether it had a place."""
        return self.held.pop(key, None) is not None

    def gone(self, asker: PeerId, now: float) -> list[MicrobatchId]:
        """The asker is lost: those that had not come are given up."""
        lost = [key for key, place in self.held.items() if place.asker == asker and not place.came]
        for key in lost:
            del self.held[key]
        if lost:
            self._shun(asker, now)
        return lost

    def lapse(self, now: float) -> list[MicrobatchId]:
        """Give up those that should have been over by now and never came."""
        late = [
            key for key, place in self.held.items()
            if not place.came and now >= place.booking.release + LATE_SECONDS
        ]  # fmt: skip
        for asker in {self.held.pop(key).asker for key in late}:
            self._shun(asker, now)
        return late

    def _shun(self, asker: PeerId, now: float) -> None:
        times, _ = self._lapsed.pop(asker, (0, 0.0))
        pause = doubled(FIRST_SHUN_SECONDS, times, LONGEST_SHUN_SECONDS)
        self._lapsed[asker] = (times + 1, now + pause)
        if len(self._lapsed) > MOST_SHUNNED:
            del self._lapsed[next(iter(self._lapsed))]

    def _may_have(self, asker: PeerId, key: MicrobatchId, now: float) -> bool:
        if self._lapsed.get(asker, (0, 0.0))[1] > now:
            return False
        expected = [place.asker for k, place in self.held.items() if not place.came and k != key]
        return len(expected) < self.most and expected.count(asker) < max(1, SHARE * self.most)


def _smoothed(known: float, took: float) -> float:
    """0: nothing is known yet."""
    return known + SMOOTHING * (took - known) if known else took
