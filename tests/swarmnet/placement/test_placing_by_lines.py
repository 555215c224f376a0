"""Peers choose stages by their lines as well: good ones go to the middle, which sends twice."""

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from swarmnet.identifiers import PeerId
from swarmnet.placement.policy import MoveRules, ObservedPeer, choose_move, choose_stage, summarize_records
from swarmnet.resources.link_bandwidth import UNKNOWN, Crossing, LinkBandwidth

END, MIDDLE = Crossing(1.0, 1.0), Crossing(2.0, 2.0)
FOUR = MoveRules((1.0,) * 4, crossings=(END, MIDDLE, MIDDLE, END))
THIN, GOOD = LinkBandwidth(1.0, 10.0), LinkBandwidth(10.0, 100.0)


def come(
    lines: list[LinkBandwidth], rules: MoveRules = FOUR, rate: float = 5.0, seed: int = 0
) -> list[ObservedPeer]:
    """Newcomers one after the other, each by what the records of those before it say."""
    chance, there = Random(seed), []
    for line in lines:
        view = summarize_records(((PeerId(str(n)), seen) for n, seen in enumerate(there)), rules)
        stage = choose_stage(view, replace(rules, line=line), chance)
        there.append(ObservedPeer(stage, rate, line=line))
    return there


def poorest(there: list[ObservedPeer]) -> float:
    return min(summarize_records(((PeerId(str(n)), seen) for n, seen in enumerate(there)), FOUR).capacities)


def test_newcomers_with_good_lines_end_in_the_middle():
    placed: Counter[tuple[bool, LinkBandwidth]] = Counter()
    carried = Counter[bool]()
    for seed in range(10):
        lines = [THIN, GOOD, THIN] * 16
        Random(seed).shuffle(lines)
        there = come(lines, FOUR, 1.5, seed)
        placed.update((seen.stage in (1, 2), seen.line) for seen in there)
        carried[True] += poorest(there)
        carried[False] += poorest(come(lines, replace(FOUR, crossings=()), 1.5, seed))
    assert placed[True, GOOD] > 0.7 * placed.total() / 3, placed
    assert placed[False, THIN] > placed[True, THIN], placed
    assert carried[True] > 1.2 * carried[False], carried


def test_on_equal_lines_the_middle_gets_more_peers_and_the_swarm_carries_more():
    blind = replace(FOUR, crossings=())
    for seed in range(5):
        by_lines, by_compute = (come([THIN] * 24, rules, seed=seed) for rules in (FOUR, blind))
        assert sum(seen.stage in (1, 2) for seen in by_lines) == 16
        assert poorest(by_lines) == 4.0
        assert poorest(by_compute) <= 3.0


@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=20), st.integers(0, 99))
def test_lines_that_are_not_known_or_not_full_change_nothing(rates, seed):
    there: dict[LinkBandwidth, list[int]] = {}
    for line in (UNKNOWN, LinkBandwidth(1e9, 1e9)):
        chance, peers = Random(seed), []
        for rate in rates:
            view = summarize_records(((PeerId(str(n)), seen) for n, seen in enumerate(peers)), FOUR)
            stage = choose_stage(view, replace(FOUR, line=line), chance)
            peers.append(ObservedPeer(stage, rate, line=line))
        there[line] = [seen.stage for seen in peers]
    assert len(set(map(tuple, there.values()))) == 1


def test_who_knows_nothing_of_its_line_takes_itself_for_usual():
    peers = [ObservedPeer(stage, 5.0, line=line) for stage, line in enumerate((THIN, GOOD, GOOD, THIN))] * 2
    view = summarize_records(((PeerId(str(n)), seen) for n, seen in enumerate(peers)), FOUR)
    assert {choose_stage(view, FOUR, Random(seed)) for seed in range(20)} == {0, 3}


def test_a_claim_of_a_huge_line_gains_nothing_and_one_of_a_thin_line_counts_for_less():
    usual = [ObservedPeer(stage, 5.0, line=GOOD) for stage in range(4)] * 3

    def capacity(line: LinkBandwidth) -> float:
        seen = [*usual, ObservedPeer(1, 5.0, line=line)]
        return summarize_records(((PeerId(str(n)), one) for n, one in enumerate(seen)), FOUR).capacities[1]

    assert capacity(LinkBandwidth(1e18, 1e18)) == capacity(GOOD) == capacity(UNKNOWN)
    assert capacity(THIN) == capacity(GOOD) - 4.5


def test_a_peer_moves_to_where_its_line_brings_something_and_stays_where_it_would_not():
    # The last stage has one peer's worth less than the first; in the middle a thin line brings half.
    ends = [ObservedPeer(0, 5.0, line=THIN)] * 6 + [ObservedPeer(3, 5.0, line=THIN)] * 3
    middle = [ObservedPeer(stage, 3.0, line=GOOD) for stage in (1, 2)] * 2
    view = summarize_records(((PeerId(str(n)), seen) for n, seen in enumerate([*ends, *middle])), FOUR)
    moved = choose_move(view, PeerId("0"), 0, 5.0, replace(FOUR, line=THIN), 1.0, Random(1))
    assert moved is not None
    assert (moved.target, moved.leaves, moved.brings) == (3, 1.0, 1.0)
    poor = [ObservedPeer(1, 5.0, line=THIN)] * 2 + [ObservedPeer(2, 2.0, line=GOOD)] * 2
    view = summarize_records(
        ((PeerId(str(n)), seen) for n, seen in enumerate([*ends[:4], *ends[6:], *poor])), FOUR
    )
    thin = choose_move(view, PeerId("0"), 0, 5.0, replace(FOUR, line=THIN), 1.0, Random(1))
    assert thin is not None
    assert (thin.target, thin.leaves, thin.brings) == (1, 1.0, 0.5)


def test_where_contributions_fill_the_lines_peers_spread_by_compute():
    crowded = replace(FOUR, gossip=0.1)  # Six to a group: half of a thin line.
    there = Counter(seen.stage for seen in come([THIN] * 48, crowded))
    assert sorted(there.values()) == [12, 12, 12, 12]
    few = Counter(seen.stage for seen in come([THIN] * 18, crowded))
    assert few[1] > few[0]
    assert few[2] > few[3]
