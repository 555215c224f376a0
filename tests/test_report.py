"""The report: every source of the manifest, what it cost, who contributed; and the commands of a creator."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from swarm import OWNER, sign, tiny_manifest

from peers.cli import main
from peers.creator.facts import Contributor, Facts, from_manifest
from peers.creator.report import KINDS, as_json, as_markdown
from peers.run_file import published_text
from swarmnet.manifest import Data, Source
from swarmnet.orders import Order, Withdrawal

SOURCES = tuple(
    Source(f"text {kind}", "x", "CC0-1.0", "https://example.org", kind, "2023 to 2024", "English", 1000, "",
           "filtered")
    for kind, _ in KINDS
)  # fmt: skip
MANIFEST = tiny_manifest(
    data=Data(SOURCES, sequence_tokens=16, microbatch_sequences=2), contact="owner@example.org",
    intended_use="tests <script>",
)  # fmt: skip
SIGNED = sign(MANIFEST)


def facts(**changes) -> Facts:
    made = from_manifest(SIGNED, Order(withdrawn=(Withdrawal("ab" * 32, "its author asked"),)), 0.0)
    return replace(made, **changes)


def test_every_source_stands_under_its_kind_with_licence_size_and_date():
    text = as_markdown(facts())
    for (_, title), source in zip(KINDS, SOURCES, strict=True):
        section = text.split(f"### {title}")[1].split("###")[0]
        assert source.name in section
        assert "CC0-1.0" in section
        assert "1,000 bytes" in section
        assert "2023 to 2024" in section
    assert "`" + "ab" * 32 + "`: its author asked" in text
    assert "<script>" not in text


def test_compute_and_energy_follow_from_rounds_and_say_what_was_assumed():
    rounds = (99,) * len(MANIFEST.stages)
    told = json.loads(as_json(facts(rounds=rounds, contributors=(Contributor("peer", "attic", 5),))))
    compute = told["compute"]
    assert compute["tokens"] == 100 * MANIFEST.rounds.target_tokens
    assert compute["floating_point_operations"] == 6 * compute["parameters"] * compute["tokens"]
    assert compute["energy_kilowatt_hours"] > 0
    assert len(compute["assumptions"]) == 4
    assert told["contributors"] == [{"peer": "peer", "name": "attic", "tokens": 5, "signed": 0}]


def test_a_stage_that_was_left_out_has_fewer_rounds_and_costs_less():
    all_alike = facts(rounds=(99,) * len(MANIFEST.stages))
    left_out = facts(rounds=(99, *(49,) * (len(MANIFEST.stages) - 2), 99))
    assert left_out.tokens == all_alike.tokens, "the first stage sees all"
    assert left_out.flops < all_alike.flops
    assert left_out.round == 49
    assert facts(rounds=(99, *(-1,) * (len(MANIFEST.stages) - 1))).tokens == 0, "not every stage is known"


def test_what_the_creator_did_not_state_is_said_to_be_missing():
    told = json.loads(as_json(from_manifest(sign(tiny_manifest()), Order(), 0.0)))
    assert told["general"]["provider"].startswith("not stated")
    assert told["general"]["text_bytes"] is None
    assert told["sources"][0]["name"] == "python-stdlib"


def test_what_a_run_has_trained_is_not_known_from_its_manifest_alone():
    compute = json.loads(as_json(facts()))["compute"]
    assert compute["parameters"] > 0
    for key in ("settled_rounds", "tokens", "floating_point_operations", "energy_kilowatt_hours"):
        assert compute[key] is None
    text = as_markdown(facts())
    for what in ("Tokens", "Operations", "Energy"):
        assert f"- {what}: not known\n" in text
    assert " in 100 settled rounds" in as_markdown(facts(rounds=(99,) * len(MANIFEST.stages)))


# -- commands -----------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(published_text(SIGNED))
    key = tmp_path / "owner.key"
    key.write_bytes(OWNER.file_bytes())
    key.chmod(0o600)
    return path, key


def swarmnet(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return ended.value.code or 0


def test_report_and_invite_print_what_they_made(published, tmp_path, capsys):
    path, key = published
    assert swarmnet("report", path) == 0
    assert "text synthetic" in capsys.readouterr().out
    assert swarmnet("report", path, "--json", "--out", tmp_path / "report.json") == 0
    assert json.loads((tmp_path / "report.json").read_text())["general"]["model"] == "tiny"
    capsys.readouterr()
    assert swarmnet("invite", path, "--anyone", "--key", key) == 0
    assert capsys.readouterr().out.startswith("swarmnet-invite-1.")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("report", "{tmp}/nowhere"), "is no archive"),
        (("report", "ab" * 32), "needs the published run file"),
        (("invite", "{run}", "--key", "{key}"), "say whom it is for"),
        (("invite", "{run}", "--peer", "Bob", "--key", "{key}"), "is no peer id"),
        (("order", "ban", "{run}", "Bob", "--key", "{key}"), "is no peer id"),
        (("order", "pause", "{run}", "--key", "{tmp}/none.key", "--bootstrap", "x"), "cannot read identity"),
        (("order", "pause", "{run}", "--key", "{key}"), "name a way in: --bootstrap MULTIADDR; this machine"),
        (("orders", "{run}"), "name a way in: --bootstrap MULTIADDR; this machine remembers no peer"),
        (("registry", "list"), "needs a --bootstrap"),
        (("registry", "list", "--bootstrap", "x"), "should look like"),
        (("join",), "name the run"),
        (("join", "--from-archive", "{tmp}/nowhere"), "is no archive"),
    ],
)
def test_what_a_person_can_mend_is_one_line_and_exit_code_2(published, tmp_path, capsys, monkeypatch,
                                                            arguments, wrong):  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    path, key = published
    filled = [one.format(tmp=tmp_path, run=path, key=key) for one in arguments]
    assert swarmnet(*filled) == 2
    assert wrong in capsys.readouterr().err
