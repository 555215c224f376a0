"""Schedules downloads of contributions that this peer lacks: which neighbour to ask, and when to retry.

A *holder* is a neighbour that has announced a contribution. Other peers may hold it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.overlay import choose_some
from swarmnet.rounds.events import Reference, RequestContributions
from swarmnet.rounds.upload_meter import UploadMeter

PULL_SECONDS = 1.0
"""A contribution that has not arrived this long after the request is requested from another holder."""
SLOW_BYTES_PER_SECOND = 100_000
"""Slowest transfer rate that is allowed for. A CUBIC connection at 50 ms and 1 % loss carries 330 KB/s, and
three contributions may share it. Otherwise repeated requests filled the links (25M parameters, measured)."""
LONGEST_PULL_SECONDS = 30.0
MAX_ASKS = 8
"""Requests after which a contribution is given up. Its holders offer it again, as the sets differ."""
DETOUR_SECONDS = 0.25
"""How long a contribution waits for a holder that has had fewer requests. Over links like those of
peers/lab/bench/group.py, a second neighbour usually has it by then."""
HELPER_SECONDS = 2.0
"""How long a contribution waits to be announced by a helper, if a helper is a neighbour. Helpers are reducers
with good uploads. A result reaches all of them, and then their neighbours, in 0.7 s over the links above."""
SHARE_SLACK = 1.25
"""Factor on a neighbour's fair part of a round that limits first requests to it. Without a limit, the peers
with the fastest links sent 2.3 times as much as they received (32 peers, measured); with it, 1.3 times."""
MAX_PULLS = 4096
"""Downloads at a time. Ids cost a dishonest peer nothing, so their number needs a bound."""
MAX_OF_ONE = MAX_PULLS // 4
"""Downloads at a time that only one and the same neighbour has named. It must not displace others."""


@dataclass(slots=True)
class _Pull:
    """One contribution that this peer lacks."""

    reference: Reference
    holders: list[PeerId]
    """Neighbours that hold it; the one asked last comes first."""
    asked_at: float
    """When it was requested last; before the first request, since when it is known."""
    asks: int = 0
    first_wait: float = DETOUR_SECONDS
    """How long its first request waits at most."""
    doubted: bool = False
    """True if its only holder did not send it in time. Rounds no longer wait for it, as it may not exist."""

    @property
    def due(self) -> float:
        """When it is requested next: soon if it never was, and else once a slow transfer would be over."""
        if not self.asks:
            return self.asked_at + self.first_wait
        transfer_seconds = min(LONGEST_PULL_SECONDS, self.reference.size / SLOW_BYTES_PER_SECOND)
        return self.asked_at + max(PULL_SECONDS, transfer_seconds)


class FetchScheduler:
    """The downloads of contributions. A download is *doubted* if its only holder did not send it in time.

    The caller updates `fair_share` and `helpers` as the group changes. When a neighbour was asked for
    `fair_share` contributions of a round, this peer first waits for other holders of more. If a helper is
    among the neighbours, it also waits until a helper holds a contribution. Only one helper, drawn for each
    contributor, fetches from the contributor itself."""

    def __init__(self, me: PeerId, neighbours: Container[PeerId] = ()) -> None:
        self.fair_share = float("inf")
        self.helpers: Collection[PeerId] = ()
        """The helpers of the group. They are asked before all others, without a limit."""
        self.meter = UploadMeter()
        """How fast neighbours send what was requested from them."""
        self._me = me
        self._neighbours = neighbours
        self._asked: Counter[tuple[int, PeerId]] = Counter()
        """(round, neighbour) -> number of requests to it for contributions of the round."""
        self._pulls: dict[ContributionId, _Pull] = {}
        self._of_round: Counter[int] = Counter()
        """Downloads of each round that are not doubted."""
        self._doubted: Counter[int] = Counter()
        """Downloads of each round that are doubted."""
        self._due = float("inf")
        """No download is due before this time."""

    def __len__(self) -> int:
        return len(self._pulls)

    def of_round(self, round: int) -> bool:
        """Return whether contributions of the round are being downloaded, without doubted ones."""
        return self._of_round[round] > 0

    def under_way(self, round: int) -> bool:
        """Return whether contributions of the round are being downloaded, doubted ones included."""
        return self._of_round[round] > 0 or self._doubted[round] > 0

    def offered(
        self, peer: PeerId, references: Iterable[Reference], now: float
    ) -> list[RequestContributions]:
        """Record that `peer` holds these contributions, which this peer lacks. Returns at most one request
        to `peer`: for those not requested from any peer yet, up to `fair_share` of each round. No download
        begins beyond `MAX_PULLS` in all, or beyond `MAX_OF_ONE` that only `peer` has named."""
        wanted: list[ContributionId] = []
        named_alone = sum(pull.holders == [peer] for pull in self._pulls.values())
        for reference in references:
            waits = self._waits_for_helper(peer, reference)
            pull = self._pulls.get(reference.id)
            if pull is None:  # Begin a download, if there is room.
                if len(self._pulls) >= MAX_PULLS or named_alone >= MAX_OF_ONE:
                    continue
                named_alone += 1
                pull = _Pull(reference, [], now, first_wait=HELPER_SECONDS if waits else DETOUR_SECONDS)
                self._pulls[reference.id] = pull
                self._of_round[reference.round] += 1
            if peer not in pull.holders:
                pull.holders.append(peer)
                self._set_doubted(pull, doubted=False)  # This holder was not asked yet.
                is_below_share = self._asked[reference.round, peer] < self.fair_share
                if not pull.asks and (peer in self.helpers or (is_below_share and not waits)):
                    self._record_request(pull, peer, now)
                    wanted.append(reference.id)
                self._due = min(self._due, pull.due)
        return [RequestContributions(peer, tuple(wanted))] if wanted else []

    def arrived(self, reference: Reference, sender: PeerId, now: float) -> tuple[PeerId, ...]:
        """End the download of a contribution that `sender` has sent. Returns its known holders; none if there
        was no download of it."""
        pull = self._pulls.get(reference.id)
        if pull is None:
            return ()
        self.meter.arrived(reference.id, sender, reference.size, now)
        self._end(reference.id, now)
        return tuple(pull.holders)

    def left(self, peer: PeerId, now: float) -> None:
        """Remove a neighbour that left from all holders. What was requested from it is due at once from
        another holder; a download without another one ends."""
        self.meter.left(peer)
        for identity, pull in list(self._pulls.items()):
            if peer not in pull.holders:
                continue
            if pull.holders[0] == peer:
                pull.asked_at = now - LONGEST_PULL_SECONDS  # Due at once.
                self._due = min(self._due, pull.due)
            pull.holders.remove(peer)
            if not pull.holders:
                self._end(identity, now)

    def forget_until(self, round: int, now: float) -> None:
        """Drop the downloads of settled rounds, up to `round`."""
        for identity, pull in list(self._pulls.items()):
            if pull.reference.round <= round:
                self._end(identity, now)
        for of_round, holder in list(self._asked):
            if of_round <= round:
                del self._asked[of_round, holder]

    def again(
        self, now: float, wanted: Callable[[Reference], bool] = lambda reference: True
    ) -> list[RequestContributions]:
        """Return the requests that are due, one for each download. A first request goes to the holder with
        the fewest requests, a repeated one to the next holder. If the only holder is asked again, the
        download is doubted. It ends after `MAX_ASKS` requests, or if `wanted` is false for it."""
        if now < self._due:
            return []
        requests = []
        for identity, pull in list(self._pulls.items()):
            if now < pull.due:
                continue
            if pull.asks >= MAX_ASKS or not wanted(pull.reference):
                self._end(identity, now)
            else:
                if pull.asks:
                    last_asked = pull.holders.pop(0)
                    pull.holders.append(last_asked)
                    self._set_doubted(pull, doubted=len(pull.holders) == 1)
                    holder = pull.holders[0]
                else:
                    holder = self._holder_asked_least(pull)
                self._record_request(pull, holder, now)
                requests.append(RequestContributions(holder, (identity,)))
        self._due = min((pull.due for pull in self._pulls.values()), default=float("inf"))
        return requests

    def next_deadline(self) -> float:
        return self._due

    def _waits_for_helper(self, peer: PeerId, reference: Reference) -> bool:
        """Return whether a helper should hold a contribution of `peer` before this peer fetches it."""
        if peer in self.helpers or not any(helper in self._neighbours for helper in self.helpers):
            return False
        return not (peer == reference.peer and self._me in choose_some(peer, self.helpers, 1))

    def _holder_asked_least(self, pull: _Pull) -> PeerId:
        asked = self._asked
        return min(
            pull.holders, key=lambda holder: (holder not in self.helpers, asked[pull.reference.round, holder])
        )

    def _record_request(self, pull: _Pull, holder: PeerId, now: float) -> None:
        """Record a request to `holder`, which moves to the front of the holders."""
        self.meter.requested(pull.reference.id, holder, now)
        pull.holders.remove(holder)
        pull.holders.insert(0, holder)
        pull.asks += 1
        pull.asked_at = now
        self._asked[pull.reference.round, holder] += 1

    def _set_doubted(self, pull: _Pull, doubted: bool) -> None:
        """Set `pull.doubted`, and count the download of its round accordingly."""
        if pull.doubted != doubted:
            _decrement(self._counts_with(pull), pull.reference.round)
            pull.doubted = doubted
            self._counts_with(pull)[pull.reference.round] += 1

    def _counts_with(self, pull: _Pull) -> Counter[int]:
        """Return the counts by round that include this download."""
        return self._doubted if pull.doubted else self._of_round

    def _end(self, identity: ContributionId, now: float) -> None:
        pull = self._pulls.pop(identity)
        self.meter.ended(identity, now)
        _decrement(self._counts_with(pull), pull.reference.round)
        if not self._pulls:
            self._due = float("inf")


def _decrement(counts: Counter[int], round: int) -> None:
    counts[round] -= 1
    if not counts[round]:
        del counts[round]
