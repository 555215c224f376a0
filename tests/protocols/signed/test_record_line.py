"""What a record tells of a line: nothing unless it is known, and then bounded numbers."""

from math import inf

import msgspec
import pytest

from peers.network.discovery.claims import bandwidth_fields, claimed_bandwidth
from protocols.errors import Malformed
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import open_record, seal_record
from swarmnet.identifiers import RunId
from swarmnet.resources.link_bandwidth import UNKNOWN, LinkBandwidth

PEER, RUN = Identity.from_seed(b"a peer"), RunId("ab" * 32)


def record(line: LinkBandwidth) -> PeerRecord:
    up, down = bandwidth_fields(line)
    return PeerRecord(PEER.peer_id, 0, "worker", [], 0, 64.0, "0",
                      up_bytes_per_second=up, down_bytes_per_second=down)  # fmt: skip


def test_a_line_comes_back_as_it_was_told_and_one_that_is_not_known_does_not_travel():
    told, silent = (
        seal_record(PEER, RUN, record(line), 1.0) for line in (LinkBandwidth(1.25e6, inf), UNKNOWN)
    )
    assert claimed_bandwidth(open_record(told, RUN).record) == LinkBandwidth(1_250_000, inf)
    assert claimed_bandwidth(open_record(silent, RUN).record) == UNKNOWN
    plain = PeerRecord(PEER.peer_id, 0, "worker", [], 0, 64.0, "0")
    assert len(silent) == len(seal_record(PEER, RUN, plain, 1.0)) < len(told)


@pytest.mark.parametrize("up", [-1, 2**62, 1.5, "fast"])
def test_a_line_that_is_no_number_is_refused(up):
    fields = msgspec.to_builtins(record(LinkBandwidth(5.0, 6.0)), builtin_types=(bytes,))
    fields[PeerRecord.__struct_fields__.index("up_bytes_per_second") - len(PeerRecord.__struct_fields__)] = up
    data = seal(PEER, RUN, EnvelopeKind.RECORD, 0, 0, 1_000_000, msgspec.msgpack.encode(fields))
    with pytest.raises(Malformed):
        open_record(data, RUN)
