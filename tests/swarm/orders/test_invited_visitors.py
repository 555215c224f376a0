"""A run by invite answers visitors who show one, and tells the others whom to ask for it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from clocks import on_virtual_clock
from swarm import OWNER, TINY_MODEL, Swarm, sign, text_of, tiny_manifest

from peers.tools.model.swarm_client import Conversation, NoAnswer, SwarmClient
from peers.tools.model.swarm_session import invite_shown, not_let_in
from protocols.signed.identity import Identity
from protocols.signed.invites import invite_text, seal_invite

VISITOR = Identity.from_seed(b"visitor").peer_id
STRANGER = Identity.from_seed(b"stranger")
DAY = 86400.0
SMALL = replace(TINY_MODEL, num_hidden_layers=2)


def invited(signed, peer=None, expires=1e9, by=OWNER):
    return seal_invite(by, signed.run_id, peer, expires, 0.0)


@on_virtual_clock
async def test_a_visitor_with_an_invite_is_answered_and_one_without_is_told_why_not():
    def tokens():
        return swarm.text.tokens[:8].long()[None]

    swarm, said = Swarm(tiny_manifest((1, 1), model=SMALL, access="invite")), []
    swarm.open()
    invite = invited(swarm.signed)
    workers = [
        swarm.start(name, stage, in_flight=1, invite=invite).worker
        for name, stage in {"a": 0, "b": 1}.items()
    ]
    await swarm.until(lambda: all(w.services and w.services.snapshots.held for w in workers), 120.0)
    for shown in (invite, b""):
        transport = swarm.network.transport(VISITOR)
        client = SwarmClient(
            signed=swarm.signed,
            transport=transport,
            directory=swarm.network.directory(VISITOR),
            chance=Random(0),
            notify=lambda event, text: said.append((event, text)),
            invite=invite_shown(swarm.signed, shown, VISITOR),
        )
        async with client:
            if shown:
                assert len(await text_of(client, b"def f", 4, Conversation())) == 4
                assert said == []
            else:
                with pytest.raises(NoAnswer, match=r"refused us: not_invited \d+ times"):
                    await client.forward(Conversation(), tokens(), deadline_seconds=3.0)
        await transport.close()
    await swarm.close()
    away = [text for event, text in said if event == "turned_away"]
    assert len(away) == 1, "peers of both stages say the same"
    assert "(not_invited): the run takes peers by invite only, and none was shown" in away[0]


@pytest.mark.parametrize(
    ("invite", "why"),
    [
        (lambda signed: b"", "by invite only: give --invite"),
        (lambda signed: b"nonsense", "does not fit the run"),
        (lambda signed: invited(sign(tiny_manifest((1, 2)))), "does not fit the run"),
        (lambda signed: invited(signed, by=STRANGER), "does not fit the run"),
        (lambda signed: invited(signed, STRANGER.peer_id), "a visitor has a new name each time"),
        (lambda signed: invited(signed, expires=DAY - 1), "the invite has expired"),
    ],
)
def test_an_invite_that_lets_nobody_in_is_said_before_anybody_is_asked(invite, why):
    signed = sign(tiny_manifest(access="invite", contact="ask@example.org"))
    said = not_let_in(signed, invite(signed), VISITOR, DAY)
    assert why in said
    assert "`swarmnet invite RUN --anyone`): ask@example.org" in said


def test_who_may_come_in_is_let_in():
    signed = sign(tiny_manifest(access="invite"))
    assert not_let_in(signed, invited(signed, expires=DAY + 1), VISITOR, DAY) is None
    assert not_let_in(sign(tiny_manifest()), b"", VISITOR, DAY) is None
    assert not_let_in(sign(tiny_manifest()), b"not needed", VISITOR, DAY) is None


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", "--from", "state", "--invite", "x"], "--invite needs --run"),
        (["evaluate", "--invite", "x"], "--invite needs --run"),
        (["generate", "--run", "0" * 64, "--bootstrap", "{way}", "--invite", "x"], "'x' is not an invite"),
        (["evaluate", "--run", "0" * 64, "--bootstrap", "{way}", "--invite", "x"], "'x' is not an invite"),
    ],
)
def test_what_is_no_invite_ends_the_command_with_one_line(swarmnet, arguments, word):
    way = f"/ip4/127.0.0.1/tcp/1/p2p/{VISITOR}"
    code, out, err = swarmnet(*(argument.format(way=way) for argument in arguments))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert word in err


def test_an_invite_as_people_hand_it_on_is_read():
    from peers.cli.swarm_model import invite_of

    invite = invited(sign(tiny_manifest()))
    assert invite_of(f"  {invite_text(invite)}\n") == invite
    assert invite_of(None) == b""
