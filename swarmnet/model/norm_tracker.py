"""Compare the norms of received tensors with the usual norm, so that no microbatch dominates a round.

A gradient that is a thousand times too large outweighs all others of its round. Clipping the round's sum only
scales all of them down together. The usual norm is learnt from recent tensors as the median of the peers'
medians, so that a peer gains no influence by sending much. It adapts within some ten microbatches, because
norms change tenfold in the first hundred of a run.

These decisions affect only the own arithmetic: replicas agree on votes, not on gradients.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import exp, inf, log
from statistics import fmean, median

from swarmnet.identifiers import PeerId

LIMIT = 3.0
"""Limit in usual norms. A larger gradient is scaled down to it, and a peer with mostly larger ones is an
outlier. One in 500 honest gradients of 32 tokens is larger; larger microbatches scatter less."""
FAR = 4.0
"""Tensors larger or smaller by this factor are refused where scaling would not help. In the first rounds
norms grow fastest, and peers a round apart differ by up to 3.5."""
ALONE_LIMIT = 30.0
"""Limit in usual norms if there is no other peer to compare with. Such a peer decides what the whole stage
computes anyway, so only absurd values are scaled down. No honest microbatch is; 3 would scale one in 500."""
USUAL_WEIGHT = 1.25
"""Mean in usual norms above which a peer's gradients are scaled, so that large ones gain it no influence."""
RECENT = 64
"""Number of recent norms that are used, over all peers."""
RECENT_OF_EACH = 3
"""Number of the newest norms of each peer among them."""
FEW = 4
"""Minimum number of norms before a usual norm is known, and before a peer can be an outlier."""
KEPT_OF_EACH = 16
"""Number of ratios that decide about a peer."""
MIN_PEERS = 3
"""Minimum number of peers to compare. Two peers that differ do not show which one is wrong."""
MAX_PEERS = 1024
"""Number of peers whose ratios are kept, the newest."""
SLOWNESS = 32
"""Number of microbatches over which the usual norm is averaged. The average breaks ties between peers."""
MIN_NORM = 1e-30
"""Replaces zero, which has no logarithm."""
MAX_NORM = 1.8e19 / (1 << 20)
"""float32 represents squares up to 1.8e19**2 = 3.4e38. A round may sum 2**20 gradients of this norm."""


@dataclass(frozen=True, slots=True)
class NormCheck:
    """The verdict on the 2-norm of one microbatch's tensor."""

    ratio: float
    """Norm in usual norms; infinite if it is NaN or too large to be squared and summed."""
    gain: float
    """Factor for gradients, at most 1; 0 leaves them out."""
    far_off: bool = False
    """Whether it is too large or too small compared with what others sent."""
    outlier: bool = False
    """Whether most recent norms of this peer, but not of the other peers, are as far off."""


class NormTracker:
    """Norm statistics of one kind of tensor that comes from other peers."""

    def __init__(self, weighed: bool = False) -> None:
        """Create the statistics. `weighed` also scales down peers whose mean norm exceeds `USUAL_WEIGHT`."""
        self._weighed = weighed
        self._recent: dict[Hashable, deque[tuple[PeerId, float]]] = {}
        """Logarithms of norms. With too few peers to outvote one, values beyond the limit are clipped to it.
        The usual norm then grows one step at a time."""
        self._everywhere: deque[tuple[PeerId, float]] = deque(maxlen=RECENT)
        """Norms of all kinds. Values of a rare kind may be old, and norms change for all kinds at once."""
        self._slow: dict[Hashable, float] = {}
        self._ratios: OrderedDict[PeerId, deque[float]] = OrderedDict()
        """Logarithms of ratios, by the order in which the peers were last seen."""

    def judge(self, peer: PeerId, norm: float, kind: Hashable = None) -> NormCheck:
        """Record a norm that `peer` sent and return the verdict on it. Norms are compared within their
        `kind`, of which the caller has few (a stage and a path length)."""
        size = log(max(norm, MIN_NORM)) if norm <= MAX_NORM else inf  # No comparison with NaN is true.
        recent = self._recent.setdefault(kind, deque(maxlen=RECENT))
        usual = self._usual(recent, self._slow.get(kind))
        if usual is None:
            if size < inf:
                recent.append((peer, size))
            return NormCheck(1.0, 1.0) if size < inf else NormCheck(inf, 0.0, far_off=True)
        slow = self._slow.get(kind, usual)
        self._slow[kind] = slow + (usual - slow) / SLOWNESS
        everywhere = self._usual(self._everywhere, slow)
        away = size - usual
        if everywhere is not None and len(self._recent) > 1 and size < inf:
            away = min(away, size - everywhere, key=abs)
        self._everywhere.append((peer, size if size < inf else usual))
        here = {peer, *(other for other, _ in recent)}
        step = log(LIMIT) if len(here) < MIN_PEERS else log(MAX_NORM)
        recent.append((peer, usual + min(step, max(-step, away))))
        ratios = self._remembered(peer)
        ratios.append(away)
        outlier = abs(away) > log(LIMIT) and self._is_outlier(peer, here)
        if outlier:
            del self._ratios[peer]  # The peer starts anew when it is used again.
        if away == inf:
            return NormCheck(inf, 0.0, far_off=True, outlier=outlier)
        alone = len(here) == 1
        gain = min(1.0, exp(log(ALONE_LIMIT if alone else LIMIT) - away))
        weight = _weight(ratios) if self._weighed and not alone else 1.0
        return NormCheck(exp(away), gain / weight, abs(away) > log(FAR) and not alone, outlier)

    def left(self, peer: PeerId) -> None:
        """Forget a peer that has left, so that it has no vote. The remaining peer would otherwise be compared
        with old norms, and be given hardly any work while it is far from them."""
        for kind, recent in self._recent.items():
            self._recent[kind] = deque((each for each in recent if each[0] != peer), maxlen=RECENT)
        self._everywhere = deque((each for each in self._everywhere if each[0] != peer), maxlen=RECENT)
        self._ratios.pop(peer, None)

    def _remembered(self, peer: PeerId) -> deque[float]:
        ratios = self._ratios.setdefault(peer, deque(maxlen=KEPT_OF_EACH))
        self._ratios.move_to_end(peer)
        if len(self._ratios) > MAX_PEERS:
            self._ratios.popitem(last=False)
        return ratios

    def _usual(self, recent: deque[tuple[PeerId, float]], slow: float | None) -> float | None:
        """Return the median of the peers' medians; with too few norms `slow`, the value known before."""
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

    def _is_outlier(self, peer: PeerId, here: set[PeerId]) -> bool:
        """Compare the peer with the others, because the usual norm may change for all peers at once."""
        typical = {
            other: median(self._ratios[other])
            for other in here
            if len(self._ratios.get(other, ())) >= FEW
        }  # fmt: skip
        if peer not in typical or len(typical) < MIN_PEERS:
            return False
        return not abs(typical[peer] - median(typical.values())) <= log(LIMIT)


def _weight(ratios: deque[float]) -> float:
    """Return the divisor for a peer's gradients. Those that it has not sent yet count as usual."""
    weights = [exp(min(log(LIMIT), away)) for away in ratios]
    mean = fmean([*weights, *[1.0] * (KEPT_OF_EACH - len(weights))])
    return mean if mean > USUAL_WEIGHT else 1.0
