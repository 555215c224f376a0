"""The ways in that a peer takes when it starts: its bootstraps, its neighbours, and whom it remembers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from peers.joining import PeerCache
from peers.roles.role import Network
from protocols.errors import Unreachable
from swarmnet.identifiers import PeerId

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
REMEMBERED = f"/ip4/192.0.2.7/tcp/31330/p2p/{PEER}"


class Directory:
    """Notes what it was asked to join through; nobody answers at what is in `dead`."""

    def __init__(self, dead=()):
        self.dead, self.tried = frozenset(dead), []

    async def bootstrap(self, addresses, seconds):
        self.tried.append(list(addresses))
        if self.dead.issuperset(addresses):
            raise Unreachable("none of them answers")
        return 1


@pytest.fixture
def cache(tmp_path):
    return PeerCache(tmp_path / "peers.json")


def joined(directory, cache, lan=None, bootstrap=()):
    """What was said while a peer joined."""
    said = []
    config = SimpleNamespace(bootstrap=list(bootstrap))
    process = SimpleNamespace(config=config, say=lambda event, text: said.append((event, text)))
    asyncio.run(Network(None, None, directory, cache, lan).join(process))
    return said


def test_the_first_peer_of_a_run_finds_those_it_met_when_it_starts_again(cache):
    cache.write([(PeerId(PEER), ["/ip4/192.0.2.7/tcp/31330"])])
    directory = Directory()
    ((event, text),) = joined(directory, cache)
    assert directory.tried == [[REMEMBERED]]
    assert (event, text.endswith("1 addresses remembered")) == ("joined", True)


def test_who_remembers_only_peers_that_are_gone_goes_on_alone(cache):
    cache.write([(PeerId(PEER), ["/ip4/192.0.2.7/tcp/31330"])])
    directory = Directory(dead=[REMEMBERED])
    ((event, text),) = joined(directory, cache)
    assert (event, text.endswith("goes on alone")) == ("unreachable", True)
    assert len(directory.tried) == 1


def test_who_knows_nobody_asks_nobody(cache):
    directory = Directory()
    assert joined(directory, cache) == []
    assert directory.tried == []


def test_neighbours_and_remembered_peers_are_tried_together(cache):
    cache.write([(PeerId(PEER), ["/ip4/192.0.2.7/tcp/31330"])])
    near = f"/ip4/10.0.0.2/tcp/31330/p2p/{PEER}"

    async def anybody(seconds):
        return True

    directory = Directory(dead=[REMEMBERED])
    lan = SimpleNamespace(anybody=anybody, found=lambda: [near])
    ((event, _),) = joined(directory, cache, lan)
    assert (event, directory.tried) == ("joined", [[near, REMEMBERED]])
