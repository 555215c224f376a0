"""What a record tells of experts: nothing where there are no groups of them, and then bounded numbers."""

import msgspec
import pytest

from protocols.errors import Malformed
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.peer_record import TOLD_GROUPS, PeerRecord
from protocols.signed.records import RECORD_BYTES, open_record, seal_record
from swarmnet.identifiers import RunId

PEER, RUN = Identity.from_seed(b"a peer"), RunId("ab" * 32)
FIELDS = PeerRecord.__struct_fields__


def record(**experts: object) -> PeerRecord:
    return PeerRecord(PEER.peer_id, 0, "worker", [], 0, 64.0, "0", **experts)


def test_who_trains_which_experts_comes_back_as_it_was_told_and_otherwise_does_not_travel():
    told = record(experts_group=3, experts_trained=(9, -1, 12, 11))
    sealed = seal_record(PEER, RUN, told, 1.0)
    assert open_record(sealed, RUN).record == told
    silent = record()
    assert open_record(seal_record(PEER, RUN, silent, 1.0), RUN).record == silent
    assert len(sealed) - len(seal_record(PEER, RUN, silent, 1.0)) > 10


def test_of_the_most_groups_that_are_told_a_record_has_room():
    told = record(experts_group=255, experts_trained=(2**32 - 1,) * TOLD_GROUPS)
    assert len(seal_record(PEER, RUN, told, 1.0)) < RECORD_BYTES / 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("experts_group", -2), ("experts_group", 256), ("experts_group", 1.5),
        ("experts_trained", [-2]), ("experts_trained", [2**32]), ("experts_trained", [0] * (TOLD_GROUPS + 1)),
        ("experts_trained", 7),
    ],
)  # fmt: skip
def test_what_is_no_group_or_round_is_refused(field, value):
    told = record(experts_group=1, experts_trained=(5, 5))
    fields = msgspec.to_builtins(told, builtin_types=(bytes,))
    fields[FIELDS.index(field) - len(FIELDS)] = value
    data = seal(PEER, RUN, EnvelopeKind.RECORD, 0, 0, 1_000_000, msgspec.msgpack.encode(fields))
    with pytest.raises(Malformed):
        open_record(data, RUN)
