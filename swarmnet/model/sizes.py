"""How large the numbers are that peers send, beside what is usual here: no microbatch is to be the round.

A gradient a thousand times too large outweighs all others of its round, and the clip of the round's sum only
makes it smaller together with them. What is usual is learnt from what came lately, and nobody decides it by
sending much: of each peer the median, of these the median. It follows within some ten microbatches, because
norms change tenfold in the first hundred of a run.

Nobody's arithmetic but the own depends on what is decided here: replicas agree on votes, not on gradients.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import exp, inf, log
from statistics import fmean, median

from swarmnet.identifiers import PeerId

LIMIT = 3.0
"""In usual norms: more is scaled down to it, and a peer of which most is so far off is out of line. Of honest
gradients, of 32 tokens each, one in five hundred is larger, and a larger microbatch scatters less."""
FAR = 4.0
"""Usual norms, or one part in so many: refused where scaling would not help. In the first rounds, in which
norms grow fastest, peers a round apart differ by up to 3.5."""
ALONE_LIMIT = 30.0
"""In usual norms, where nobody else is there to compare with: only the absurd is scaled down, as whoever is
the whole stage decides what it computes anyhow. An honest microbatch never is: 3 would scale one in 500."""
USUAL_WEIGHT = 1.25
"""In usual norms, on average: a peer whose gradients weigh more gets no more say by it than the others."""
RECENT = 64
"""What came lately: so many of all peers together ..."""
RECENT_OF_EACH = 3
"""... and of each the newest of them."""
FEW = 4
"""Before so many have come nothing is usual yet; before a peer has sent so many, it is not out of line."""
KEPT_OF_EACH = 16
"""Ratios by which a peer is judged."""
LEAST_PEERS = 3
"""Of two that differ nobody can say who is wrong."""
MOST_PEERS = 1024
"""Whose ratios are kept, the newest."""
SLOWNESS = 32
"""The slow average of what was usual follows in so many microbatches; where peers are even it has a vote."""
LEAST_NORM = 1e-30
"""Taken for zero, which has no logarithm."""
MOST_NORM = 1.8e19 / (1 << 20)
"""float32 holds squares up to the 3.4e38 of 1.8e19: a round may sum 2**20 gradients of this norm."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of the numbers of one microbatch, by their 2-norm."""

    ratio: float
    """Their norm in usual norms; infinite if it is no number, or too large to be squared and summed."""
    gain: float
    """What to multiply gradients by, at most 1; 0: they are to be left out."""
    far_off: bool = False
    """They are too large, or too small, beside what others have sent."""
    out_of_line: bool = False
    """Most of what this peer has sent lately is as far off, and that of the other peers is not."""


class Sizes:
    """Of one kind of tensor that comes from other peers."""

    def __init__(self, weighed: bool = False) -> None:
        """`weighed`: whoever sends more than is usual on average is scaled down to it as well."""
        self._weighed = weighed
        self._recent: dict[Hashable, deque[tuple[PeerId, float]]] = {}
        """Logarithms of norms. Where too few peers are there to outvote one, those beyond the limit count as
        if they were at it: what is usual grows one step at a time."""
        self._everywhere: deque[tuple[PeerId, float]] = deque(maxlen=RECENT)
        """Of all kinds: what is known of a rare one may be old, and norms change for all kinds at once."""
        self._slow: dict[Hashable, float] = {}
        self._ratios: OrderedDict[PeerId, deque[float]] = OrderedDict()
        """Logarithms, in the order in which peers were last heard."""

    def judge(self, peer: PeerId, norm: float, kind: Hashable = None) -> Judgement:
        """Take in a norm of what `peer` sent. `kind`: norms are compared with those of the same kind only,
        of which the caller has few (a stage and a length of path)."""
        size = log(max(norm, LEAST_NORM)) if norm <= MOST_NORM else inf  # No comparison with NaN is true.
        recent = self._recent.setdefault(kind, deque(maxlen=RECENT))
        usual = self._usual(recent, self._slow.get(kind))
        if usual is None:
            if size < inf:
                recent.append((peer, size))
            return Judgement(1.0, 1.0) if size < inf else Judgement(inf, 0.0, far_off=True)
        slow = self._slow.get(kind, usual)
        self._slow[kind] = slow + (usual - slow) / SLOWNESS
        everywhere = self._usual(self._everywhere, slow)
        away = size - usual
        if everywhere is not None and len(self._recent) > 1 and size < inf:
            away = min(away, size - everywhere, key=abs)
        self._everywhere.append((peer, size if size < inf else usual))
        here = {peer, *(other for other, _ in recent)}
        step = log(LIMIT) if len(here) < LEAST_PEERS else log(MOST_NORM)
        recent.append((peer, usual + min(step, max(-step, away))))
        ratios = self._remembered(peer)
        ratios.append(away)
        out_of_line = abs(away) > log(LIMIT) and self._is_out_of_line(peer, here)
        if out_of_line:
            del self._ratios[peer]  # It may begin anew when it is asked again.
        if away == inf:
            return Judgement(inf, 0.0, far_off=True, out_of_line=out_of_line)
        alone = len(here) == 1
        gain = min(1.0, exp(log(ALONE_LIMIT if alone else LIMIT) - away))
        weight = _weight(ratios) if self._weighed and not alone else 1.0
        return Judgement(exp(away), gain / weight, abs(away) > log(FAR) and not alone, out_of_line)

    def left(self, peer: PeerId) -> None:
        """It is not there any more, and has no vote: who stays would be judged by what others sent long ago,
        and would hardly be asked again for as long as it is far from that."""
        for kind, recent in self._recent.items():
            self._recent[kind] = deque((each for each in recent if each[0] != peer), maxlen=RECENT)
        self._everywhere = deque((each for each in self._everywhere if each[0] != peer), maxlen=RECENT)
        self._ratios.pop(peer, None)

    def _remembered(self, peer: PeerId) -> deque[float]:
        ratios = self._ratios.setdefault(peer, deque(maxlen=KEPT_OF_EACH))
        self._ratios.move_to_end(peer)
        if len(self._ratios) > MOST_PEERS:
            self._ratios.popitem(last=False)
        return ratios

    def _usual(self, recent: deque[tuple[PeerId, float]], slow: float | None) -> float | None:
        """The median of the peers' medians; while too few have come what was usual before, None: nothing."""
        if len(recent) < FEW:
            return slow
        newest: dict[PeerId, list[float]] = {}
        for peer, size in reversed(recent):
            sizes = newest.setdefault(peer, [])
            if len(sizes) < RECENT_OF_EACH:
                sizes.append(size)
        voters = [median(sizes) for sizes in newest.values()]
        if len(voters) % 2 == 0 and slow is not None:
            voters.append(slow)
        return median(voters)

    def _is_out_of_line(self, peer: PeerId, here: set[PeerId]) -> bool:
        """Beside the others, and not by itself: what is usual may change for everybody at once."""
        typical = {
            other: median(self._ratios[other])
            for other in here
            if len(self._ratios.get(other, ())) >= FEW
        }  # fmt: skip
        if peer not in typical or len(typical) < LEAST_PEERS:
            return False
        return not abs(typical[peer] - median(typical.values())) <= log(LIMIT)


def _weight(ratios: deque[float]) -> float:
    """What a peer's gradients are to be divided by. Those that it has not sent yet count as usual ones."""
    weights = [exp(min(log(LIMIT), away)) for away in ratios]
    mean = fmean([*weights, *[1.0] * (KEPT_OF_EACH - len(weights))])
    return mean if mean > USUAL_WEIGHT else 1.0
