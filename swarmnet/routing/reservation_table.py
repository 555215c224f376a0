"""Reserve places on one peer for microbatches that are here or on their way.

A sender requests a place before it sends a body: the hidden states of a microbatch. The answer is the time at
which the microbatch could begin, computed from the bookings alone. The request is refused if that is later
than the sender expected, or if the sender has its maximum of places. A place is kept until its microbatch is
done. It ends earlier if the sender returns it or disconnects, or if its expected end has passed.

Claims of other peers decide little. This peer computes from its own cost table how long a microbatch stays. A
sender whose bodies do not come loses the right to places for a time that doubles.

The module does no IO. All times are seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.backoff import doubled
from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.capacity import Booking, Load, earliest_start
from swarmnet.run.path_rules import PathHeader

TOLERANCE = 0.25
"""Accepted delay of a start beyond the requested time, in multiples of the own compute."""
PLACES_PER_SLOT = 4
"""Microbatches on their way to a peer, for each that fits in its memory, because they come one after another.
An early one needs memory only for its input; 40 inputs are as large as one graph
(`pipeline/flow_control.py`)."""
MAX_PLACES = 64
"""Maximum number of microbatches on their way. The list is sent to every neighbour."""
SHARE = 0.5
"""Maximum share of the places that one sender may have."""
LATE_SECONDS = 5.0
"""Seconds after the expected end from which on a microbatch that has not come is no longer expected."""
LONGEST_SECONDS = 600.0
"""Maximum duration of a booking, and how far ahead it may start."""
SMOOTHING = 0.1
"""Weight of a new measurement of the own compute."""
FIRST_SHUN_SECONDS, LONGEST_SHUN_SECONDS = 5.0, 300.0
MAX_SHUNNED = 1024


@dataclass(slots=True)
class HeldReservation:
    """A reserved place. `asker` is the peer that sends the body; `came` tells whether the body arrived."""

    asker: PeerId
    header: PathHeader
    """Header of the microbatch at this peer."""
    booking: Booking
    came: bool = False


class ReservationTable:
    """The places on one peer. `forward_seconds` and `backward_seconds` are its own measured compute times."""

    def __init__(self, slots: int, is_last: bool) -> None:
        """Create the table. `slots` is how many microbatches fit in memory between forward and backward. The
        last stage does both passes at once, one microbatch after another."""
        self.memory = 1 if is_last else slots
        self.most = max(2, min(MAX_PLACES, PLACES_PER_SLOT * slots))
        self.is_last = is_last
        self.forward_seconds = 0.0
        self.backward_seconds = 0.0
        self.held: dict[MicrobatchId, HeldReservation] = {}
        self._failed_senders: dict[PeerId, tuple[int, float]] = {}
        """Maps a sender to (times in a row that bodies did not come, end of its pause); newest last."""

    @property
    def load(self) -> Load:
        """Return the load that is reported to other peers."""
        bookings = tuple(place.booking for place in self.held.values())
        return Load(self.memory, self.forward_seconds, self.backward_seconds, bookings)

    def forward_took(self, seconds: float) -> None:
        self.forward_seconds = _smoothed(self.forward_seconds, seconds)

    def backward_took(self, seconds: float) -> None:
        self.backward_seconds = _smoothed(self.backward_seconds, seconds)

    def ask(
        self,
        key: MicrobatchId,
        asker: PeerId,
        header: PathHeader,
        arrival: float,
        wanted: float,
        rest: float,
        firm: bool,
        now: float,
    ) -> float | None:
        """Book a place for a body that `asker` wants to send. Returns the start of the forward pass, or None
        to refuse. The body arrives at `arrival`, and `asker` expects the start at `wanted`. A much later
        start is refused unless the request is `firm`. `rest` is the time from the forward pass to the
        gradient's arrival here."""
        held = self.held.get(key)
        if held is not None and (held.came or held.asker != asker):
            return None  # A peer cannot take another's place by naming its microbatch.
        if not self._may_reserve(asker, key, now) or arrival > now + LONGEST_SECONDS:
            return None
        load = self.load
        if held is not None:  # A repeated request replaces its own booking.
            others = tuple(place.booking for other, place in self.held.items() if other != key)
            load = Load(self.memory, self.forward_seconds, self.backward_seconds, others)
        seconds = min(LONGEST_SECONDS, load.compute_seconds + rest)
        start = earliest_start(load, max(arrival, now), seconds, now)
        if start > now + LONGEST_SECONDS:
            return None
        if not firm and start - max(wanted, now) > TOLERANCE * load.compute_seconds:
            return None
        self.held[key] = HeldReservation(asker, header, Booking(start, start + seconds))
        return start

    def came(self, key: MicrobatchId, sender: PeerId, header: PathHeader, rest: float, now: float) -> None:
        """Record that a body from `sender` arrived and was accepted. Without a place it gets one that starts
        now. The sender's earlier failures to deliver are forgiven."""
        place = self.held.get(key)
        if place is None:
            seconds = min(LONGEST_SECONDS, self.load.compute_seconds + rest)
            place = HeldReservation(sender, header, Booking(now, now + seconds))
            self.held[key] = place
        place.asker, place.header, place.came = sender, header, True
        self._failed_senders.pop(sender, None)

    def begins(self, key: MicrobatchId, start: float) -> None:
        """Set the booking's start to the known start of the forward pass. A delay also moves its end."""
        place = self.held.get(key)
        if place is not None:
            late = max(0.0, start - place.booking.start)
            place.booking = Booking(start, place.booking.release + late)

    def answered_at(self, key: MicrobatchId, back: float) -> None:
        """Set the booking's end: the gradient is expected at `back`, and the backward pass follows."""
        place = self.held.get(key)
        if place is not None:
            place.booking = Booking(place.booking.start, back + self.backward_seconds)

    def expects(self, key: MicrobatchId, sender: PeerId) -> bool:
        """Return whether `sender` has booked a place for this microbatch and the body has not come yet."""
        place = self.held.get(key)
        return place is not None and not place.came and place.asker == sender

    def end(self, key: MicrobatchId) -> bool:
        """Free the place of a microbatch that is done or cancelled. Returns whether it had one."""
        return self.held.pop(key, None) is not None

    def gone(self, asker: PeerId, now: float) -> list[MicrobatchId]:
        """Free the places of a lost sender whose bodies have not arrived. Returns their microbatches. If
        there are any, the sender's next requests are refused for a while."""
        lost = [key for key, place in self.held.items() if place.asker == asker and not place.came]
        for key in lost:
            del self.held[key]
        if lost:
            self._shun(asker, now)
        return lost

    def lapse(self, now: float) -> list[MicrobatchId]:
        """Free the places whose time has passed without a body, and refuse places to their senders for a
        while. Returns their microbatches."""
        late = [
            key
            for key, place in self.held.items()
            if not place.came and now >= place.booking.release + LATE_SECONDS
        ]
        for asker in {self.held.pop(key).asker for key in late}:
            self._shun(asker, now)
        return late

    def _shun(self, asker: PeerId, now: float) -> None:
        """Refuse places to `asker` for a pause that doubles each time."""
        times, _ = self._failed_senders.pop(asker, (0, 0.0))
        pause = doubled(FIRST_SHUN_SECONDS, times, LONGEST_SHUN_SECONDS)
        self._failed_senders[asker] = (times + 1, now + pause)
        if len(self._failed_senders) > MAX_SHUNNED:
            oldest = next(iter(self._failed_senders))
            del self._failed_senders[oldest]

    def _may_reserve(self, asker: PeerId, key: MicrobatchId, now: float) -> bool:
        """Return whether `asker` is in no pause and has fewer places than its maximum."""
        _, pause_end = self._failed_senders.get(asker, (0, 0.0))
        if pause_end > now:
            return False
        expected = [place.asker for other, place in self.held.items() if not place.came and other != key]
        return len(expected) < self.most and expected.count(asker) < max(1, SHARE * self.most)


def _smoothed(known: float, took: float) -> float:
    """Return the smoothed seconds. `known` is 0 before the first measurement."""
    return known + SMOOTHING * (took - known) if known else took
