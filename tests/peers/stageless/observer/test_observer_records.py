"""The fields of a record by which a peer is shown: bounded, checked when read, and never made wrong."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swarm import sign, tiny_manifest

from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.discovery.claims import Claims, plain_name
from peers.network.ports import HeartbeatLoad
from peers.worker.rounds.no_rounds import NoRounds
from peers.worker.served_stage import claims_of
from peers.worker.settings import Settings
from protocols.errors import Malformed
from protocols.memory.transport import MemoryNetwork
from protocols.messages.table import PeerRecord
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.records import RECORD_BYTES, open_record, seal_record
from swarmnet.identifiers import RunId
from swarmnet.pipeline.answer_comparison import AnswerTrust

RUN = RunId("ab" * 32)
ME = Identity.from_seed(b"me")
GOOD = {"name": "attic 3080", "state": "training", "loss": 2.5, "tokens": 10, "checkpoint_seconds": 5.0}


def sealed(**fields):
    """Signed without looking, as a liar does."""
    content = PeerRecord(ME.peer_id, 0, "worker", [], 1, 1.0, "0", **{**GOOD, **fields})
    return seal(ME, RUN, EnvelopeKind.RECORD, 0, 1, 1, msgspec.msgpack.encode(content))


def test_what_a_peer_says_of_itself_comes_back_as_it_was():
    assert open_record(sealed(), RUN).record.name == "attic 3080"
    assert open_record(sealed(loss=None), RUN).record.loss is None


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "x" * 65}, {"name": "a\x1b[31mred"}, {"name": "two\nlines"}, {"name": "right\u202eleft"},
        {"state": "x" * 17}, {"state": "<b>"}, {"state": "two words"}, {"state": "joining\n"},
        {"loss": -1.0}, {"loss": float("nan")}, {"loss": float("inf")}, {"loss": 1e7},
        {"tokens": -1}, {"tokens": 2**62}, {"settled": -2}, {"checkpoint_round": 2**32},
        {"checkpoint_seconds": float("inf")}, {"checkpoint_seconds": -1.0},
        {"sent_bytes": -1}, {"received_bytes": 2**63},
    ],
)  # fmt: skip
def test_impossible_words_and_numbers_are_refused(fields):
    with pytest.raises(Malformed):
        open_record(sealed(**fields), RUN)


def test_the_longest_record_fits():
    content = PeerRecord(
        ME.peer_id, 0, "worker", [f"/ip4/203.0.113.5/tcp/31330/p2p/{ME.peer_id}/p2p-circuit"] * 16, 2**32 - 1,
        1e300, "v" * 64, 2**15 - 1, "\U0001f40b" * 64, "connecting", 1e6, 2**62 - 1, 2**32 - 1, 2**32 - 1,
        1e300, 2**62 - 1, 2**62 - 1,
    )  # fmt: skip
    assert len(seal_record(ME, RUN, content, 1.0)) < RECORD_BYTES


@given(st.text(max_size=100))
def test_any_name_that_a_person_types_becomes_one_that_records_take(name):
    open_record(sealed(name=plain_name(name)), RUN)


def test_an_older_record_without_these_fields_is_still_read():
    old = msgspec.msgpack.encode(["peer", ME.peer_id, 0, "worker", [], 1, 1.0, "0"])
    record = open_record(seal(ME, RUN, EnvelopeKind.RECORD, 0, 1, 1, old), RUN).record
    assert (record.state, record.loss, record.settled) == ("", None, -1)


def test_docs_wire_lists_the_fields_of_a_record_in_their_order():
    page = (Path(__file__).parents[4] / "docs" / "wire.md").read_text()
    (found,) = re.findall(r'`\["peer", (peer, stage,[^\]]*)\]`', page)
    assert found.replace("\n  ", " ").split(", ") == list(PeerRecord.__struct_fields__)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e9, -1.0])
def test_a_worker_in_trouble_makes_no_record_that_would_be_refused(loss):
    ledger, traffic = SimpleNamespace(tokens=5), SimpleNamespace(sent=Counter(), received=Counter())
    pipeline = SimpleNamespace(
        losses=SimpleNamespace(mean=loss),
        ledger=ledger,
        origin=SimpleNamespace(text=None),
        checks=SimpleNamespace(trust=AnswerTrust()),
    )
    settings = Settings(name="a\nb", joules=lambda: 7.5)
    services = SimpleNamespace(
        context=SimpleNamespace(settings=settings, manifest=tiny_manifest(), me=ME.peer_id),
        lifecycle=SimpleNamespace(state="connecting"),
        part=SimpleNamespace(device=torch.device("cpu"), kind="", method=None),
        pipeline_service=pipeline,
        round_service=NoRounds(),
        disk=SimpleNamespace(saved=None),
        links=SimpleNamespace(traffic=traffic),
        receipts=SimpleNamespace(newest=lambda: ()),
    )
    claims = claims_of(services, HeartbeatLoad(0, False, 0, 0.0, 0))
    assert (claims.loss, claims.name, claims.tokens, claims.joules) == (None, "a?b", 5, 7.5)
    assert (claims.round, claims.settled, claims.finalized_tokens) == (0, -1, None)


async def test_presence_signs_what_is_claimed():
    network = MemoryNetwork()
    transport, signed = network.transport(ME.peer_id), sign(tiny_manifest())
    presence = RecordAnnouncer(
        signed=signed,
        identity=ME,
        transport=transport,
        directory=network.directory(ME.peer_id),
        version="1.2",
        log_event=lambda *_, **__: None,
    )
    sealed = presence.record(2, Claims("paused", "attic", tokens=7, joules=9.9))
    record = open_record(sealed, signed.run_id).record
    assert (record.stage, record.state, record.name, record.tokens) == (2, "paused", "attic", 7)
    assert record.joules == 9
