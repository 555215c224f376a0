"""The small HTTP servers: who is served, for how long, and by which name they may be asked."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peers.config.peer_file import MetricsFile
from peers.runtime import http_server
from peers.runtime.http_server import (
    LOOPBACK,
    LOOPBACK_RESERVE,
    MAX_PER_CLIENT,
    MAX_REQUESTS,
    REQUEST_SECONDS,
    ConnectionSlots,
    Exporter,
    HttpResponse,
    PageServer,
    client_of,
    is_named,
)

GET = b"GET /healthz HTTP/1.0\r\n\r\n"


@contextmanager
def peer(hosts=()):
    with Exporter(
        address=("127.0.0.1", 0),
        metrics=lambda: b"secret 1\n",
        healthy=lambda: None,
        ready=lambda: None,
        hosts=hosts,
    ) as running:
        yield running


def ask(server, request=GET, seconds=20.0):
    """All that it says until it ends the connection; b"" where it ends it without a word."""
    said = b""
    with socket.create_connection(server.address, seconds) as client:
        try:
            client.sendall(request)
            while part := client.recv(65536):
                said += part
        except ConnectionError:
            pass
    return said


# -- how long -----------------------------------------------------------------------------------------


def test_slow_strangers_cannot_keep_a_probe_from_liveness():
    with peer() as server, ExitStack() as crowd:
        for _ in range(MAX_REQUESTS + MAX_PER_CLIENT):
            slow = crowd.enter_context(socket.create_connection(server.address))
            slow.sendall(b"GET /metrics HTTP/1.1\r\nX-")
        for _ in range(20):
            assert ask(server).startswith(b"HTTP/1.0 200")


def test_a_request_that_drips_is_ended_in_time(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.5)
    with peer() as server, socket.create_connection(server.address) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX-")
        client.settimeout(0.1)
        assert ended(client, lambda: client.sendall(b"a"))


def test_an_answer_that_is_read_slowly_is_ended_in_time(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.5)
    large = HttpResponse(200, "text/plain", bytes(64 << 20))
    with (
        PageServer(address=("127.0.0.1", 0), pages={"/": lambda _: large}, key="observer.listen") as server,
        socket.create_connection(server.address) as client,
    ):
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert client.recv(1000)
        assert gone(server), "its thread has ended although the rest was not read"


def test_a_connection_that_would_be_kept_alive_ends_with_the_answer():
    with peer() as server:
        said = ask(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
        assert said.endswith(b"ok\n")
        assert gone(server)


def ended(client, say, seconds=10.0):
    """Whether the server ends the connection while something is said now and then."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            say()
            if not client.recv(100):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def gone(server, seconds=10.0):
    """Whether nobody holds a place."""
    until = time.monotonic() + seconds
    while server._server.places._served and time.monotonic() < until:
        time.sleep(0.02)
    return not server._server.places._served


# -- who ----------------------------------------------------------------------------------------------


class Connection:
    """Notes that it was cut."""

    def __init__(self):
        self.cut = False

    def shutdown(self, how):
        self.cut = True


def come(places, client, count=1, now=0.0):
    made = [Connection() for _ in range(count)]
    assert all(places.come(connection, client, now) for connection in made)
    return made


def test_a_newcomer_takes_the_place_of_whoever_of_its_own_address_has_waited_longest():
    places = ConnectionSlots()
    other, mine = come(places, "192.0.2.2", MAX_PER_CLIENT), come(places, "192.0.2.1", MAX_PER_CLIENT)
    come(places, "192.0.2.1", 3)
    assert [connection.cut for connection in mine] == [True] * 3 + [False] * (MAX_PER_CLIENT - 3)
    assert not any(connection.cut for connection in other)


def test_strangers_of_many_addresses_leave_places_for_this_machine_and_for_a_probe_from_outside():
    places = ConnectionSlots()
    for host in range(100):
        crowd = come(places, f"192.0.2.{host}", 2)
        for connection in crowd:
            places.leave(connection)
        come(places, f"192.0.2.{host}", 1)
    own = come(places, LOOPBACK, LOOPBACK_RESERVE)
    (probe,) = come(places, "198.51.100.1")
    come(places, "203.0.113.1", MAX_PER_CLIENT)
    assert not any(connection.cut for connection in (*own, probe))


def test_no_page_is_interrupted_while_it_is_made_and_then_there_is_no_place():
    places = ConnectionSlots()
    busy = come(places, "192.0.2.1", MAX_PER_CLIENT)
    with ExitStack() as work:
        for connection in busy:
            work.enter_context(places.computing(connection))
        assert not places.come(Connection(), "192.0.2.1", 0.0)
        assert not any(connection.cut for connection in busy)
    come(places, "192.0.2.1")
    assert busy[0].cut
    with pytest.raises(ConnectionAbortedError), places.computing(busy[0]):
        pass


def test_all_that_is_overdue_ends_and_nothing_else():
    places = ConnectionSlots()
    (old,), (new,) = come(places, "192.0.2.1", now=0.0), come(places, "192.0.2.1", now=1.0)
    places.end_overdue(REQUEST_SECONDS)
    assert (old.cut, new.cut) == (True, False)


