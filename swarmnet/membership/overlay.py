"""The overlay of a group: to which peers each peer keeps links, and how many hops reach the whole group.

A small group is fully linked. A larger one is laid out on `RINGS` rings, each ordered by another hash of the
peers' ids. Every peer links to its predecessor and successor on each ring. Peers that know the same members
choose the same links on both sides, and each ring alone keeps the group connected. A union of random rings is
an expander. Its diameter grows like the logarithm of the group (Bollobas and Fernandez de la Vega, "The
diameter of random regular graphs", Combinatorica 2, 1982).
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
"""A group of at most this many peers is fully linked, which takes no more links than the rings."""
GAP_TAKEN = RINGS
"""The group's size is estimated from the gap of this rank, counted from the smallest of the 2 * `RINGS` gaps
to neighbours. Gaps that are large for a missing neighbour, or small by chance, do no harm."""
SIZE_SLACK = 2.0
"""Factor on this estimate: 19 of 20 peers then cover the whole group, of 5 to 2,000 peers (counted)."""


HELPER_LINKS = 3
"""Helpers with which a peer of a large group exchanges rounds. They are fewer than half of its neighbours, so
that they do not decide what half of its neighbours hold, and one is left if two are gone."""


RING = 2**64
"""Length of a ring: a position on it is eight bytes of a hash."""


@lru_cache(maxsize=2 * 4096)
def _positions(peer: PeerId) -> tuple[int, ...]:
    """Return a peer's position on each ring. It is cached, as the rings are rebuilt whenever a peer joins."""
    digest = hashlib.sha512(peer.encode()).digest()
    return tuple(int.from_bytes(digest[8 * ring : 8 * ring + 8]) for ring in range(RINGS))


def _gaps_ahead(me: PeerId, others: Iterable[PeerId]) -> list[list[int]]:
    """Return for each ring how far each of `others` is ahead of `me`."""
    mine = _positions(me)
    positions = [_positions(peer) for peer in others]
    return [[(position[ring] - mine[ring]) % RING for position in positions] for ring in range(RINGS)]


def choose_neighbours(me: PeerId, group: Iterable[PeerId]) -> frozenset[PeerId]:
    """Return the peers of `group` that `me` links to. In a small group these are all, otherwise the
    predecessor and successor of `me` on each ring."""
    others = [peer for peer in group if peer != me]
    if len(others) < FULL_GROUP:
        return frozenset(others)
    chosen: set[PeerId] = set()
    for gaps in _gaps_ahead(me, others):
        chosen.update((others[gaps.index(min(gaps))], others[gaps.index(max(gaps))]))
    return frozenset(chosen)


def choose_helpers(me: PeerId, helpers: Collection[PeerId]) -> frozenset[PeerId]:
    """Return the helpers (peers that only reduce) to which `me` links in addition to its neighbours. A helper
    links to all others."""
    return frozenset(helpers) - {me} if me in helpers else choose_some(me, helpers, HELPER_LINKS)


def choose_some(me: PeerId, others: Iterable[PeerId], most: int) -> frozenset[PeerId]:
    """Return at most `most` of `others`, chosen by a hash of both ids (rendezvous hashing, Thaler and
    Ravishankar 1998). Two peers choose differently, and a peer that joins or leaves changes few choices."""
    known = list(others)
    if len(known) <= most:
        return frozenset(known)
    return frozenset(_in_drawn_order(me, known)[:most])


def _in_drawn_order(me: PeerId, peers: Iterable[PeerId]) -> list[PeerId]:
    """Return `peers` in the order in which `me` prefers them, by a hash of both ids."""
    return sorted(peers, key=lambda peer: _draw(me, peer))


@lru_cache(maxsize=2 * 4096)
def _draw(me: PeerId, peer: PeerId) -> bytes:
    return hashlib.sha256(f"{me}/{peer}".encode()).digest()


def choose_spread(me: PeerId, ranges: Mapping[PeerId, Collection[str]], most: int) -> frozenset[PeerId]:
    """Return at most `most` peers: first one of each address range, then a second of each. Sybils have many
    keys and few ranges. Within a range, a hash of both ids decides (`choose_some`). `ranges` maps each peer
    to its address ranges; all peers without any count as one range."""
    earlier_of_range: Counter[str] = Counter()
    rank: dict[PeerId, int] = {}  # Number of peers of the same range that come before this one.
    for peer in _in_drawn_order(me, ranges):
        peer_ranges = ranges[peer] or ("",)
        rank[peer] = max(earlier_of_range[each] for each in peer_ranges)
        earlier_of_range.update(peer_ranges)
    return frozenset(sorted(rank, key=rank.__getitem__)[:most])


def size_by_neighbours(me: PeerId, reached: Iterable[PeerId]) -> int:
    """Return an upper estimate of the group's size, this peer included, from the gaps on the rings to peers
    that were reached.

    With n peers, gaps are exponential with mean 1 / n, as fractions of a ring. The expected k-th smallest of
    m gaps is (1/m + ... + 1/(m-k+1)) / n (Renyi, "On the theory of order statistics", 1953)."""
    others = list(reached)
    if not others:
        return 1
    gaps = []
    for ahead in _gaps_ahead(me, others):
        gaps += [min(ahead), RING - max(ahead)]  # To the successor and to the predecessor.
    kth_gap = max(1, sorted(gaps)[GAP_TAKEN - 1]) / RING  # k is `GAP_TAKEN`, m the number of gaps.
    expected_times_n = sum(1 / (len(gaps) - smaller) for smaller in range(GAP_TAKEN))
    return math.ceil(SIZE_SLACK * expected_times_n / kth_gap)


def links(peers: int) -> int:
    """Return the number of neighbours of each peer in a group of `peers`, at least 1."""
    return max(1, min(peers - 1, 2 * RINGS))


def hops(peers: int) -> int:
    """Return the number of hops within which any peer of a group of `peers` reaches the whole group.

    It is the smallest d with (k-1)**(d-1) >= 2 n ln n for k = 2 * `RINGS` links each (the theorem above).
    This is one more than the diameter of such rings, which leaves room for links that are being replaced."""
    if peers <= FULL_GROUP:
        return 1
    degree = 2 * RINGS
    return 1 + math.ceil(math.log(2 * peers * math.log(peers), degree - 1))
