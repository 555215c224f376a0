"""Where a worker starts from when it fetches the state anew."""

from __future__ import annotations

import asyncio
from functools import reduce
from random import Random
from types import SimpleNamespace

import pytest
from clocks import on_virtual_clock

from peers.lab.world.virtual_time import run
from peers.state.snapshot_service import NoState
from peers.state.snapshot_store import Weights
from peers.worker.starting_state import AGREE_SECONDS, StateRecovery, combine_requests
from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.membership.membership import Membership
from swarmnet.rounds.events import FetchGroupState, Reference, RequestIds, RestoreToMomentum
from swarmnet.rounds.fork_choice import ForkChoice
from swarmnet.rounds.history import START, Chain, SettledSet
from swarmnet.rounds.own_contributions import OwnContributions
from swarmnet.run.schema import Rounds

LIAR, HONEST = PeerId("liar"), PeerId("honest")


def test_who_fell_behind_asks_those_met_since_and_not_for_ever_the_first_one():
    first, later = FetchGroupState((LIAR,), "far behind"), FetchGroupState((LIAR, HONEST), "far behind")
    assert combine_requests(None, first) == first
    assert combine_requests(first, later) == later


def test_a_history_that_was_given_up_stays_so_and_those_met_since_are_asked():
    forked, behind = FetchGroupState((LIAR,), "forked", 7), FetchGroupState((LIAR, HONEST), "far behind")
    both = combine_requests(forked, behind)
    assert both.peers == behind.peers
    assert both.fork_round == forked.fork_round
    assert not both.exact, "they may be on a third history"
    assert combine_requests(both, behind) == both
    assert combine_requests(forked, forked) == forked


@pytest.mark.parametrize("first", [("forked", 8), ("forked", 5), ("far behind", None)])
def test_the_state_may_come_from_the_peers_of_an_earlier_request_whose_history_parted_elsewhere(first):
    requests = [FetchGroupState((LIAR,), *first), FetchGroupState((HONEST,), "forked", 6)]
    both = combine_requests(*requests)
    assert (both.peers, both.fork_round, both.exact) == ((HONEST,), 6, False)
    assert combine_requests(both, requests[1]) == both, "the first history is not ruled out by a repetition"


def test_what_was_made_between_the_forks_of_two_requests_is_given_back_if_it_is_not_settled():
    chain, offers, other = Chain(), OwnContributions(Rounds(window=2)), PeerId("other")
    mine = [Reference(round, PeerId("me"), ContributionId(bytes([round] * 16)), 100) for round in range(10)]
    for reference in mine:
        offers.made(reference.round, reference.id, 0.0)
        offers.settled(reference.round, (reference,))
        chain.append(SettledSet(1, bytes([reference.round] * 12)))
    assert offers.decide(20, (), 0.0) == []
    assert len(offers.taken) == 10
    requests = [
        FetchGroupState((peer,), "forked", fork) for peer, fork in ((LIAR, 8), (HONEST, 5), (LIAR, 8))
    ]
    combined = reduce(combine_requests, requests)
    offers.replaced(
        combined,
        ForkChoice(rules=Rounds(window=2), chain=chain, neighbours={}, now=0.0),
        9,
        b"of the fork at 5",
    )
    (ask,) = offers.decide(20, (other,), 1.0)
    assert isinstance(ask, RequestIds)
    offers.accept_sets(ask.rounds, mine[:5])
    returned = [
        effect.id for effect in offers.decide(20, (other,), 2.0) if isinstance(effect, RestoreToMomentum)
    ]
    assert returned == [reference.id for reference in mine[5:]]
    assert list(offers.taken.values()) == [0, 1, 2, 3, 4]


class Apart:
    """`StatePath` of whoever is asked: those who have begun hold different states."""

    def __init__(self) -> None:
        self.state_bytes = self.fetched_bytes = self.kept_bytes = 0
        self.asked: list[bool] = []
        self.snapshots = SimpleNamespace(held=(), hold=lambda weights: None, forget_after=lambda round: None)

    async def fetch(self, holders: list[PeerId], have: int, apart: bool) -> Weights:
        self.asked.append(apart)
        if not apart:
            raise NoState("2 peers of the stage agree on no snapshot yet")
        return Weights(None, 7, START)


def starting(ready: bool) -> tuple[StateRecovery, Apart]:
    """A peer without checkpoints and two in its group; `ready`: they take part."""
    membership = Membership(me=PeerId("me"), stage=0, chance=Random(1))
    for name in (LIAR, HONEST):
        membership.recorded(name, 0, "worker", ("/x",), 1, b"record", 0.0)
        membership.linked(name, 0.0)
        membership.beat(name, 0, ready, 5, 0.1, 0.0)
    clock = SimpleNamespace(time=asyncio.get_running_loop().time)
    around = SimpleNamespace(
        membership=membership,
        clock=clock,
        known=lambda: membership.peers,
        linked=lambda stage: [
            peer for peer, seen in membership.peers.items() if seen.stage == stage and seen.linked
        ],
    )

    def nothing(*_, **__):
        pass

    async def nobody_elsewhere():
        return False

    disk = SimpleNamespace(
        restored=list, first_weights=lambda snapshots: Weights(None, -1, START),
        forget_after=lambda round: None, chunks=None,
    )  # fmt: skip
    states = Apart()
    recovery = StateRecovery(
        disk=disk,
        states=states,
        keepers=SimpleNamespace(linked=list),
        neighbourhood=around,
        compute=None,
        log_event=nothing,
        notify=nothing,
        elsewhere=nobody_elsewhere,
    )
    return recovery, states


def test_where_nobody_takes_part_a_peer_that_starts_waits_for_agreement_only_for_a_while():
    async def story() -> float:
        recovery, states = starting(ready=False)
        weights = await recovery.weights(None, lambda: None)
        assert weights.settled_round == 7
        assert states.asked.count(True) == 1
        return asyncio.get_running_loop().time()

    assert AGREE_SECONDS <= run(story()) <= AGREE_SECONDS + 2.0


@on_virtual_clock
async def test_where_somebody_takes_part_agreement_is_waited_for():
    recovery, states = starting(ready=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60.0):
            await recovery.weights(None, lambda: None)
    assert not any(states.asked)
