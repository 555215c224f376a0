"""Whatever neighbours say of their rounds, in whatever order: the machine goes on, and forwards."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.contribution_sets import set_digest
from swarmnet.rounds.events import (
    AddContribution,
    Announced,
    ApplyRound,
    ChainArrived,
    ChainAsked,
    Contributed,
    ContributionArrived,
    Event,
    FetchGroupState,
    GradientAccumulated,
    GroupSizeChanged,
    IdsAsked,
    LeaveGroup,
    MakeContribution,
    NeighbourJoined,
    NeighbourLeft,
    OpenSet,
    ProgressArrived,
    Reference,
    RemoveContribution,
    SettleRound,
    TimePassed,
)
from swarmnet.rounds.group_rounds import GroupRounds
from swarmnet.rounds.history import START, SettledSet
from swarmnet.run.schema import Rounds

RULES = Rounds(
    global_batch_tokens=100, max_seconds=5.0, contribution_timeout_seconds=1.0, window=2, snapshot_interval=4
)
ME, *OTHERS = (PeerId(name) for name in ("me", "a", "b", "c", "d"))
FAR = 2**62
"""A number as large as a message may hold."""


class World:
    """One peer's rounds among neighbours that say what chance draws, near to what this peer believes."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.now = 0.0
        self.rounds = GroupRounds(rules=RULES, me=ME, settled=-1, now=0.0)
        self.added: set[tuple[int, PeerId]] = set()
        self.applied = self.settled = -1
        self.making: list[int] = []
        self.said: dict[PeerId, ProgressArrived] = {}
        self.over = False

    def handle(self, event: Event) -> None:
        for effect in self.rounds.handle(event, self.now):
            match effect:
                case AddContribution(reference):
                    assert (reference.round, reference.peer) not in self.added, "one of each peer counts"
                    assert reference.round > self.settled
                    self.added.add((reference.round, reference.peer))
                case RemoveContribution(round, peer):
                    assert round > self.settled
                    self.added.remove((round, peer))
                case ApplyRound(round, contributors):
                    assert round == self.applied + 1, "one after the other"
                    self.applied = round
                    assert {(round, peer) for peer in contributors} <= self.added
                case SettleRound(round, references):
                    assert round == self.settled + 1 <= self.applied, (
                        "one after the other, once it is applied"
                    )
                    self.settled = round
                    here = {peer for number, peer in self.added if number == round}
                    assert [reference.peer for reference in references] == sorted(here)
                case MakeContribution(round):
                    assert round > self.settled
                    self.making.append(round)
                case FetchGroupState():
                    self.over = True  # The caller fetches the state, and begins with new rounds.
                case _:
                    pass

    def number(self) -> int:
        """Of a round: mostly one that matters now."""
        near = self.chance.choice((self.rounds.settled, self.rounds.applied, self.rounds.current))
        return max(
            -1, near + self.chance.choice((-9, -2, -1, 0, 0, 1, 1, 2, 5, self.chance.choice((64, FAR))))
        )

    def reference(self, round: int | None = None) -> Reference:
        number = max(0, self.number()) if round is None else round
        contributor = self.chance.choice((ME, *OTHERS))
        name = f"{contributor} {number} {self.chance.randrange(2)}"
        return Reference(number, contributor, ContributionId(name.encode()), 10)

    def digest(self, number: int) -> bytes:
        state = self.rounds.rounds.get(number) or self.rounds.history.get(number)
        named = state.digest if state is not None else set_digest(set())
        return self.chance.choice((named, named, named, b"another!", set_digest({self.reference(number).id})))

    def progress(self, peer: PeerId) -> ProgressArrived:
        chance, chain = self.chance, self.rounds.chain
        anchor = max(-1, min(self.number(), self.rounds.settled + 2))
        value = chance.choice((chain.at(anchor), chain.at(anchor), b"x" * len(START))) or START
        settled = anchor + chance.choice((0, 0, 1, 1, 2, 3))
        round = settled + chance.choice((0, 1, 1, 2, 3, 4))
        sets = []
        for number in range(anchor + 1, round):
            if chance.random() < 0.95:
                state = self.rounds.rounds.get(number) or self.rounds.history.get(number)
                count = len(state.held) if state is not None else chance.choice((0, 1, 3))
                levels = chance.choice((0, 1, 2, 9)), chance.choice((0, 0, 1, 2, 9))
                sets.append(OpenSet(number, *levels, count, self.digest(number)))
        tokens = chance.choice((0, 10, 60, FAR))
        contributed = frozenset(self.number() for _ in range(chance.randrange(3)))
        if chance.random() < 0.05:
            anchor, settled, round = self.number(), self.number(), self.number()
        in_step = chance.random() < 0.8
        return ProgressArrived(
            peer, round, tokens, contributed, settled, in_step, anchor, value, tuple(sets)
        )  # fmt: skip

    def event(self) -> Event:
        chance, peer = self.chance, self.chance.choice(OTHERS)
        references = tuple(self.reference() for _ in range(chance.randrange(4)))
        kind = chance.choice(("progress",) * 6 + ("arrive",) * 4 + ("commit", "announce", "tick") * 2 + (
            "chain", "asked", "ids", "join", "join", "leave", "count", "last"))  # fmt: skip
        match kind:
            case "progress":
                if peer not in self.said or chance.random() < 0.5:
                    self.said[peer] = self.progress(peer)
                elif chance.random() < 0.3:  # The same, of another history.
                    return replace(self.said[peer], anchor=b"x" * len(START))
                return self.said[peer]
            case "arrive":
                reference = self.reference()
                if reference.peer == ME or not self.rounds.takes(reference):  # update_path.py asks first.
                    return TimePassed()
                return ContributionArrived(peer, reference)
            case "commit":
                return GradientAccumulated(chance.choice((1, 30, 100)))
            case "announce":
                complete = tuple({max(0, self.number()) for _ in range(chance.randrange(3))})
                return Announced(peer, references, complete)
            case "chain":
                sets = tuple(
                    SettledSet(chance.randrange(3), self.digest(0)) for _ in range(chance.randrange(9))
                )
                return ChainArrived(peer, self.number(), chance.choice((START, b"x" * len(START))), sets)
            case "asked":
                return ChainAsked(peer, self.number())
            case "ids":
                return IdsAsked(peer, tuple({self.number() for _ in range(3)}))
            case "join":
                return NeighbourJoined(peer)
            case "leave":
                return NeighbourLeft(peer, chance.random() < 0.3)
            case "count":
                return GroupSizeChanged(chance.choice((1, 2, 5, 5, 5, 12, 40)))
            case "last":
                return LeaveGroup() if chance.random() < 0.1 else TimePassed()
            case _:
                return TimePassed()

    def step(self) -> None:
        self.now += self.chance.choice((0.0, 0.01, 0.2, 0.2, 1.0, 7.0))
        if self.making and self.chance.random() < 0.7:
            round = self.making.pop(0)
            own = Reference(round, ME, ContributionId(f"me {round} own".encode()), 10)
            self.handle(Contributed(round, own if self.chance.random() < 0.9 else None))
        else:
            self.handle(self.event())
        for _ in range(50):
            due = self.rounds.next_deadline()
            if due > self.now or self.over:
                return
            self.handle(TimePassed())
        pytest.fail("it would be asked again at once, for ever")


@given(st.integers(0, 2**32), st.integers(20, 250))
def test_whatever_neighbours_say_rounds_go_on_one_after_the_other(seed: int, steps: int):
    world = World(seed)
    for _ in range(steps):
        world.step()
        if world.over:
            break


def test_the_worlds_neighbours_are_believed_often_enough_for_rounds_to_settle():
    worlds = [World(seed) for seed in range(30)]
    for world in worlds:
        for _ in range(200):
            if not world.over:
                world.step()
    assert sum(world.settled >= 2 for world in worlds) >= 5
    assert any(world.over for world in worlds)
