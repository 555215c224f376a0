"""What a peer commits to, who looks into it, and what comes of it: all but the replay itself."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet.audits.commitment import (
    MOST_BYTES,
    MOST_MICROBATCHES,
    MOST_STRETCHES,
    NOT_YET,
    NOTHING_BEFORE,
    Accused,
    Change,
    Commitment,
    CommitmentError,
    Found,
    Kind,
    Stretch,
    Word,
    digest_of,
    settings_of,
)
from swarmnet.audits.draw import auditors_of, is_drawn
from swarmnet.audits.likeness import cosine, likeness
from swarmnet.audits.replay import Unknown
from swarmnet.audits.verdict import Evidence, Finding, judge
from swarmnet.audits.windows import ends_window, window_of
from swarmnet.audits.work_log import SetNames, WorkLog
from swarmnet.identifiers import PeerId
from swarmnet.optimizer.index_code import ContributionError
from swarmnet.optimizer.moved.bits import Signs

A, B, C = (PeerId(name) for name in "abc")
SETTINGS = settings_of(b"a text", "here")
EVERY = 4
AT = next(round for round in count(EVERY) if ends_window(round - 1, A, EVERY))
"""Where a window of A begins."""


class Played:
    """`Replays`: a peer that contributes what it is told here."""

    def __init__(self, *payloads: bytes, carries: bytes = b"on", gives_up_at: int = 99) -> None:
        self._payloads, self._carries, self._gives_up_at = payloads, carries, gives_up_at

    def begin(self, carried: bytes) -> None:
        if carried == b"short":
            raise ContributionError("too short")

    def payloads(self, window):
        for number, payload in enumerate(self._payloads):
            if number >= self._gives_up_at:
                raise Unknown("the weights after round 3 are not kept here")
            yield payload

    def carried(self) -> bytes:
        return self._carries

    def tells_alike(self, one: bytes, other: bytes) -> float:
        if other == b"":
            raise ContributionError("nothing came of it")
        return share_of_equal(one, other)

    def carries_alike(self, carried: bytes) -> float:
        return share_of_equal(carried, self._carries)


def share_of_equal(one: bytes, other: bytes) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def committed(*payloads: bytes, carried: bytes = b"") -> tuple[Commitment, ...]:
    log = WorkLog(SETTINGS, A, EVERY)
    log.begins_afresh(carried)
    log.published(AT - 1, AT - 1)
    found = []
    for number, payload in enumerate(payloads):
        log.computed(number, 1000)
        found.append(log.told(AT + number, payload))
    return tuple(found)


def verdict(window: tuple[Commitment, ...], played: Played, settings: bytes = SETTINGS, **keys: bytes) -> str:
    return found(window, played, settings, **keys).verdict


def found(
    window: tuple[Commitment, ...], played: Played, settings: bytes = SETTINGS, told: tuple[bytes, ...] = (),
    **keys: bytes,
) -> Finding:  # fmt: skip
    after = None
    if "next_carried" in keys:
        stretch = replace(window[-1].stretches[-1], first=window[-1].stretches[-1].counters.stop)
        at, linked = AT + EVERY, {"before": window[-1].name, "carried": keys["next_carried"]}
        after = replace(window[-1], round=at, begun=at, stretches=(stretch,), **linked)
    named = {hashlib.sha256(payload).digest(): payload for payload in told}
    evidence = Evidence(A, window, keys.get("carried", b""), after, named, keys.get("onward", b""))
    return judge(evidence, EVERY, settings, played)


def test_peers_begin_afresh_every_so_many_rounds_and_not_all_at_once():
    for peer in (A, B, C):
        ends = [round for round in range(40) if ends_window(round, peer, EVERY)]
        assert len(ends) == 10
        assert {later - sooner for sooner, later in pairwise(ends)} == {EVERY}
    assert len({window_of(r, PeerId(str(n)), EVERY) - r // EVERY for n in range(50) for r in (3,)}) == 2
    assert not any(ends_window(round, A, 0) for round in range(40))


def test_a_log_says_in_one_stretch_what_was_computed_at_the_same_weights():
    log = WorkLog(SETTINGS, A, EVERY)
    log.sets.add(4, B, b"of b")
    log.begins_afresh(b"rest")
    log.published(3, 4)
    for counter in (10, 11, 12, 14):
        log.computed(counter, 1000)
    log.published(3, 5)
    log.computed(15, 500)
    found = log.told(6, b"payload")
    assert [(s.applied, list(s.counters), s.factor, s.published) for s in found.stretches] == [
        (4, [10, 11, 12], 1000, True), (4, [14], 1000, False), (5, [15], 500, True),
    ]  # fmt: skip
    assert (found.begun, found.carried) == (6, digest_of(b"rest"))
    assert found.stretches[0].sets != found.stretches[2].sets
    log.computed(16, 500)
    later = log.told(7, b"next")
    assert later.begun == 6
    assert not later.stretches[0].published, "it goes on at the weights that it had"
    assert len(found.written()) == 108 + 3 * 39


def test_names_of_sets_tell_apart_what_open_rounds_hold_and_nothing_older():
    ours, theirs = SetNames(), SetNames()
    ours.add(0, A, b"only here")
    for names in (ours, theirs):
        names.add(1, A, b"one")
        names.add(2, B, b"two")
    assert ours.between(-1, 2) != theirs.between(-1, 2)
    assert ours.between(0, 2) == theirs.between(0, 2)
    ours.add(2, C, b"came late")
    assert ours.between(0, 2) != theirs.between(0, 2)
    ours.remove(2, C)
    assert ours.between(0, 2) == theirs.between(0, 2)
    ours.forget_until(1)
    assert ours.between(1, 2) == theirs.between(1, 2)
    ours.settled(1, b"one history")
    theirs.settled(1, b"another")
    assert ours.between(1, 2) != theirs.between(1, 2), "who was parted from the others has other weights"


stretches = st.builds(
    Stretch, st.just(-1), st.integers(-1, 8), st.binary(min_size=16, max_size=16), st.integers(0, 2000),
    st.integers(0, 1 << 60), st.integers(1, 60), st.booleans(),
)  # fmt: skip


@given(st.lists(stretches, min_size=1, max_size=MOST_STRETCHES), st.binary(min_size=16, max_size=16))
def test_what_is_written_is_read_again(those, settings):
    those.sort(key=lambda stretch: stretch.applied)
    those[0] = replace(those[0], published=True)
    accused = (Accused(A, 12), Accused(B, NOT_YET))
    findings = (
        Found(b"peer a's", 5, 2, Word.AGREES), Found(b"peer b's", 6, 1, Word.UNANSWERED),
        Found(b"peer c's", 6, 1, Word.ALIKE, 993),
    )  # fmt: skip
    changes = (Change(b"peer c's", 17, Kind.JUDGED),)
    commitment = Commitment(
        9, 7, settings, b"the one before i"[:16], bytes(32), digest_of(b"x"), tuple(those), accused, findings,
        changes,
    )
    assert len(commitment.written()) <= MOST_BYTES
    assert Commitment.read(commitment.written()) == commitment


@given(st.binary(max_size=400))
def test_bytes_that_nobody_signs_are_refused_in_one_way(data):
    with suppress(CommitmentError):
        Commitment.read(data)


def test_a_commitment_that_comes_from_nowhere_is_refused():
    one, two = committed(b"one", b"two", carried=b"rest")
    linked = replace(one, before=b"the one before i")
    assert Commitment.read(linked.written()) == linked
    for false in (one, replace(two, before=NOTHING_BEFORE), replace(linked, carried=bytes(32))):
        with pytest.raises(CommitmentError, match="nowhere"):
            Commitment.read(false.written())


@pytest.mark.parametrize("changes", [{"count": MOST_MICROBATCHES + 1}, {"count": 0}, {"applied": AT}])
def test_work_on_weights_to_come_and_without_end_is_refused(changes):
    (commitment,) = committed(b"one")
    false = replace(commitment, stretches=(replace(commitment.stretches[0], **changes),))
    with pytest.raises(CommitmentError):
        Commitment.read(false.written())


def test_who_did_what_it_says_agrees():
    window = committed(b"one", b"two", carried=b"rest")
    kept = {"carried": b"rest", "next_carried": digest_of(b"on")}
    assert verdict(window, Played(b"one", b"two"), **kept) == "agrees"
    del kept["next_carried"]
    assert verdict(window, Played(b"one", b"two"), **kept) == "agrees", "who is started again carries nothing"


def test_a_contribution_that_does_not_follow_is_a_lie_and_so_is_what_is_carried_on():
    window = committed(b"one", b"two")
    assert verdict(window, Played(b"one", b"other")) == "lied"
    assert verdict(window, Played(b"one", b"two"), next_carried=digest_of(b"poison")) == "lied"


def test_what_contradicts_itself_is_a_lie_before_anything_is_computed():
    one, two = committed(b"one", b"two")
    again = replace(two, stretches=one.stretches)
    assert verdict((one, again), Played()) == "lied", "a microbatch twice"
    gap = replace(two, stretches=(replace(two.stretches[0], first=7),))
    assert verdict((one, gap), Played()) == "lied", "it leaves out what it does not like"
    assert verdict((one, replace(two, round=one.round)), Played()) == "lied", "two for one round"
    assert verdict((one, replace(two, carried=digest_of(b"x"))), Played()) == "lied", "two beginnings"
    assert verdict((one, replace(two, round=AT + EVERY)), Played()) == "lied", "did not begin afresh"


def test_who_reads_another_text_or_lacks_something_has_no_verdict():
    window = committed(b"one", b"two", carried=b"rest")
    other_text = settings_of(b"another text", "here")
    assert verdict(window, Played(b"x"), other_text, carried=b"rest") == "inconclusive"
    assert verdict(window, Played(b"x"), carried=b"not what was committed to") == "inconclusive"
    assert verdict(window, Played(b"one", b"x", gives_up_at=1), carried=b"rest") == "inconclusive"
    assert verdict(window, Played(b"x", b"x", gives_up_at=1), carried=b"rest") == "lied", "the first was seen"
    lost = (window[0], replace(window[1], before=b"of one that was lost"[:16]))
    assert verdict(lost, Played(b"one", b"x"), carried=b"rest") == "inconclusive", "one is left out"
    short = committed(b"one", carried=b"short")
    assert verdict(short, Played(b"one"), carried=b"short") == "lied", "it cannot have begun with that"


ELSEWHERE = settings_of(b"a text", "another device")


def test_who_has_other_settings_says_how_alike_what_was_told_and_carried_on_is():
    told, ours = (b"0123456789", b"abcdefghij"), (b"0123456789", b"abcdefghiX")
    window = committed(*told, carried=b"rest")
    kept = {"carried": b"rest", "onward": b"oX", "next_carried": digest_of(b"oX"), "told": told}
    same = found(window, Played(*ours), ELSEWHERE, **kept)
    assert (same.verdict, same.likeness) == ("alike", 800), "of 1, 0.9 and 0.5"
    assert found(window, Played(*ours), **kept).verdict == "lied", "as who computes alike knows"
    kept |= {"next_carried": digest_of(b"on"), "onward": b""}
    assert found(window, Played(*ours), ELSEWHERE, **kept).likeness == 966, "what is the same needs no bytes"
    assert found(window, Played(*told), ELSEWHERE, **kept).likeness == 1000
    del kept["next_carried"]
    assert found(window, Played(*ours), ELSEWHERE, **kept).likeness == 950


def test_likeness_is_a_cosine_that_knows_how_large_things_are():
    ones = Signs(torch.tensor([[False, True, False, True]] * 2), torch.tensor([[3], [5]], dtype=torch.int32))
    louder, turned = replace(ones, exponents=ones.exponents + 3), replace(ones, negative=~ones.negative)
    assert likeness([(ones, ones)]) == cosine([(ones, louder)]) == 1.0
    assert likeness([(ones, louder)]) == pytest.approx(16 / 65)
    assert likeness([(ones, turned)]) == cosine([(ones, turned)]) == -1.0
    assert likeness([(ones, ones), (ones, turned)]) == 0.0
    assert likeness([]) == cosine([]) == 0.0


def test_who_has_other_settings_finds_nothing_alike_of_which_nothing_came_and_never_a_lie():
    window = committed(b"0123456789", b"abcdefghij")
    nothing = found(window, Played(b"0123456789", b""), ELSEWHERE, told=(b"0123456789", b"abcdefghij"))
    assert (nothing.verdict, nothing.likeness) == ("alike", 500)
    assert found(window, Played(b"X", b"Y"), ELSEWHERE).verdict == "inconclusive", "what it told is not known"
    hidden = found(window, Played(b"0123456789", b"Y"), ELSEWHERE, next_carried=digest_of(b"not given"))
    assert hidden.verdict == "inconclusive"
    again = (window[0], replace(window[1], stretches=window[0].stretches))
    assert found(again, Played(), ELSEWHERE).verdict == "lied", "what contradicts itself does so everywhere"


@pytest.mark.parametrize(("word", "likeness"), [(Word.ALIKE, 1001), (Word.AGREES, 1)])
def test_what_is_more_alike_than_the_same_or_was_not_compared_is_refused(word, likeness):
    found = Found(b"peer a's", 5, 2, word, likeness)
    (commitment,) = committed(b"one")
    with pytest.raises(CommitmentError, match="alike"):
        Commitment.read(replace(commitment, findings=(found,)).written())


def test_a_group_looks_into_its_share_of_windows_together_whatever_its_size():
    for peers in (4, 16):
        secrets = [bytes([number]) * 32 for number in range(peers - 1)]
        windows = [replace(committed(b"one")[0], round=AT + number) for number in range(3000)]
        drawn = sum(is_drawn(secret, window, 0.2, peers) for window in windows for secret in secrets)
        assert 0.17 < drawn / len(windows) < 0.23


def test_who_contributes_last_can_escape_a_draw_that_all_know_but_none_by_secrets():
    """Why the draw of a member's windows is not from the digest of the next set."""
    def public(digest: bytes) -> bool:
        return digest[0] < 256 * 0.5

    def sets(own: int) -> bytes:
        return hashlib.sha256(b"what the others contribute" + bytes([own])).digest()

    assert any(not public(sets(own)) for own in range(16)), "it tries until the digest spares it"
    window = committed(b"one")[0]
    tried = [is_drawn(b"secret of another", replace(window, round=AT + n), 0.5, 2) for n in range(400)]
    assert 0.4 < sum(tried) / len(tried) < 0.6, "whatever it tries, it cannot see what comes of it"


def test_a_newcomers_auditors_are_the_same_for_all_and_never_itself():
    members = [b"a", b"b", b"c", b"new"]
    drawn = [auditors_of(b"new", bytes([number]) * 32, members) for number in range(60)]
    assert all(len(each) == 2 and b"new" not in each for each in drawn)
    assert {peer for each in drawn for peer in each} == {b"a", b"b", b"c"}
    assert auditors_of(b"new", b"x" * 32, members) == auditors_of(b"new", b"x" * 32, reversed(members))
