"""Choose where a microbatch goes next in a run that may skip stages.

A microbatch carries a header: the stages that it has visited, and how many it still has to visit. The header
is checked against the run's rules (`run/path_rules.py`) when it arrives, and kept until the microbatch is
done. A microbatch goes around stages without a live peer, as far as the rules let it skip stages. Otherwise
it waits, and `missing` names the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from swarmnet.identifiers import MicrobatchId, PeerId
from swarmnet.routing.cheapest_path import NextStages, onward
from swarmnet.routing.next_hop import Live, Passage
from swarmnet.run.path_rules import PathHeader, PathRules, begin, check, straight, visit


class Skipping:
    """The headers of the microbatches on one peer of `stage`. `live(s)` returns the peers of stage s that
    accept microbatches now."""

    def __init__(
        self, *, rules: PathRules, stage: int, live: Live, round: Callable[[], int] = lambda: 0
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
        """Begin a microbatch on this peer of the first stage. The rules decide how many stages it visits."""
        header = self._new_path_header()
        self.begun += 1
        return self.arrive(key, header)

    def check(self, header: PathHeader) -> None:
        check(header, self.stage, self.rules)

    def came_by_other_path(self, key: MicrobatchId, header: PathHeader) -> bool:
        known = self.headers.get(key)
        return known is not None and known.visited != header.visited

    def arrive(self, key: MicrobatchId, header: PathHeader) -> Passage:
        """Keep a checked header until `forget`. Returns what the path means for this stage."""
        self.headers[key] = header
        return Passage(header.length, self.rules.branch_scale(self.stage, header.length))

    def candidates(self, key: MicrobatchId | None, tried: Collection[PeerId] = ()) -> list[PeerId]:
        """Return live peers that the microbatch may be sent to; `key` None stands for a new microbatch. After
        attempts that failed (`tried`), other peers of the same stage are preferred. They keep the path the
        same, so peers further on that have computed the microbatch can repeat their answers."""
        following = self._next_stages(key)
        if key is not None and tried and self.sent.get(key) in following.stages:
            others = [peer for peer in self.live(self.sent[key]) if peer not in tried]
            if others:
                return others
        return [peer for stage in following.stages for peer in self.live(stage)]

    def header_for(self, key: MicrobatchId, stage: int) -> PathHeader:
        """Return the header to send with the microbatch to a peer of `stage`, and remember the stage. Raises
        IllegalPath if the rules forbid this stage."""
        header = visit(self._next_stages(key).header, stage, self.rules)
        self.sent[key] = stage
        return header

    def missing(self) -> tuple[int, ...]:
        if self.stage == self.rules.last:
            return ()
        return self._next_stages(None).missing

    def forget(self, key: MicrobatchId) -> None:
        self.headers.pop(key, None)
        self.sent.pop(key, None)

    def _next_stages(self, key: MicrobatchId | None) -> NextStages:
        """Return the stages that may follow for this microbatch, or for a new one if `key` is not known."""
        header = None if key is None else self.headers.get(key)
        return self.onward(self._header_of_new() if header is None else header)

    def onward(self, header: PathHeader) -> NextStages:
        """Return the stages that a microbatch with this header may go to from here."""
        known = range(self.stage + 1, min(self.stage + self.reach, self.rules.last) + 1)
        live = {stage for stage in known if self.live(stage)}
        # This peer does not know the peers of farther stages, so it assumes that these stages are live.
        live.update(range(self.stage + self.reach + 1, self.rules.stages))
        return onward(header, self.rules, live)  # The header may be shortened there.

    def _header_of_new(self) -> PathHeader:
        """Return the header of the next new microbatch on stage 0; elsewhere, one that skipped no stage."""
        if self.stage == 0:
            return self._new_path_header()
        return straight(self.rules, self.stage)

    def _new_path_header(self) -> PathHeader:
        return begin(self.rules, self.rules.length(self.round(), self.begun))
