"""A relay and its streams, in memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from protocols.daemon.hivemind_imports import PeerID
from protocols.errors import PeerGone
from protocols.reachability import circuit_relay
from protocols.reachability.circuit_relay import HOP_CONNECT, HOP_RESERVE, encode, read_fields
from protocols.reachability.relay_service import RelayService
from protocols.signed.identity import Identity

RELAY, HIDDEN, ASKER, OTHER = (
    Identity.from_seed(name).peer_id for name in (b"relay", b"hidden", b"asker", b"other")
)
DOOR = "/ip4/9.9.9.9/tcp/31330"
CIRCUIT = f"{DOOR}/p2p/{RELAY}/p2p-circuit"
DIRECT = "/ip4/8.8.4.4/tcp/31331"


class Pipe:
    """The writing end of a stream in memory."""

    def __init__(self, reader):
        self.reader, self.ended = reader, False
        self.transport = SimpleNamespace(abort=self.close)

    def write(self, data):
        if not self.ended:
            self.reader.feed_data(bytes(data))

    async def drain(self):
        pass

    def close(self):
        if not self.ended:
            self.ended = True
            self.reader.feed_eof()


def stream_pair():
    """(reader, writer) of the one end and of the other."""
    here, there = asyncio.StreamReader(), asyncio.StreamReader()
    return (here, Pipe(there)), (there, Pipe(here))


class Relay:
    """A relay whose clock is set by hand, and which reaches whom `reached` says."""

    def __init__(self):
        self.clock = 1000.0
        self.reached = {}
        self.service = RelayService(self, lambda: self.clock)
        self.serving = []

    async def open_stream(self, peer, protocol, deadline_seconds):
        if peer not in self.reached:
            raise PeerGone(f"no stream to {peer}")
        ours, theirs = stream_pair()
        self.reached[peer](theirs)
        return ours

    def opened(self, peer, address=DIRECT):
        """The asker's end of a stream that `peer` opens."""
        ours, theirs = stream_pair()
        info = SimpleNamespace(peer_id=PeerID.from_base58(peer), addr=address)
        self.serving.append(asyncio.create_task(self.service.accept(info, *theirs)))
        return ours

    async def asked(self, peer, message, address=DIRECT):
        """What it answers, and the stream."""
        reader, writer = self.opened(peer, address)
        writer.write(encode(message))
        return await read_fields(reader), (reader, writer)

    async def status(self, peer, message, address=DIRECT):
        answer, (_, writer) = await self.asked(peer, message, address)
        writer.close()
        return answer[5]

    async def end(self):
        await self.service.close()
        await asyncio.gather(*self.serving)


RESERVE = {1: HOP_RESERVE}
CONNECT = {1: HOP_CONNECT, 2: circuit_relay.peer_field(HIDDEN)}


def accepts(answer=circuit_relay.OK):
    """A hidden peer: its ends of the circuits that were brought to it."""
    ends = []

    def reached(stream):
        async def answers():
            told = await read_fields(stream[0])
            assert circuit_relay.peer_in(told) == ASKER
            stream[1].write(encode({1: circuit_relay.STOP_STATUS, 4: answer}))

        ends.append((stream, asyncio.create_task(answers())))

    return reached, ends


class Stream:
    """One stream to the service, both ends in memory."""

    def __init__(self):
        self.to_service, self.to_asker, self.ended = asyncio.StreamReader(), asyncio.StreamReader(), False
        self.transport = SimpleNamespace(abort=self.end)

    def write(self, data):
        self.to_asker.feed_data(data)

    async def drain(self):
        pass

    def end(self):
        if not self.ended:
            self.ended = True
            self.to_asker.feed_eof()
