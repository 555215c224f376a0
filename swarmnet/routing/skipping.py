"""Where a microbatch goes next in a run that may leave stages out: how each came, and to whom it may go.

A microbatch's header (run/path_rules.py) is checked when it comes and kept as long as its job. Where stages
have no live peer, it goes around them within the run's budget, or waits: `missing` says for what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.cheapest_path import Onward, onward
from swarmnet.routing.next_hop import Live, Passage
from swarmnet.run.path_rules import Header, Rules, begin, check, needs_swap, straight, visit


class Skipping:
    """Headers of one peer of `stage`. `live(s)` names the peers of stage s that take microbatches now."""

    def __init__(
        self, rules: Rules, stage: int, live: Live, round: Callable[[], int] = lambda: 0
    ) -> None:
        """`round()`: the round now, where microbatches start."""
        self.rules = rules
        self.stage = stage
        self.live = live
        self.reach = rules.reach
        self.round = round
        """It says how many stages a microbatch that starts here visits (Rules.length) ..."""
        self.begun = 0
        """... and so does how many have started before."""
        self.headers: dict[MicrobatchId, Header] = {}
        self.sent: dict[MicrobatchId, int] = {}
        """The stage that each went to last."""

    def start(self, key: MicrobatchId) -> Passage:
        """An origin's microbatch: it is to visit as many stages as the rules say for it."""
        header = self._first()
        self.begun += 1
        return self.arrive(key, header)

    def check(self, header: Header) -> None:
        """Raise IllegalPath unless a microbatch may come here with this header."""
        check(header, self.stage, self.rules)

    def came_otherwise(self, key: MicrobatchId, header: Header) -> bool:
        """Whether it is here already, by another way: then what is kept for it is no answer to this one."""
        known = self.headers.get(key)
        return known is not None and known.visited != header.visited

    def arrive(self, key: MicrobatchId, header: Header) -> Passage:
        """Keep a checked header until `forget`."""
        self.headers[key] = header
        return Passage(header.length, self.rules.branch_scale(self.stage, header.length))

    def candidates(self, key: MicrobatchId | None, tried: Collection[PeerId] = ()) -> list[PeerId]:
        """Live peers that it may be sent to; None: a microbatch that would be started now.

        If it was sent on before, to peers that failed, it goes to others of the same stage where there are
        any: who has done it already by that way can give its answer again, and to another way it has none.
        """
        way = self._onward(key)
        if key is not None and tried and self.sent.get(key) in way.stages:
            others = [peer for peer in self.live(self.sent[key]) if peer not in tried]
            if others:
                return others
        return [peer for stage in way.stages for peer in self.live(stage)]

    def header_for(self, key: MicrobatchId, stage: int) -> Header:
        """What to send with it to a peer of `stage`. Raises IllegalPath if it may not go there."""
        header = visit(self._onward(key).header, stage, self.rules)
        self.sent[key] = stage
        return header

    def missing(self) -> tuple[int, ...]:
        """Stages that a microbatch started here, or the next one that came, would wait for; empty: none."""
        if self.stage == self.rules.last:
            return ()
        return self._onward(None).missing

    def forget(self, key: MicrobatchId) -> None:
        self.headers.pop(key, None)
        self.sent.pop(key, None)

    def _onward(self, key: MicrobatchId | None) -> Onward:
        header = None if key is None else self.headers.get(key)
        return self.onward(self._typical() if header is None else header)

    def onward(self, header: Header) -> Onward:
        """Where a microbatch that is here with this header may go."""
        known = range(max(1, self.stage - self.reach), min(self.stage + self.reach, self.rules.last) + 1)
        live = {stage for stage in known if self.live(stage)}
        live.update(range(self.stage + self.reach + 1, self.rules.stages))  # Those that can see them decide.
        way = onward(header, self.rules, live)
        # Who waits for a stage below its frontier can deadlock (cheapest_path.py), so such ways come last.
        ahead = tuple(s for s in way.stages if not needs_swap(visit(way.header, s, self.rules), self.rules))
        return Onward(way.header, ahead or way.stages, way.missing)

    def _typical(self) -> Header:
        """On the first stage that of the next one; elsewhere of one that came straight from there."""
        if self.stage == 0:
            return self._first()
        return straight(self.rules, self.stage)

    def _first(self) -> Header:
        return begin(self.rules, self.rules.length(self.round(), self.begun))
