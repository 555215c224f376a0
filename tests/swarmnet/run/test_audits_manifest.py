"""`sync.audits`: whose work can be computed again, and what else a run must be for it."""

from dataclasses import replace

import pytest
from swarm import tiny_manifest

from swarmnet.run.manifest import Data, Experts, ManifestError, Rounds, Sync
from swarmnet.run.manifest_check import check

SYNC = Sync(method="local-steps", afresh_rounds=2, audits=0.05)
AUDITED = tiny_manifest((3,), sync=SYNC, rounds=Rounds(snapshot_rounds=4))


def test_a_run_without_audits_keeps_its_id():
    assert b"audits" not in tiny_manifest((3,), sync=replace(SYNC, audits=0.0)).canonical()
    assert b"audits" in AUDITED.canonical()
    assert b'"fee"' not in AUDITED.canonical()


def test_whole_models_that_begin_afresh_can_be_audited():
    check(AUDITED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": replace(SYNC, audits=1.5)}, r"must lie in \[0, 1\]"),
        ({"sync": replace(SYNC, audits=-0.1)}, r"must lie in \[0, 1\]"),
        ({"sync": replace(SYNC, afresh_rounds=0)}, "set sync.afresh_rounds to 1 to 2"),
        ({"sync": replace(SYNC, afresh_rounds=3)}, "half of rounds.snapshot_rounds"),
        ({"sync": replace(SYNC, fee=-1)}, "sync.fee is -1"),
        ({"sync": replace(SYNC, audits=0.0, fee=4)}, "sync.fee: .* set sync.audits"),
        ({"sync": replace(SYNC, fee=4, sent="eight-bits")}, "set sync.sent to bit or four-bits"),
        ({"sync": replace(SYNC, fee=4, method="sparse-loco")}, "set sync.sent to bit or four-bits"),
        ({"stages": (2, 1)}, "set stages to one"),
        ({"sync": replace(SYNC, exchange="sharded")}, "set sync.exchange to everyone"),
        ({"sync": replace(SYNC, method="diloco")}, "sync.outer_momentum"),
        ({"data": Data(sequence_tokens=16, microbatch_sequences=2, order="epochs")}, "data.order to drawn"),
    ],
)
def test_others_are_told_what_to_change(changes, message):
    with pytest.raises(ManifestError, match=message):
        check(replace(AUDITED, **changes))


def test_experts_of_which_each_peer_trains_some_go_without():
    model = replace(AUDITED.model, qk_norm=True, experts=Experts(count=4, active=2, groups=2))
    with pytest.raises(ManifestError, match=r"sync\.audits: .*model\.experts\.groups"):
        check(replace(AUDITED, model=model))
