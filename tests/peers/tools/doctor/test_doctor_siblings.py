"""The doctor and a peer of several stages: each one's ports, each named by its stage."""

import json
import socket
from types import SimpleNamespace

from examined import config, event

from peers.config.sibling_file import sibling_file
from peers.tools.doctor import siblings
from peers.tools.doctor.line import Line


def of_stages(tmp_path, port, **keys):
    """The peer file of a worker of two stages."""
    wish = {"role": "worker", "run": "ab" * 32, "stages": 2, "listen": [f"/ip4/127.0.0.1/tcp/{port}"], **keys}
    return config(tmp_path, **wish)


def test_of_several_stages_each_ones_port_is_looked_at_and_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        wish = of_stages(tmp_path, number - 1, stage=3)
        first, second = siblings.ports(wish, running=False)
        assert first.text.startswith("stage 3: ")
        assert (second.level, second.data["stage"]) == ("fail", 4)
        assert second.text.startswith(f"stage 4: the port of /ip4/127.0.0.1/tcp/{number} is taken")
        assert [line.level for line in siblings.ports(wish, running=True)] == ["ok", "ok"]
        (alone,) = siblings.ports(of_stages(tmp_path, number, stages=1), running=False)
        assert alone.text.startswith("the port of "), "there is nothing to tell apart"


def test_stages_that_are_not_chosen_yet_have_numbers_and_those_of_a_running_peer_are_in_its_log(tmp_path):
    wish = of_stages(tmp_path, 0)
    names = [line.text.partition(":")[0] for line in siblings.ports(wish, running=False)]
    assert names == ["stage 1 of the 2 it will hold", "stage 2 of the 2 it will hold"]
    for number, events in enumerate(["", event("assembled", stage=7) + event("started", peer="me")]):
        log = sibling_file(wish, number).state / "events.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(events + event("assembled", stage=5 + number))
    assert [siblings.stage_held(wish, number, running=True) for number in (0, 1)] == [5, 6]
    assert siblings.stage_held(wish, 1, running=False) is None, "it may choose another one"


def test_the_stage_of_a_running_peer_is_known_after_its_log_has_moved_or_said_not_to_be(tmp_path):
    wish = of_stages(tmp_path, 0)
    log = sibling_file(wish, 1).state / "events.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(event("looked"))
    line = siblings.of_stage(wish, 1, True, Line("p2pd", "ok", "starts"))
    assert line.text == "its stage 2 of 2 (which one, its event log does not tell): starts"
    log.with_name("events.jsonl.old").write_text(event("started", peer="me") + event("assembled", stage=6))
    assert siblings.stage_held(wish, 1, running=True) == 6
    log.write_text(event("continued", standing=[json.loads(event("assembled", stage=7))]))
    assert siblings.stage_held(wish, 1, running=True) == 7


def test_ports_that_two_stages_want_or_that_do_not_exist_are_told(tmp_path):
    both = ["/ip4/127.0.0.1/tcp/31331", "/ip4/127.0.0.1/tcp/31332"]
    second = siblings.ports(of_stages(tmp_path, 0, listen=both), running=False)[1]
    assert second.level == "fail"
    assert "/ip4/127.0.0.1/tcp/31332 is also where stage 1 of the 2 would listen" in second.text
    assert {line.level for line in siblings.ports(of_stages(tmp_path, 0), running=False)} == {"ok"}
    last = siblings.ports(of_stages(tmp_path, 65535), running=False)[-1]
    assert last.level == "fail"
    assert "65536 is none" in last.text
    assert "tcp/65534]" in last.fix


def test_what_is_the_same_for_all_stages_is_told_once():
    peer = SimpleNamespace(stages=2, stage=0)
    told = []
    for number in (0, 1):
        tell = siblings.telling(peer, number, False, told.append)
        for check in ("p2pd", "bootstrap", "reachability"):
            tell(Line(check, "ok", f"{check} of {number}"))
    assert [line.text for line in told] == [
        "stage 0: p2pd of 0", "bootstrap of 0", "stage 0: reachability of 0", "stage 1: p2pd of 1",
        "stage 1: reachability of 1",
    ]  # fmt: skip