def test_threads_that_are_still_ending_are_counted_too():
    places = ConnectionSlots()
    come(places, LOOPBACK, 2 * MAX_REQUESTS)
    assert not places.come(Connection(), LOOPBACK, 0.0)


@given(st.lists(st.tuples(st.sampled_from([LOOPBACK, *"abcdefghij"]), st.booleans()), max_size=300))
def test_whoever_comes_nobody_has_more_than_its_share_and_a_newcomer_is_served(story):
    places = ConnectionSlots()
    for client, leaves in story:
        (newcomer,) = come(places, client)
        for lost in [*places._ending]:
            places.leave(lost)
        counts = Counter(visit.client for visit in places._served.values())
        assert newcomer in places._served
        assert counts.total() <= MAX_REQUESTS
        assert counts.total() - counts[LOOPBACK] <= MAX_REQUESTS - LOOPBACK_RESERVE
        assert all(count <= MAX_PER_CLIENT for client, count in counts.items() if client != LOOPBACK)
        if leaves:
            places.leave(newcomer)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("127.0.0.1", "127.9.9.9", True), ("127.0.0.1", "::1", True), ("127.0.0.1", "::ffff:127.0.0.1", True),
        ("192.0.2.1", "::ffff:192.0.2.1", True), ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True), ("2001:db8::1", "2001:db8:0:1::1", False),
        ("192.0.2.1", "127.0.0.1", False), ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)  # fmt: skip
def test_places_are_counted_by_address_by_network_and_for_this_machine(one, other, same):
    assert (client_of(one) == client_of(other)) == same


def test_a_flood_of_quick_requests_is_answered_by_a_bounded_number_of_threads():
    with peer() as server:
        before, most = threading.active_count(), 0
        answers = Counter()

        def visit():
            for _ in range(25):
                answers[ask(server)[:12]] += 1

        visitors = [threading.Thread(target=visit) for _ in range(8)]
        for visitor in visitors:
            visitor.start()
        for visitor in visitors:
            while visitor.is_alive():
                most = max(most, threading.active_count())
                visitor.join(0.01)
        assert answers == {b"HTTP/1.0 200": 200}
        assert most <= before + len(visitors) + 2 * MAX_REQUESTS


# -- by which name ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:9410", "10.0.0.7", "[::1]:9410", "localhost:1", "LocalHost.",
                                  "node.example.org:9410", "NODE.example.org."])  # fmt: skip
def test_by_an_address_by_localhost_and_by_configured_names_it_answers(host):
    assert is_named([host], "HTTP/1.1", {"node.example.org"})


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example"], ["127.0.0.1.evil.example"], ["localhost.evil.example"], ["evil.example:9410"],
        ["me@127.0.0.1"], ["1"], [""], ["[evil.example]:9410"], ["[]"], [], ["127.0.0.1", "evil.example"],
        ["127.0.0.1", "127.0.0.1"],
    ],
)  # fmt: skip
def test_by_any_other_name_by_two_or_by_none_it_does_not(hosts):
    assert not is_named(hosts, "HTTP/1.1", {"node.example.org"})


def test_a_website_that_points_its_name_here_reads_nothing():
    with peer(("node.example.org",)) as server:
        for path in ("/metrics", "/healthz", "/nothing"):
            said = ask(server, f"GET {path} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode())
            assert said.startswith(b"HTTP/1.0 403")
            assert b"secret" not in said
            assert b"metrics.hosts" in said
        assert b"secret" in ask(server, b"GET /metrics HTTP/1.1\r\nHost: node.example.org\r\n\r\n")
        assert b"secret" in ask(server, b"GET /metrics HTTP/1.0\r\n\r\n"), "a probe without a name"


def test_http_0_9_is_refused_and_every_error_keeps_the_browser_in_check():
    with peer() as server:
        for request in (
            b"GET /metrics\r\n", b"GET /metrics\r\n\r\n", b"GET /metrics\r\nX: HTTP/1.0\r\n\r\n", b"GET\r\n",
            b"GET /metrics HTTP/99.1\r\n\r\n", b"POST /metrics HTTP/1.0\r\n\r\n",
        ):  # fmt: skip
            said = ask(server, request)
            assert said.startswith(b"HTTP/1.0 "), request
            assert said.split()[1] in (b"400", b"501", b"505"), request
            assert b"secret" not in said
            assert b"Content-Security-Policy: default-src 'none'; script-src 'self';" in said
            assert b"X-Content-Type-Options: nosniff" in said


def test_names_in_the_peer_file_are_names_without_port():
    assert MetricsFile(hosts=("Node-07.example.org.", "swarm")).hosts == ("node-07.example.org", "swarm")
    for wrong in ("http://swarm", "swarm:9410", "*", "", "a b"):
        with pytest.raises(ValidationError, match="expected a name without port"):
            MetricsFile(hosts=(wrong,))
