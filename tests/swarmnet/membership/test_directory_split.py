"""A directory of which a part is gone is suspected; what one peer does or lacks is no split."""

from clocks import on_virtual_clock
from hypothesis import given
from hypothesis import strategies as st
from swarm import Swarm, tiny_manifest

from peers.network.discovery.announcer import LOOK_SECONDS
from protocols.errors import Unreachable
from swarmnet.membership.dht_partition import MISSED_LOOKS, DirectorySplit


def looks(split, linked, found, count=MISSED_LOOKS):
    for _ in range(count):
        split.looked(linked, found)
    return split.suspected


def test_half_of_the_linked_peers_missing_for_some_looks_is_a_split_and_less_is_none():
    split = DirectorySplit()
    assert not looks(split, "abcd", "abcd")
    assert not looks(split, "abcd", "ab", MISSED_LOOKS - 1)
    assert looks(split, "abcd", "ab", 1)
    assert sorted(split.missing) == ["c", "d"]
    assert not looks(split, "abcd", "abc", 1), "one of four has its own trouble"
    assert not looks(split, "abcd", "abcd", 1)


def test_the_peers_of_the_smaller_part_notice_it():
    part, rest = "abc", "defghij"
    assert looks(DirectorySplit(), "bc" + rest, part)
    assert not looks(DirectorySplit(), part + "efghij", rest)


def test_who_is_linked_to_nobody_suspects_nothing_and_a_new_link_has_its_time():
    split = DirectorySplit()
    assert not looks(split, "", "")
    assert not looks(split, "a", "", MISSED_LOOKS - 1)
    assert not looks(split, "", "", 1)
    assert not looks(split, "a", "", MISSED_LOOKS - 1), "linked anew"
    assert looks(split, "a", "", 1)


some = st.sets(st.sampled_from("abcdef"))


@given(st.lists(st.tuples(some, some), max_size=30))
def test_only_linked_peers_that_were_not_found_are_missing(story):
    split = DirectorySplit()
    for linked, found in story:
        split.looked(linked, found)
        assert set(split.missing) <= linked - found
        assert split.suspected == (bool(split.missing) and 2 * len(split.missing) >= len(linked))


def slow(_priority):
    """A few microbatches each look are enough."""
    return 0.5


class Part:
    """A directory of which this peer reads a part: `silent`, or without those of `lost`."""

    def __init__(self, inner):
        self.inner, self.silent, self.lost = inner, False, ()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def look_up(self, run, stage, deadline_seconds):
        if self.silent:
            raise Unreachable("no node answers")
        found = await self.inner.look_up(run, stage, deadline_seconds)
        return {peer: record for peer, record in found.items() if peer not in self.lost}


@on_virtual_clock
async def test_a_worker_that_reads_another_part_of_the_directory_than_its_neighbours_write_to_says_so():
    swarm = Swarm(tiny_manifest(stages=(1, 2)), stub=True)
    swarm.open()
    first = swarm.start("a", stage=0, compute=slow)
    others = [swarm.start(name, stage=1, compute=slow).peer for name in "bc"]
    part = first.worker.context.presence.directory = Part(first.worker.context.presence.directory)
    split = lambda: first.worker.services.looking.split.suspected  # noqa: E731
    await swarm.until(lambda: swarm.committed(0) > 5, 60.0)
    await swarm.during((MISSED_LOOKS + 1) * LOOK_SECONDS)
    assert not split()
    part.silent = True
    await swarm.during((MISSED_LOOKS + 1) * LOOK_SECONDS)
    assert not split(), "a directory that does not answer has said nothing"
    part.silent, part.lost = False, others
    await swarm.until(split, (MISSED_LOOKS + 1) * LOOK_SECONDS)
    assert all(swarm.members[name].worker.services.looking.split.suspected is False for name in "bc")
    part.lost = others[:0]
    await swarm.until(lambda: not split(), 2 * LOOK_SECONDS)
    said = [event for event, _ in first.said if event.startswith("directory")]
    assert said == ["directory_split", "directory_whole"]
    await swarm.close()
