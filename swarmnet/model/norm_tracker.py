"""Compare the norms of received tensors with the usual norm, so that no microbatch dominates a round.

A gradient that is a thousand times too large outweighs all others of its round. Clipping the round's sum only
scales all of them down together. The *usual norm* is learnt from recent tensors as the median of the peers'
medians, so that a peer gains no influence by sending much. It adapts within some ten microbatches, because
norms change tenfold in the first hundred of a run. The *ratio* of a tensor is its norm over the usual norm.
Norms and ratios are kept as logarithms.

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
        """Create the statistics. `weighed` also scales down peers whose mean ratio exceeds `USUAL_WEIGHT`."""
        self._weighed = weighed
        self._recent: dict[Hashable, deque[tuple[PeerId, float]]] = {}
        """Logarithms of norms. With too few peers to outvote one, values beyond the limit are clipped to it.
        The usual norm then grows one step at a time."""
        self._of_all_kinds: deque[tuple[PeerId, float]] = deque(maxlen=RECENT)
        """Norms of all kinds. Values of a rare kind may be old, and norms change for all kinds at once."""
        self._slow_average: dict[Hashable, float] = {}
        """The usual norm of each kind, averaged over `SLOWNESS` microbatches."""
        self._ratios: OrderedDict[PeerId, deque[float]] = OrderedDict()
        """Logarithms of ratios, by the order in which the peers were last seen."""

    def judge(self, peer: PeerId, norm: float, kind: Hashable = None) -> NormCheck:
        """Record a norm that `peer` sent and return the verdict on it. Norms are compared within their
        `kind`, of which there are few. Without a known usual norm, every norm up to `MAX_NORM` is usual."""
        is_summable = norm <= MAX_NORM  # False for NaN.
        log_norm = log(max(norm, MIN_NORM)) if is_summable else inf
        recent = self._recent.setdefault(kind, deque(maxlen=RECENT))
        usual = self._usual_norm(recent, self._slow_average.get(kind))  # A logarithm, as all below.
        if usual is None:
            if not is_summable:
                return NormCheck(ratio=inf, gain=0.0, far_off=True)
            recent.append((peer, log_norm))
            return NormCheck(ratio=1.0, gain=1.0)
        average = self._slow_average.get(kind, usual)
        self._slow_average[kind] = average + (usual - average) / SLOWNESS
        usual_of_all_kinds = self._usual_norm(self._of_all_kinds, average)
        log_ratio = log_norm - usual
        # Norms of a rare kind may be old. Those of all kinds are used instead if the norm is closer to them.
        if usual_of_all_kinds is not None and len(self._recent) > 1 and is_summable:
            log_ratio = min(log_ratio, log_norm - usual_of_all_kinds, key=abs)
        self._of_all_kinds.append((peer, log_norm if is_summable else usual))
        peers = {peer, *(other for other, _ in recent)}
        # With too few peers to outvote this one, record its norm as at most `LIMIT` times the usual one.
        max_step = log(LIMIT) if len(peers) < MIN_PEERS else log(MAX_NORM)
        recent.append((peer, usual + min(max_step, max(-max_step, log_ratio))))
        ratios = self._ratios_of(peer)
        ratios.append(log_ratio)
        is_outlier = abs(log_ratio) > log(LIMIT) and self._is_outlier(peer, peers)
        if is_outlier:
            del self._ratios[peer]  # The peer starts anew when it is used again.
        if log_ratio == inf:
            return NormCheck(ratio=inf, gain=0.0, far_off=True, outlier=is_outlier)
        is_alone = len(peers) == 1
        limit = ALONE_LIMIT if is_alone else LIMIT
        gain = min(1.0, exp(log(limit) - log_ratio))  # Scales a larger tensor down to the limit.
        if self._weighed and not is_alone:
            gain /= _divisor(ratios)
        is_far_off = abs(log_ratio) > log(FAR) and not is_alone
        return NormCheck(ratio=exp(log_ratio), gain=gain, far_off=is_far_off, outlier=is_outlier)

    def left(self, peer: PeerId) -> None:
        """Forget the norms of a peer that has left. If only one peer remained, it would otherwise be compared
        with these old norms, and be given hardly any work while it is far from them."""
        for kind, recent in self._recent.items():
            kept = ((other, norm) for other, norm in recent if other != peer)
            self._recent[kind] = deque(kept, maxlen=RECENT)
        kept = ((other, norm) for other, norm in self._of_all_kinds if other != peer)
        self._of_all_kinds = deque(kept, maxlen=RECENT)
        self._ratios.pop(peer, None)

    def _ratios_of(self, peer: PeerId) -> deque[float]:
        """Return the kept ratios of a peer, as the newest one. Forgets the oldest of too many peers."""
        ratios = self._ratios.setdefault(peer, deque(maxlen=KEPT_OF_EACH))
        self._ratios.move_to_end(peer)
        if len(self._ratios) > MAX_PEERS:
            self._ratios.popitem(last=False)
        return ratios

    def _usual_norm(self, recent: deque[tuple[PeerId, float]], average: float | None) -> float | None:
        """Return the logarithm of the usual norm: the median over peers of the median of each peer's newest
        norms. With an even number of peers, the slow `average` counts as one more. It is returned if there
        are too few norms; None if it is not known either."""
        if len(recent) < FEW:
            return average
        newest: dict[PeerId, list[float]] = {}
        for peer, log_norm in reversed(recent):
            norms = newest.setdefault(peer, [])
            if len(norms) < RECENT_OF_EACH:
                norms.append(log_norm)
        medians = [median(norms) for norms in newest.values()]
        if len(medians) % 2 == 0 and average is not None:
            medians.append(average)
        return median(medians)

    def _is_outlier(self, peer: PeerId, peers: set[PeerId]) -> bool:
        """Return whether the median ratio of `peer` differs by more than the factor `LIMIT` from the typical
        one among `peers`. Peers are compared with each other, because the usual norm may change for all at
        once. False if too few peers have enough ratios."""
        typical_ratios = {
            other: median(self._ratios[other]) for other in peers if len(self._ratios.get(other, ())) >= FEW
        }
        if peer not in typical_ratios or len(typical_ratios) < MIN_PEERS:
            return False
        difference = abs(typical_ratios[peer] - median(typical_ratios.values()))
        return not difference <= log(LIMIT)  # True for NaN, the difference of two infinities.


def _divisor(log_ratios: deque[float]) -> float:
    """Return the divisor for a peer's gradients: the mean of its ratios, each at most `LIMIT`. It is 1 unless
    that exceeds `USUAL_WEIGHT`. Ratios that the peer has not sent yet count as 1."""
    ratios = [exp(min(log(LIMIT), log_ratio)) for log_ratio in log_ratios]
    mean = fmean([*ratios, *[1.0] * (KEPT_OF_EACH - len(ratios))])
    return mean if mean > USUAL_WEIGHT else 1.0
