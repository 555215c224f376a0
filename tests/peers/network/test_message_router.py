"""A message goes to the methods that are marked for its kind, and to no others."""

from swarm import tiny_manifest

from peers.network.message_router import MessageRouter, handles
from protocols.fields import RunSizes
from protocols.messages.table import MESSAGES, Act, Busy, Bye, Chunk, GetState
from swarmnet.identifiers import PeerId

A, B = PeerId("a"), PeerId("b")


class Service:
    def __init__(self) -> None:
        self.got: list[tuple[PeerId, object, bytes]] = []

    @handles(GetState)
    def asked(self, peer: PeerId, message: GetState, body: bytes) -> None:
        self.got.append((peer, message, body))

    @handles(Chunk)
    def chunk(self, peer: PeerId, message: Chunk, body: bytes) -> None:
        self.got.append((peer, message, body))


class Narrower(Service):
    """Inherits the marks."""


def test_a_message_reaches_the_newest_service_of_a_class_and_all_classes_that_handle_it():
    router, first, second, other = MessageRouter(), Service(), Service(), Narrower()
    for service in (first, other, second):
        router.add(service)
    assert router.dispatch(A, GetState(), b"")
    assert (first.got, second.got, other.got) == ([], [(A, GetState(), b"")], [(A, GetState(), b"")])


def test_messages_to_a_service_that_does_not_exist_yet_are_dropped_and_others_are_left():
    router, service = MessageRouter(Service), Service()
    assert router.dispatch(A, GetState(), b"")
    assert not router.dispatch(A, Bye("leaving"), b"")
    router.add(service)
    assert router.dispatch(A, Chunk(b"digest", 0), b"body")
    assert service.got == [(A, Chunk(b"digest", 0), b"body")]


def test_a_service_chooses_its_peers_and_is_called_after_each_message():
    router, service, after = MessageRouter(), Service(), []
    router.add(service, accepts=lambda peer: peer == A, after=lambda: after.append(len(service.got)))
    for peer in (A, B, A):
        router.dispatch(peer, GetState(), b"")
    assert [peer for peer, _, _ in service.got] == [A, A]
    assert after == [1, 2]


def test_messages_of_a_service_that_the_run_does_without_are_refused():
    router, refused = MessageRouter(Service), []
    router.refuse(Service, refused.append)
    router.dispatch(B, GetState(), b"")
    router.dispatch(B, Busy("", 0, 1), b"")
    assert refused == [B]


def test_bodies_are_accepted_only_with_messages_that_some_service_handles():
    bodies = MessageRouter(Service).bodies(RunSizes(tiny_manifest(), state_bytes=100))
    assert bodies == {Chunk: 100}
    assert Act in MESSAGES
    assert Act not in bodies
