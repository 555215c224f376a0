"""What a run needs of a line, and when one is called too slow."""

from math import inf

import pytest
from swarm import tiny_manifest

from swarmnet.resources.bandwidth_estimate import contribution_bytes
from swarmnet.resources.link_bandwidth import crossings
from swarmnet.resources.upload_need import ContributionFates, judge_upload, needed_upload
from swarmnet.run.schema import Rounds

MANIFEST = tiny_manifest(rounds=Rounds(global_batch_tokens=4 * tiny_manifest().microbatch_tokens))
PACE = 8.0 * MANIFEST.microbatch_tokens
"""Two rounds a second."""


def test_a_line_must_bear_the_groups_contributions_and_a_microbatch_for_each_own_one():
    needed = 2 * (2 * contribution_bytes(MANIFEST, 1) + crossings(MANIFEST)[1].sent)
    assert needed_upload(MANIFEST, 1, PACE, 3) == pytest.approx(needed)


def test_a_peer_that_is_alone_or_in_a_run_that_stands_needs_nothing():
    assert needed_upload(MANIFEST, 1, PACE, 1) == 0.0
    assert needed_upload(MANIFEST, 1, 0.0, 3) == 0.0


@pytest.mark.parametrize(
    ("line", "decided", "late", "short", "proved"),
    [(1.0, 0, 0, True, False), (1.0, 10, 9, True, True), (inf, 10, 9, False, True)],
)
def test_a_slow_line_or_late_contributions_are_found(line, decided, late, short, proved):
    verdict = judge_upload(line, 2.0, decided, late)
    assert verdict is not None
    assert (verdict.is_short, verdict.has_proof) == (short, proved)


@pytest.mark.parametrize(("line", "decided", "late"), [(3.0, 0, 0), (inf, 0, 0), (inf, 3, 3), (1.0, 10, 1)])
def test_a_fast_line_is_not_accused_nor_one_whose_contributions_came_in_time(line, decided, late):
    assert judge_upload(line, 2.0, decided, late) is None


def test_a_contribution_is_late_when_given_back_or_open_at_a_fetch():
    fates = ContributionFates()
    for round in range(4):
        fates.make(f"of {round}", round)
    fates.settle(1)
    assert (fates.decided, fates.late) == (2, 0)
    fates.give_back("of 1")
    assert (fates.decided, fates.late) == (2, 1)
    fates.lose_open()
    assert (fates.decided, fates.late) == (4, 3)
    for round in range(4, 100):
        fates.make(f"of {round}", round)
    assert (fates.decided, fates.late) == (0, 0), "only the newest count"
