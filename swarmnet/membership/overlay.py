"""Which peers of its group a peer keeps links to, and how many hops then lead to everybody.

A small group is fully linked. A larger one is laid out on RINGS rings, on each in another order that a hash
of the peers' ids gives; everybody links to the peers before and after it on each ring. Who knows the same
peers comes to the same links on both sides, each ring alone keeps the group connected, and a union of random
rings is an expander: its diameter grows like the logarithm of the group (Bollobas and Fernandez de la Vega,
"The diameter of random regular graphs", Combinatorica 2, 1982).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from swarmnet.identifiers import PeerId

RINGS = 5
FULL_GROUP = 2 * RINGS + 1
"""Up to so many peers, everybody is linked to everybody: no more links than on the rings."""
GAP_TAKEN = RINGS
"""The how-many-smallest of the 2 * RINGS gaps to the neighbours speaks for the group's size: one that is
large because a neighbour is not there does no harm, nor one that is small by chance."""
SIZE_SLACK = 2.0
"""A group may be so many times as large as this gap speaks for: 19 of 20 peers then allow for all of a group
of 5 to 2,000 (counted)."""


RING = 2**64
"""Length of a ring: a place on it is eight bytes of a hash."""


@lru_cache(maxsize=2 * 4096)
def _positions(peer: PeerId) -> tuple[bytes, ...]:
    """Where a peer stands on each ring. Remembered: a group is laid out anew whenever somebody comes."""
    digest = hashlib.sha512(peer.encode()).digest()
    return tuple(digest[8 * ring : 8 * ring + 8] for ring in range(RINGS))


def choose_neighbours(me: PeerId, group: Iterable[PeerId]) -> frozenset[PeerId]:
    """The peers of `group` that `me` keeps links to: all of a small group, at most 2 * RINGS of a larger."""
    others = [peer for peer in group if peer != me]
    if len(others) < FULL_GROUP:
        return frozenset(others)
    chosen = set()
    positions = [(_positions(peer), peer) for peer in others]
    mine = _positions(me)
    for ring in range(RINGS):
        places = [(position[ring], peer) for position, peer in positions]
        here = (mine[ring], me)
        chosen.add(min((place for place in places if place > here), default=min(places))[1])
        chosen.add(max((place for place in places if place < here), default=max(places))[1])
    return frozenset(chosen)


def choose_some(me: PeerId, others: Iterable[PeerId], most: int) -> frozenset[PeerId]:
    """At most so many of `others`, drawn by a hash of both ids (rendezvous hashing, Thaler and Ravishankar
    1998): every peer draws others, and who joins or leaves changes few choices."""
    known = list(others)
    if len(known) <= most:
        return frozenset(known)
    return frozenset(_drawn(me, known)[:most])


def _drawn(me: PeerId, peers: Iterable[PeerId]) -> list[PeerId]:
    return sorted(peers, key=lambda peer: hashlib.sha256(f"{me}/{peer}".encode()).digest())


def choose_spread(me: PeerId, ranges: Mapping[PeerId, Collection[str]], most: int) -> frozenset[PeerId]:
    """Likewise, first one of each address range, then a second of each: a crowd has many keys and few
    networks. `ranges`: of each; those without any are as of one."""
    met: Counter[str] = Counter()
    place: dict[PeerId, int] = {}
    for peer in _drawn(me, ranges):
        theirs = ranges[peer] or ("",)
        place[peer] = max(met[each] for each in theirs)
        met.update(theirs)
    return frozenset(sorted(place, key=place.__getitem__)[:most])


def size_by_neighbours(me: PeerId, reached: Iterable[PeerId]) -> int:
    """How many peers the group has at most, this one included, by how near on the rings those stand that were
    reached. Of n peers the gaps are exponential with mean 1 / n; the expected k-th smallest of m such is
    (1 / m + ... + 1 / (m - k + 1)) / n (Renyi, "On the theory of order statistics", 1953)."""
    mine = [int.from_bytes(position) for position in _positions(me)]
    places = [[int.from_bytes(position) for position in _positions(peer)] for peer in reached]
    if not places:
        return 1
    gaps = []
    for ring in range(RINGS):
        ahead = [(place[ring] - mine[ring]) % RING for place in places]
        gaps += [min(ahead), min(RING - gap for gap in ahead)]
    taken = max(1, sorted(gaps)[GAP_TAKEN - 1]) / RING
    expected = sum(1 / (len(gaps) - smaller) for smaller in range(GAP_TAKEN))
    return math.ceil(SIZE_SLACK * expected / taken)


def links(peers: int) -> int:
    """Neighbours of each peer in a group of so many, at most; at least 1."""
    return max(1, min(peers - 1, 2 * RINGS))


def hops(peers: int) -> int:
    """Hops within which everybody of a group of so many is reached, this peer included in the count.

    The smallest d with (k - 1)**(d - 1) >= 2 n ln n for k = 2 * RINGS links each (the theorem above): one
    more than the diameters of such rings are, which leaves room for links that are just being replaced."""
    if peers <= FULL_GROUP:
        return 1
    degree = 2 * RINGS
    return 1 + math.ceil(math.log(2 * peers * math.log(peers), degree - 1))
