"""Shares of the sources that the run's owner changes: which of them hold, and how they are signed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from swarm import OWNER, tiny_manifest

from peers.cli.owner.course import _require_sources
from peers.config.errors import UserError
from protocols.errors import Malformed
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.orders import open_order, seal_order
from swarmnet.run import owner_orders
from swarmnet.run.mixtures import MAX_MIXTURES, MixtureChange, mixture_at
from swarmnet.run.owner_orders import NO_ORDER, OrderError
from swarmnet.run.schema import Data, TextSource

RUN_ID = tiny_manifest().run_id()
HALVES = (("python", 500), ("wiki", 500))
CODE = (("python", 2000), ("wiki", 0))


def test_the_newest_change_from_a_round_on_holds():
    early, late, between = MixtureChange(10, HALVES), MixtureChange(30, CODE), MixtureChange(20, CODE)
    at = [mixture_at((early, late, between), round) for round in (9, 10, 19, 20, 99)]
    assert at == [None, early, early, between, between]
    assert late.weights_of(["wiki", "python", "books"]) == [0, 2000, 0]


def test_a_signed_order_has_the_changes_and_one_without_them_is_as_it_was():
    order = owner_orders.mixture(NO_ORDER, CODE, 12, "more code")
    signed = seal_order(OWNER, RUN_ID, replace(order, sequence=7))
    assert open_order(signed.data, RUN_ID).order == replace(order, sequence=7)
    (line,) = owner_orders.describe_changes(NO_ORDER, order)
    assert line == "the sources are mixed python 2, wiki 0 from round 12 on"
    for before, length in ((NO_ORDER, 8), (replace(NO_ORDER, ends=9), 10), (order, 11)):
        payload = seal_order(OWNER, RUN_ID, replace(before, sequence=7)).data
        plain = msgspec.msgpack.decode(payload[payload.index(b"order") - 2 :])
        assert len(plain) == length


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ((), "name each source once"),
        ((("a", 1), ("a", 2)), "name each source once"),
        ((("a", 0), ("b", 0)), "one is above 0"),
        ((("a", -1), ("b", 1)), "between 0 and"),
    ],
    ids=str,
)
def test_a_mixture_that_makes_no_sense_is_refused(weights, reason):
    with pytest.raises(OrderError, match=reason):
        owner_orders.mixture(NO_ORDER, weights, 1, "")


def test_an_order_keeps_the_newest_changes_and_refuses_one_twice():
    order = NO_ORDER
    for round in range(MAX_MIXTURES + 1):
        order = owner_orders.mixture(order, HALVES, round, "")
    assert [change.from_round for change in order.mixtures] == list(range(1, MAX_MIXTURES + 1))
    with pytest.raises(OrderError, match="already"):
        owner_orders.mixture(order, HALVES, MAX_MIXTURES, "")


def test_a_forged_mixture_is_refused():
    fields = ["order", "", False, 0, [], [], [], None, [], None, [[3, [["a", -1]]]]]
    data = seal(OWNER, RUN_ID, EnvelopeKind.ORDER, -1, 0, 5, msgspec.msgpack.encode(fields))
    with pytest.raises(Malformed):
        open_order(data, RUN_ID)


def test_only_a_run_with_weights_has_a_mixture_and_all_sources_are_named():
    sources = (TextSource("python", "p", weight=1.0), TextSource("wiki", "w", weight=1.0))
    data = Data(sources, sampling="epoch")
    _require_sources(data, CODE)
    with pytest.raises(UserError, match="python=WEIGHT wiki=WEIGHT"):
        _require_sources(data, CODE[:1])
    for other in (replace(data, sampling="random"), Data((TextSource("python", "p"),), sampling="epoch")):
        with pytest.raises(UserError, match="without weights"):
            _require_sources(other, CODE)
