"""Carriers that cannot start: one error, whatever the machine lacks, and everybody goes on without them."""

import asyncio
import tempfile
from types import SimpleNamespace

import pytest

from protocols.daemon.p2pd import LOOPBACK
from protocols.errors import CannotStart
from protocols.p2pd import carriers, multipath_dialer
from protocols.p2pd.carriers import Carriers
from protocols.p2pd.chunk_streams import ChunkCarriers
from protocols.p2pd.multipath_dialer import SubflowDialer
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.identity import Identity


def no_folder(monkeypatch, tmp_path):
    """As when /tmp is full or read-only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))


def no_identity(monkeypatch, tmp_path):
    """The folder is made, and then nothing can be written in it."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(tmp_path / "file"))


def no_process(monkeypatch, tmp_path):
    """p2pd itself finds no room, or no process may be started any more."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def start(identity_path, options):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(carriers.Daemon, "start", start)


@pytest.fixture(params=[no_folder, no_identity, no_process])
def poor_machine(request, monkeypatch, tmp_path):
    request.param(monkeypatch, tmp_path)


async def test_on_a_machine_without_room_carriers_say_that_they_cannot_start(poor_machine):
    started = Carriers(LOOPBACK)
    for _ in range(2):
        with pytest.raises(CannotStart, match=r"a carrier cannot start: .+TMPDIR"):
            await started.start(2)
    assert started.running == []
    await started.close()


async def test_who_fetches_chunks_hears_the_same(poor_machine):
    def unused(*_):
        raise AssertionError("nothing is fetched")

    with pytest.raises(CannotStart):
        await ChunkCarriers.start(2, LOOPBACK, unused, unused, resolve=unused)
    with pytest.raises(CannotStart):
        await P2pdTransport.carriers(SimpleNamespace(_resolve=unused), 2, unused, unused)


class Link:
    """What a dialer looks at."""

    peer, addresses, carriers = "12D3KooW", ("/ip4/1.1.1.1/tcp/1",), ()
    broke_at, closed = float("-inf"), False


async def test_a_link_that_gets_no_carrier_asks_for_one_no_sooner_than_a_minute_later(poor_machine):
    dialer, link = SubflowDialer(Identity.from_seed(b"a")), Link()
    dialer.want(link)
    (task,) = dialer._tasks.values()
    await asyncio.wait([task])
    assert task.exception() is None
    assert dialer.counted["failed"] == 1
    dialer.want(link)
    assert dialer._tasks == {}, "not so soon"
    link.broke_at -= multipath_dialer.RETRY_SECONDS
    dialer.want(link)
    assert dialer._tasks
    await dialer.close()


async def test_of_several_carriers_those_that_can_start_do(monkeypatch, tmp_path):
    class Started:
        end_reason = None

        @classmethod
        async def start(cls, path, options):
            if path.name == "identity-0":
                raise OSError(11, "Resource temporarily unavailable")
            return cls()

        async def stop(self):
            pass

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(carriers, "Daemon", Started)
    started = Carriers(LOOPBACK)
    assert len(await started.start(3)) == len(started.running) == 2
    await started.close()
    assert list(tmp_path.iterdir()) == []
