"""The ways in that a peer takes when it starts: its bootstraps, its neighbours, and whom it remembers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from types import SimpleNamespace

import pytest
from swarm import sign, tiny_manifest

from peers.config.errors import UserError
from peers.config.run_file import OtherVersion, load_signed
from peers.lab.world import virtual_time
from peers.network.discovery.bootstrap import PeerCache, find_manifest, join_directory
from peers.process.role import Network
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
    process = SimpleNamespace(config=config, notify=lambda event, text: said.append((event, text)))
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
    assert (event, text.endswith("continues alone")) == ("unreachable", True)
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


class DeadFor:
    """A directory in which nobody answers for so long, for reasons that may change."""

    def __init__(self, seconds, reason_at):
        self.until, self.reason_at = seconds, reason_at

    async def bootstrap(self, addresses, seconds):
        now = asyncio.get_running_loop().time()
        if now < self.until:
            raise Unreachable(self.reason_at(now))
        return 1


def said_while_joining(directory, cache):
    said = []
    virtual_time.run(join_directory(directory, [REMEMBERED], cache, lambda _, text: said.append(text)))
    return said


def test_a_bootstrap_that_is_down_is_said_once_and_then_ever_less_often_how_long(cache):
    said = said_while_joining(DeadFor(3600.0, lambda now: "no bootstrap answered: refused"), cache)
    assert said[0] == "no bootstrap answered: refused; asks again until one does (Ctrl+C stops)"
    waited = [int(re.fullmatch(r"still no answer, (\d+) s", text)[1]) for text in said[1:-1]]
    assert len(waited) < 15
    assert all(later - earlier >= min(earlier, 590) for earlier, later in itertools.pairwise(waited))
    assert said[-1].startswith("joined the swarm")


def test_another_reason_is_said_as_soon_as_it_is_one(cache):
    said = said_while_joining(DeadFor(120.0, lambda now: "refused" if now < 60 else "another peer"), cache)
    assert [text.partition(";")[0] for text in said if "asks again" in text] == ["refused", "another peer"]


def signed_run():
    return sign(tiny_manifest())


class Knowing:
    """A directory that answers with `answers` in turn, the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    async def get_manifest(self, run, seconds):
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def found(directory, run, kept):
    """What `find_manifest` returns on a clock that jumps, and what was said meanwhile."""
    said = []
    finding = find_manifest(run, directory, kept, lambda event, text: said.append(text))
    return virtual_time.run(finding), said


def test_a_run_that_nobody_knows_ends_after_a_minute_and_leaves_no_file(tmp_path):
    directory = Knowing(None)
    with pytest.raises(UserError, match=r"no peer knows the run (ab){32} yet; asked for 60 s"):
        found(directory, "ab" * 32, tmp_path / "run.json")
    assert 5 < directory.asked < 15
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_published_meanwhile_is_found(tmp_path):
    signed = signed_run()
    run, said = found(Knowing(None, None, signed.wire()), signed.run_id, tmp_path / "run.json")
    assert run == signed
    assert len(said) == 2
    assert load_signed(tmp_path / "run.json") == signed


def test_a_run_of_another_version_is_not_asked_for_again(tmp_path):
    canonical = signed_run().manifest.canonical().replace(b'"wire_version":', b'"wire_version":9')
    run, directory = hashlib.sha256(canonical).hexdigest(), Knowing(canonical + bytes(64))
    with pytest.raises(OtherVersion, match=r"wire version 9\d+, this program \d+: .* too old; update"):
        found(directory, run, tmp_path / "run.json")
    assert directory.asked == 1


def test_updating_is_no_advice_where_the_run_is_the_older_one(tmp_path):
    canonical = signed_run().manifest.canonical().replace(b'"wire_version":', b'"wire_version":-')
    run, directory = hashlib.sha256(canonical).hexdigest(), Knowing(canonical + bytes(64))
    with pytest.raises(OtherVersion, match=r"the run is of an older one; ask the") as refusal:
        found(directory, run, tmp_path / "run.json")
    assert "update" not in str(refusal.value)


def test_a_stranger_cannot_end_a_peer_by_a_made_up_version(tmp_path):
    signed = signed_run()
    liar = signed.manifest.canonical().replace(b'"wire_version":', b'"wire_version":9') + bytes(64)
    run, said = found(Knowing(liar, signed.wire()), signed.run_id, tmp_path / "run.json")
    assert run == signed
    assert "not valid" in said[0]
