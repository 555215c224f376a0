"""What stands at the head of a result, which results count where they overlap, and who reduces what."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from math import ceil, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.result_table import (
    DIGEST_BYTES,
    MAX_TOKENS,
    ContributionError,
    Contributor,
    Draw,
    Table,
    counting,
    draw_of,
    head_of,
    longest_head,
    read_head,
    read_result,
    read_table,
    tag_of,
)
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Sync

SHARDS = 8
PEERS = [PeerId(f"peer {number}") for number in range(12)]
WINDOW = 2
DRAW = Draw(b"run", 4, SHARDS, WINDOW)
VALUE = b"of the chain"
SUMS = b"what was added up"


def named(number: int, tokens: int = 100) -> Contributor:
    return Contributor.of(PEERS[number], identity(number), tokens, bytes([number]) * 96)


def identity(number: int) -> ContributionId:
    return ContributionId(hashlib.sha256(b"%d" % number).digest()[:16])


def table_of(**shards: tuple[int, ...]) -> Table:
    """`s3=(0, 1)`: the first two peers are in shard 3."""
    return Table({int(name[1:]): frozenset(map(named, of)) for name, of in shards.items()})


CONTRIBUTORS = st.builds(
    Contributor,
    st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16),
    st.integers(0, MAX_TOKENS), st.binary(min_size=96, max_size=96),
)  # fmt: skip


@st.composite
def tables(draw):
    """Whatever honest reducers may write."""
    everybody = draw(
        st.lists(CONTRIBUTORS, min_size=1, max_size=20, unique_by=lambda contributor: contributor.peer)
    )
    held = st.frozensets(st.sampled_from(everybody), min_size=1)
    return Table(draw(st.dictionaries(st.integers(0, SHARDS - 1), held, min_size=1)))


@given(tables(), st.binary(max_size=20))
def test_a_table_is_read_as_it_was_written_whatever_follows(table, rest):
    written = table.written()
    assert read_table(written + rest, SHARDS) == (table, len(written))
    assert read_table(memoryview(written + rest), SHARDS) == (table, len(written))
    assert len(written) + DIGEST_BYTES <= longest_head(SHARDS, len(table.contributors))


@given(st.one_of(st.binary(max_size=120), tables().map(Table.written)), st.data())
def test_a_table_has_one_valid_form(honest, data):
    """Any bytes, and honest ones with a few bits turned, are refused or are what writing gives."""
    bent = bytearray(honest)
    for place in data.draw(st.lists(st.integers(0, max(0, 8 * len(bent) - 1)), max_size=3)):
        if bent:
            bent[place // 8] ^= 1 << place % 8
    try:
        table, length = read_table(bytes(bent), SHARDS)
    except ContributionError:
        return
    assert table.written() == bent[:length]
    assert max(table.shards) < SHARDS
    assert all(table.shards.values())


@given(tables(), st.data())
def test_no_table_is_read_from_less_than_its_bytes(table, data):
    written = table.written()
    with pytest.raises(ContributionError):
        read_table(written[: data.draw(st.integers(0, len(written) - 1))], SHARDS)


def written(contributors, shards):
    """As the layout has it, right or wrong: `shards` are pairs of a number and the bits of one byte."""
    parts = [len(contributors).to_bytes(2, "big")]
    parts += [one.peer + one.contribution + one.tokens.to_bytes(4, "big") + one.grant for one in contributors]
    parts += [len(shards).to_bytes(2, "big")]
    parts += [shard.to_bytes(2, "big") + bytes([bits]) for shard, bits in shards]
    return b"".join(parts)


FIRST, SECOND = sorted([named(0), named(1)])
TWICE = sorted([FIRST, replace(FIRST, contribution=b"another!another!")])


def test_the_layout_is_the_one_that_the_page_of_the_wire_tells():
    table = Table({1: frozenset((FIRST,)), 6: frozenset((FIRST, SECOND))})
    assert written([FIRST, SECOND], [(1, 0b01), (6, 0b11)]) == table.written()


@pytest.mark.parametrize(
    ("contributors", "shards", "reason"),
    [
        ([SECOND, FIRST], [(0, 3)], "not sorted"),
        ([FIRST, FIRST], [(0, 3)], "named twice"),
        (TWICE, [(0, 3)], "named twice"),
        ([FIRST, SECOND], [(0, 1)], "contributor is in no shard"),
        ([FIRST], [(0, 0)], "names no contributor"),
        ([FIRST], [(0, 3)], "more than the table's"),
        ([FIRST], [(1, 1), (0, 1)], "not sorted"),
        ([FIRST], [(1, 1), (1, 1)], "named twice"),
        ([FIRST], [(SHARDS, 1)], "does not exist"),
        ([FIRST], [], "in 0 of 8 shards"),
        ([FIRST], [(0, 1)] * (SHARDS + 1), "in 9 of 8 shards"),
        ([], [], "0 contributors"),
        ([named(0)] * 1025, [(0, 1)], "1025 contributors"),
    ],
)
def test_every_other_way_to_say_the_same_or_nothing_is_refused(contributors, shards, reason):
    with pytest.raises(ContributionError, match=reason):
        read_table(written(contributors, shards), SHARDS)


def test_the_head_says_so_much_also_of_sums_that_are_gone():
    table = table_of(s0=(0, 1), s3=(1,))
    head = head_of(table, SUMS)
    assert read_head(head + SUMS, SHARDS) == read_head(head, SHARDS) == (table, len(head))
    read, sums = read_result(head + SUMS, SHARDS)
    assert (read, bytes(sums)) == (table, SUMS)


@pytest.mark.parametrize("sums", [b"", SUMS[:-1], SUMS + b"\0", b"W" + SUMS[1:]])
def test_sums_that_are_missing_changed_or_too_many_are_not_those_that_were_signed(sums):
    head = head_of(table_of(s0=(0,)), SUMS)
    with pytest.raises(ContributionError, match="do not match the hash"):
        read_result(head + sums, SHARDS)


def test_a_head_without_its_whole_digest_is_none():
    head = head_of(table_of(s0=(0,)), SUMS)
    with pytest.raises(ContributionError, match="too few for a result's head"):
        read_head(head[:-1], SHARDS)


def test_what_a_result_stands_for_is_each_ones_tokens_by_its_share_of_the_shards():
    table = Table({0: frozenset((named(0, 80), named(1, 8))), 5: frozenset((named(0, 80),))})
    assert table.tokens(SHARDS) == (80 + 8 + 80) // 8
    assert table.holding(identity(0)) == {0, 5}
    assert table.holding(identity(1)) == {0}
    assert table.holding(identity(2)) == frozenset()


@pytest.mark.parametrize(("said", "kept"), [(-5, 0), (0, 0), (7, 7), (1 << 40, MAX_TOKENS)])
def test_tokens_are_told_as_far_as_four_bytes_go(said, kept):
    assert named(0, said).tokens == kept


def first_in(round, shard, contributors):
    return sorted(contributors, key=lambda contributor: DRAW.rank(round, shard, contributor))


def test_of_equally_large_results_that_share_somebody_the_run_and_the_round_decide():
    counts = set()
    for round in range(8):
        first, second = first_in(round, 2, PEERS[:2])
        results = {PEERS[0]: table_of(s2=(3, 4)), PEERS[1]: table_of(s2=(4, 5))}
        assert counting(results, DRAW, round) == {2: (first,)}
        backwards = dict(reversed(results.items()))
        assert counting(backwards, DRAW, round) == {2: (first,)}, "the order in which they came is nothing"
        assert second not in counting(results, DRAW, round)[2]
        counts.add(first)
    assert counts == {*PEERS[:2]}, "no key wins every round"


@pytest.mark.parametrize(("results", "counts"), [
    pytest.param([(3, 4, 5, 6), (3,)], [0], id="alone beside all"),
    pytest.param([(3, 4), (4, 5, 6)], [1], id="who shares one with more"),
    pytest.param([(3, 4, 5, 6), (7,)], [0], id="fewer than half, though it shares nobody"),
    pytest.param([(3, 4, 5, 6), (7, 8)], [0, 1], id="half"),
    pytest.param([(3, 4, 5), (5, 6), (6, 7)], [0, 2], id="who shares with one that does not count"),
])  # fmt: skip
def test_which_results_count_depends_on_how_many_contributors_they_have(results, counts):
    """Whoever the draw prefers: in every round, so also in those where it prefers the other."""
    tables = {PEERS[n]: table_of(s2=of) for n, of in enumerate(results)}
    for round in range(20):
        assert counting(tables, DRAW, round) == {2: tuple(PEERS[n] for n in counts)}


def test_a_shard_is_measured_by_the_largest_result_of_all_shards():
    held = {"s0": (3, 4, 5, 6)}, {"s1": (3,)}, {"s2": (3, 4)}
    results = {contributor: table_of(**of) for contributor, of in zip(PEERS, held, strict=False)}
    assert counting(results, DRAW, 0) == {0: (PEERS[0],), 1: (), 2: (PEERS[2],)}
    assert counting({}, DRAW, 0) == {}


@given(st.dictionaries(st.sampled_from(PEERS[:6]), tables(), max_size=6), st.integers(0, 100), st.randoms())
def test_nobody_is_counted_twice_in_a_shard_and_nobody_is_left_out_for_nothing(results, round, chance):
    largest = max((len(held) for table in results.values() for held in table.shards.values()), default=0)
    shuffled = list(results.items())
    chance.shuffle(shuffled)
    assert counting(dict(shuffled), DRAW, round) == counting(results, DRAW, round)
    for shard, contributors in counting(results, DRAW, round).items():
        peers = [one.peer for contributor in contributors for one in results[contributor].shards[shard]]
        assert len(peers) == len(set(peers))
        assert all(2 * len(results[contributor].shards[shard]) >= largest for contributor in contributors)
        for contributor, table in results.items():
            held = table.shards.get(shard, frozenset())
            if 2 * len(held) >= largest and held and contributor not in contributors:
                larger = [results[other].shards[shard] for other in contributors if other != contributor]
                those = {one.peer for of in larger if len(of) >= len(held) for one in of}
                assert {one.peer for one in held} & those, "it clashed with one that is as large"


def test_all_who_see_the_same_peers_draw_the_same():
    drawn = DRAW.reducers(5, PEERS, VALUE)
    assert drawn == Draw(b"run", 4, SHARDS, WINDOW).reducers(5, frozenset(reversed(PEERS)), VALUE)
    assert len(drawn) == SHARDS
    assert DRAW.reducers(5, PEERS[:1], VALUE) == (PEERS[0],) * SHARDS


def test_a_draw_holds_for_a_block_of_rounds_and_is_another_in_the_next_in_another_run_and_history():
    drawn = [DRAW.reducers(round, PEERS, VALUE) for round in range(12)]
    assert [len(set(drawn[block : block + 4])) for block in (0, 4, 8)] == [1, 1, 1]
    elsewhere = Draw(b"other", 4, SHARDS, WINDOW).reducers(0, PEERS, VALUE)
    assert len({drawn[0], drawn[4], drawn[8], elsewhere, DRAW.reducers(0, PEERS, b"another value")}) == 5


def test_a_draw_follows_from_the_round_that_lies_the_window_and_one_before_its_block():
    assert [DRAW.seed_round(round) for round in (0, 3, 4, 7, 8)] == [-3, -3, 1, 1, 5]


def test_who_goes_changes_only_the_shards_that_it_had_and_who_comes_only_those_that_it_gets():
    for gone in PEERS:
        others = [peer for peer in PEERS if peer != gone]
        before, after = DRAW.reducers(0, PEERS, VALUE), DRAW.reducers(0, others, VALUE)
        assert all(now == then for now, then in zip(after, before, strict=True) if then != gone)
        assert gone not in after


def test_shards_are_spread_over_all_peers():
    """Each of n shards goes to one of p peers with equal chance: a peer gets n/p, with a deviation of
    sqrt(n (1/p) (1 - 1/p)). Nobody is five of them off, which chance does to 1 of 10^5 such tests."""
    many, blocks = Draw(b"run", 1, 64, WINDOW), 50
    times = Counter(peer for block in range(blocks) for peer in many.reducers(block, PEERS, VALUE))
    shards, share = 64 * blocks, 1 / len(PEERS)
    bound = 5 * sqrt(shards * share * (1 - share))
    assert set(times) == set(PEERS)
    assert max(abs(count - shards * share) for count in times.values()) <= ceil(bound)


def test_the_draw_of_a_run_is_that_of_its_id_its_blocks_and_its_shards():
    manifest = Manifest(
        "x", PeerId("owner"), sync=Sync(method="local-steps", topology="sharded-reduce", shards=5)
    )
    draw = draw_of(manifest)
    rules = manifest.rounds
    assert draw == Draw(bytes.fromhex(manifest.run_id()), rules.snapshot_interval, 5, rules.window)
    place = draw.seed + VALUE + f"\n{20 // draw.block_rounds}\n3\n{PEERS[0]}".encode()
    assert draw.place(20, 3, PEERS[0], VALUE) == hashlib.sha256(place).digest(), "as docs/wire.md has it"


def test_a_peers_tag_is_the_beginning_of_its_ids_hash_and_too_long_to_be_made_twice():
    assert tag_of(PEERS[0]) == hashlib.sha256(PEERS[0].encode()).digest()[:16]
    assert len({tag_of(peer) for peer in PEERS}) == len(PEERS)
