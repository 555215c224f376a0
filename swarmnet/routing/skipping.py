"""Choose where a microbatch goes next in a run that may skip stages.

A microbatch's header (`run/path_rules.py`) is checked when it arrives and kept as long as its job. A
microbatch goes around stages without a live peer within the run's budget. Otherwise it waits, and `missing`
names the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.cheapest_path import Onward, onward
from swarmnet.routing.next_hop import Live, Passage
from swarmnet.run.path_rules import PathHeader, PathRules, begin, check, needs_swap, straight, visit


class Skipping:
    """The headers on one peer of `stage`. `live(s)` names the peers of stage s that take microbatches now."""

    def __init__(
        self, rules: PathRules, stage: int, live: Live, round: Callable[[], int] = lambda: 0
    ) -> None:
        """Create the table. `round()` returns the current round and is needed where microbatches start."""
        self.rules = rules
        self.stage = stage
        self.live = live
        self.reach = rules.reach
        self.round = round
        """Returns the current round. It decides how many stages a new microbatch visits
        (`PathRules.length`)."""
        self.begun = 0
        """Number of microbatches started here. It decides that as well."""
        self.headers: dict[MicrobatchId, PathHeader] = {}
        self.sent: dict[MicrobatchId, int] = {}
        """Stage to which each microbatch was sent last."""

    def start(self, key: MicrobatchId) -> Passage:
        """Begin a microbatch on this origin. The rules decide how many stages it visits."""
        header = self._first()
        self.begun += 1
        return self.arrive(key, header)

    def check(self, header: PathHeader) -> None:
        """Raise IllegalPath unless a microbatch may come here with this header."""
        check(header, self.stage, self.rules)

    def came_otherwise(self, key: MicrobatchId, header: PathHeader) -> bool:
        """Return whether the microbatch is here already by another path, so that its answer does not fit."""
        known = self.headers.get(key)
        return known is not None and known.visited != header.visited

    def arrive(self, key: MicrobatchId, header: PathHeader) -> Passage:
        """Keep a checked header until `forget`."""
        self.headers[key] = header
        return Passage(header.length, self.rules.branch_scale(self.stage, header.length))

    def candidates(self, key: MicrobatchId | None, tried: Collection[PeerId] = ()) -> list[PeerId]:
        """Return live peers that the microbatch may be sent to; None asks for one that would be started now.
        After a failed attempt it goes to other peers of the same stage if there are any. A peer that has
        already computed it on that path can repeat its answer. For another path it has no answer."""
        way = self._onward(key)
        if key is not None and tried and self.sent.get(key) in way.stages:
            others = [peer for peer in self.live(self.sent[key]) if peer not in tried]
            if others:
                return others
        return [peer for stage in way.stages for peer in self.live(stage)]

    def header_for(self, key: MicrobatchId, stage: int) -> PathHeader:
        """Return the header to send with it to a peer of `stage`. Raises IllegalPath if it is not allowed."""
        header = visit(self._onward(key).header, stage, self.rules)
        self.sent[key] = stage
        return header

    def missing(self) -> tuple[int, ...]:
        """Return the stages that the next microbatch here would wait for; empty if there are none."""
        if self.stage == self.rules.last:
            return ()
        return self._onward(None).missing

    def forget(self, key: MicrobatchId) -> None:
        self.headers.pop(key, None)
        self.sent.pop(key, None)

    def _onward(self, key: MicrobatchId | None) -> Onward:
        header = None if key is None else self.headers.get(key)
        return self.onward(self._typical() if header is None else header)

    def onward(self, header: PathHeader) -> Onward:
        """Return the stages that a microbatch with this header may go to from here."""
        known = range(max(1, self.stage - self.reach), min(self.stage + self.reach, self.rules.last) + 1)
        live = {stage for stage in known if self.live(stage)}
        # Peers that can see those stages decide.
        live.update(range(self.stage + self.reach + 1, self.rules.stages))
        way = onward(header, self.rules, live)
        # A microbatch that waits for a stage below its frontier can deadlock (`cheapest_path.py`), so such
        # ways come last.
        ahead = tuple(s for s in way.stages if not needs_swap(visit(way.header, s, self.rules), self.rules))
        return Onward(way.header, ahead or way.stages, way.missing)

    def _typical(self) -> PathHeader:
        """Return the header of the next new microbatch on stage 0; elsewhere, one that skipped no stage."""
        if self.stage == 0:
            return self._first()
        return straight(self.rules, self.stage)

    def _first(self) -> PathHeader:
        return begin(self.rules, self.rules.length(self.round(), self.begun))
