"""What a contributor signs for a reducer: only what was granted can stand in its result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocols.errors import BadSignature, Malformed
from protocols.signed.grants import Reduction, contributors_of, grant_of, require_grants, sign_grant
from protocols.signed.identity import Identity
from swarmnet.identifiers import ContributionId, RunId
from swarmnet.rounds.result_table import MAX_TOKENS, Contributor, Table, read_table

ALICE, BOB, REDUCER = (Identity.from_seed(name) for name in (b"alice", b"bob", b"reducer"))
HERE = Reduction(RunId("ab" * 32), 2, 7, REDUCER.peer_id)
NAME = ContributionId(b"a contribution's")


def granted(who: Identity, *shards: int, tokens: int = 50, reduction: Reduction = HERE) -> Contributor:
    signature = sign_grant(who, reduction, NAME, tokens, shards)
    return Contributor.of(who.peer_id, NAME, tokens, grant_of(who.peer_id, signature))


def table(*held: tuple[Contributor, tuple[int, ...]]) -> Table:
    shards = sorted({shard for _, of in held for shard in of})
    return Table({shard: frozenset(one for one, of in held if shard in of) for shard in shards})


def test_a_table_of_what_was_granted_is_valid_also_after_it_has_travelled():
    whole = table((granted(ALICE, 0, 9), (0, 9)), (granted(BOB, 9, tokens=1 << 40), (9,)))
    read, _ = read_table(whole.written(), 16)
    require_grants(read, HERE)
    assert set(contributors_of(read)) == {ALICE.peer_id, BOB.peer_id}
    assert {one.tokens for one in read.contributors} == {50, MAX_TOKENS}


ONE = granted(ALICE, 0, 9)


def elsewhere(**change) -> Contributor:
    return granted(ALICE, 0, reduction=replace(HERE, **change))


@pytest.mark.parametrize("held", [
    pytest.param((ONE, (0,)), id="in fewer shards"),
    pytest.param((ONE, (0, 9, 10)), id="in more shards"),
    pytest.param((replace(ONE, tokens=51), (0, 9)), id="more tokens"),
    pytest.param((replace(ONE, contribution=b"another's 16 B.."), (0, 9)), id="another contribution"),
    pytest.param((elsewhere(round=8), (0,)), id="another round"),
    pytest.param((elsewhere(stage=1), (0,)), id="another stage"),
    pytest.param((elsewhere(reducer=BOB.peer_id), (0,)), id="another reducer"),
    pytest.param((elsewhere(run_id=RunId("cd" * 32)), (0,)), id="another run"),
    pytest.param((replace(ONE, grant=grant_of(ALICE.peer_id, bytes(64))), (0, 9)), id="made up"),
])  # fmt: skip
def test_nothing_else_is(held):
    with pytest.raises(BadSignature):
        require_grants(table((granted(BOB, 0), (0,)), held), HERE)


def test_a_grant_of_another_peer_than_the_table_names_is_malformed():
    other = replace(granted(ALICE, 0), peer=granted(BOB, 0).peer)
    with pytest.raises(Malformed):
        require_grants(table((other, (0,))), HERE)
