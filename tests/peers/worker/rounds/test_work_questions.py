"""What is taken as the answer about a window of somebody's work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from swarm import tiny_manifest

from peers.worker.rounds.vouching import Wanted
from peers.worker.rounds.work_audit_path import WorkAuditPath, WorkQuestion
from protocols.errors import Malformed
from protocols.signed.commitments import joined
from protocols.signed.envelope import Kind, seal
from protocols.signed.identity import Identity
from swarmnet.audits.commitment import digest_of, settings_of
from swarmnet.audits.work_log import WorkLog
from swarmnet.identifiers import ContributionId
from swarmnet.run.manifest import Sync

MAKER, EVERY, CARRIED, PAYLOAD = Identity.from_seed(b"maker"), 2, 10, 8
OURS = settings_of(b"text", "ours")
MANIFEST = tiny_manifest((3,), sync=Sync(method="local-steps", afresh_rounds=EVERY, audits=0.5))
RUN = MANIFEST.run_id()


def answered(wanted: Wanted, *bodies: bytes, goes_on: bool = True, heads: int = 3, counts: bool = True):
    """Of a window of two rounds, made with other settings, and the one after it."""
    log = WorkLog(settings_of(b"text", "theirs"), MAKER.peer_id, EVERY)
    log.begins_afresh(b"into it...")
    log.before = b"the one before i"
    log.published(-1, -1)
    commitments, signed = [], []
    for number in range(3):
        if number == 2:
            log.begins_afresh(b"out of it.")
            log.published(-1, -1)
        log.computed(number, 1000)
        commitments.append(log.told(number, b"moves %d." % number))
        signed.append(seal(MAKER, RUN, Kind.CONTRIBUTION, 0, number, 512, commitments[-1].written()))
    name = ContributionId(commitments[1].name), int(wanted)
    question = WorkQuestion(name, 1, MAKER.peer_id, MAKER.peer_id, 9.0, size=PAYLOAD, goes_on=goes_on)
    method = SimpleNamespace(payload_bytes=PAYLOAD)
    path = SimpleNamespace(
        manifest=MANIFEST, _settings=OURS, counts=lambda peer, round: counts,
        work=SimpleNamespace(run_id=RUN, stage=0, method=method),
        means=SimpleNamespace(carried_bytes=CARRIED),
    )  # fmt: skip
    path._can_judge = lambda question: WorkAuditPath._can_judge(path, question)
    path._wanted = lambda question: WorkAuditPath._wanted(path, question)
    for body in (joined(signed[:heads]), *bodies):
        assert not question.is_whole
        WorkAuditPath.take(path, question, body)
    return question


def test_who_has_other_settings_is_given_what_was_carried_into_the_next_window():
    question = answered(Wanted.ONWARD, b"into it.", b"..", b"out of i", b"t.")
    assert question.is_whole
    assert digest_of(question.evidence.carried) == question.window[0].carried
    assert digest_of(question.evidence.onward) == question.after.carried
    assert question.evidence.told == {}


def test_of_a_newcomer_what_it_contributed_is_given_since_no_set_holds_it():
    bodies = b"into it.", b"..", b"out of i", b"t.", b"moves 0.", b"moves 1."
    question = answered(Wanted.ALL, *bodies, counts=False)
    assert question.is_whole
    assert [question.evidence.told[each.payload] for each in question.window] == [b"moves 0.", b"moves 1."]


def test_nobody_hides_what_it_carried_on_by_leaving_out_the_commitment_that_names_it():
    with pytest.raises(Malformed, match="goes on"):
        answered(Wanted.NOTHING, heads=2)
    assert answered(Wanted.NOTHING, b"into it...", heads=2, goes_on=False).after is None
