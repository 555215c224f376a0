"""The server of the page of one's own computer: it serves its user, and no website or other user."""

import asyncio
import json
import socket

import pytest

from peers.config.errors import UserError
from peers.runtime import local_server
from peers.runtime.http_server import HttpResponse
from peers.runtime.local_server import BODY_BYTES, LocalServer

TOKEN = "secret-of-this-process"


@pytest.fixture
async def served():
    """The server, and the requests that reached the peer."""
    reached = []

    async def execute(request):
        reached.append(request)
        if request.get("fails"):
            raise UserError("not now")
        await asyncio.sleep(request.get("seconds", 0))
        return {"state": "training"}

    server = LocalServer(
        address=("127.0.0.1", 0),
        files={"/": HttpResponse(200, "text/html", b"<p>page")},
        token=TOKEN,
        execute=execute,
        allowed=("status", "pause"),
    )
    yield server, reached
    await asyncio.to_thread(server.close)


async def ask(server, method="POST", path="/control", body=None, **headers):
    """Status, headers and body of the answer. A header that is None is not sent."""
    content = json.dumps({"do": "status"} if body is None else body).encode()
    sent = {
        "Host": f"127.0.0.1:{server.address[1]}",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "X-Swarmnet-Token": TOKEN,
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}\r\n" for name, value in sent.items() if value is not None]
    request = f"{method} {path} HTTP/1.1\r\n{''.join(lines)}Connection: close\r\n\r\n".encode() + content

    def talk():
        said = b""
        with socket.create_connection(server.address, 20.0) as client:
            client.sendall(request)
            while part := client.recv(65536):
                said += part
        return said

    head, _, answer = (await asyncio.to_thread(talk)).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), answer.decode()


async def test_the_user_gets_the_page_and_steers_the_peer(served):
    server, reached = served
    status, _, page = await ask(server, "GET", "/?x", X_Swarmnet_Token=None)
    assert (status, page) == (200, "<p>page")
    by_page = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    for extra in ({}, by_page, {"Host": f"LOCALHOST:{server.address[1]}"}):
        status, _, answer = await ask(server, **extra)
        assert (status, json.loads(answer)) == (200, {"state": "training"})
    status, _, answer = await ask(server, body={"do": "pause", "fails": True})
    assert (status, json.loads(answer)) == (200, {"error": "not now"}), "as on the control socket"
    assert [request["do"] for request in reached] == ["status"] * 3 + ["pause"]


@pytest.mark.parametrize("token", [None, "", "secret-of-this-proces", "Secret-of-this-process", "ä"])
async def test_without_the_token_nothing_reaches_the_peer(served, token):
    server, reached = served
    status, _, answer = await ask(server, X_Swarmnet_Token=token)
    assert (status, reached) == (401, [])
    assert "swarmnet page" in answer
    assert TOKEN not in answer


NAMES = [None, "", "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "192.168.1.7:{port}"]


@pytest.mark.parametrize("host", NAMES)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_another_name_is_refused_so_that_dns_cannot_point_a_website_here(served, host, method):
    server, reached = served
    name = host and host.format(port=server.address[1])
    status, _, answer = await ask(server, method, "/" if method == "GET" else "/control", Host=name)
    assert (status, reached) == (403, [])
    assert answer.startswith("asked by another name")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_a_post_from_another_site_is_refused_even_with_the_token(served, headers):
    server, reached = served
    status, head, _ = await ask(server, **headers)
    assert (status, reached) == (403, [])
    assert "access-control" not in head.lower()


async def test_a_browser_that_asks_whether_another_site_may_send_the_token_gets_no_yes(served):
    server, reached = served
    status, head, _ = await ask(
        server, "OPTIONS", X_Swarmnet_Token=None, Origin="https://evil.example",
        **{"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-swarmnet-token"},
    )  # fmt: skip
    assert (status, reached) == (501, [])
    assert "access-control" not in head.lower()
    assert "Cross-Origin-Resource-Policy: same-origin" in head
    assert "frame-ancestors 'none'" in head


async def test_a_form_a_long_body_and_other_requests_are_refused(served):
    server, reached = served
    assert (await ask(server, Content_Type="text/plain"))[0] == 415
    assert (await ask(server, Content_Type="application/x-www-form-urlencoded"))[0] == 415
    assert (await ask(server, Content_Length=str(BODY_BYTES + 1)))[0] == 413
    assert (await ask(server, Content_Length="-1"))[0] == 413
    assert (await ask(server, body=[1]))[0] == 400
    assert (await ask(server, body={"do": "leave"}))[0] == 400
    assert (await ask(server, body={"do": ["status"]}))[0] == 400
    assert (await ask(server, path="/other"))[0] == 404
    assert (await ask(server, "GET", "/control"))[0] == 404
    assert reached == []


async def test_a_peer_that_takes_too_long_is_not_waited_for(served, monkeypatch):
    server, _ = served
    monkeypatch.setattr(local_server, "REQUEST_SECONDS", 0.2)
    assert (await ask(server, body={"do": "status", "seconds": 30}))[0] == 504


async def test_a_taken_port_gives_another_one(served):
    server, _ = served
    other = LocalServer(address=server.address, files={}, token=TOKEN, execute=lambda _: None, allowed=())
    assert other.address[1] not in (0, server.address[1])
    await asyncio.to_thread(other.close)
