"""Eras: which weights a return to snapshots leaves valid."""

from __future__ import annotations

from swarmnet.identifiers import RunId
from swarmnet.lineage import DIGEST_BYTES, ERA_BYTES, NO_RETURN, Return, era_of
from swarmnet.rounds.history import START, SettledSet, link

RUN = RunId("ab" * 32)
TARGET = (7, b"\1" * 32)
POINTS = ((7, TARGET[1].hex()), (11, "02" * 32))
LINEAGE = Return(1, POINTS).lineage(0)
OLD = link(START, SettledSet(2, b"\3" * DIGEST_BYTES))


def test_a_chain_keeps_the_name_of_its_era():
    chain = LINEAGE.continue_chain(TARGET, OLD)
    assert len(chain) == DIGEST_BYTES + ERA_BYTES
    later = link(chain, SettledSet(1, b"\4" * DIGEST_BYTES))
    assert era_of(later) == era_of(chain) == LINEAGE.era
    assert later != chain
    assert era_of(OLD) == NO_RETURN.era == b""
    assert LINEAGE.continue_chain((8, b"\5" * 32), later) == later


def test_every_peer_continues_from_the_target_alike_whatever_its_branch_was():
    other = link(START, SettledSet(1, b"\6" * DIGEST_BYTES))
    assert LINEAGE.continue_chain(TARGET, OLD) == LINEAGE.continue_chain(TARGET, other)


def test_only_the_target_and_what_follows_it_is_valid():
    assert LINEAGE.admits(TARGET, OLD)
    assert not LINEAGE.admits((7, b"\7" * 32), OLD)
    assert not LINEAGE.admits((3, b"\7" * 32), OLD)
    assert LINEAGE.admits((3, b"\7" * 32), OLD[:DIGEST_BYTES] + LINEAGE.era)
    assert LINEAGE.gives_up((8, b"\7" * 32), OLD)
    assert not LINEAGE.gives_up((3, b"\7" * 32), OLD), "older checkpoints keep their names"
    assert NO_RETURN.admits(TARGET, OLD)
    assert not NO_RETURN.admits(TARGET, LINEAGE.continue_chain(TARGET, OLD)), "the order is not known yet"


def test_each_return_has_its_own_era_also_to_the_same_snapshots():
    again = Return(2, POINTS).lineage(0)
    assert again.era not in (LINEAGE.era, b"")
    assert Return(1, POINTS).lineage(1).era == LINEAGE.era, "all stages are in one era"
    runs = {lineage.contribution_run(RUN) for lineage in (NO_RETURN, LINEAGE, again)}
    assert len(runs) == 3
    assert NO_RETURN.contribution_run(RUN) == RUN
