"""The report: every source of the manifest, what it cost, who contributed; and the commands of a creator."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from clocks import on_virtual_clock
from swarm import OWNER, expert_manifest, sign, tiny_manifest

from peers.cli.main import main
from peers.cli.owner.course import is_archived
from peers.config.run_file import published_text
from peers.lab.world.virtual_time import run
from peers.telemetry.snapshot import ExpertGroup
from peers.tools.owner.run_facts import CreditedContributor, RunFacts, from_directory, from_manifest
from peers.tools.owner.training_report import KINDS, as_json, as_markdown
from protocols.errors import Unreachable
from protocols.memory.transport import MemoryNetwork
from protocols.messages.table import PeerRecord
from protocols.signed.identity import Identity
from protocols.signed.opinions import OpinionDocument, seal_opinion
from protocols.signed.orders import seal_order
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import seal_record
from swarmnet.run.owner_orders import OwnerOrders, Withdrawal
from swarmnet.run.schema import Data, InitCheckpoint, Lora, Provider, TextSource

SOURCES = tuple(
    TextSource(
        f"text {kind}",
        "x",
        "CC0-1.0",
        "https://example.org",
        kind,
        "2023 to 2024",
        "English",
        1000,
        "",
        "filtered",
    )
    for kind, _ in KINDS
)
MANIFEST = tiny_manifest(
    data=Data(SOURCES, seq_len=16, micro_batch_size=2), contact="owner@example.org",
    intended_use="tests <script>",
)  # fmt: skip
SIGNED = sign(MANIFEST)
PROVIDER = Provider(
    name="Example Association",
    representative="Anna Example, Berlin",
    copyright_policy="https://example.org/copyright",
    opt_outs="robots.txt and ai.txt, read on the day of collection",
    illegal_content="lists of addresses, <b>",
)


def facts(**changes) -> RunFacts:
    made = from_manifest(SIGNED, OwnerOrders(withdrawn=(Withdrawal("ab" * 32, "its author asked"),)), 0.0)
    return replace(made, **changes)


def started_from_a_model() -> RunFacts:
    start = InitCheckpoint("base", "cd" * 32, "https://example.org/base <b>", ("ab" * 32,) * 3)
    model = replace(MANIFEST.model, lora=Lora(rank=4))
    return facts(signed=sign(replace(MANIFEST, init_checkpoint=start, model=model)))


def read_in_epochs() -> RunFacts:
    data = Data((TextSource("books", "books"),), sampling="epoch", seq_len=16, micro_batch_size=2)
    made = from_manifest(sign(tiny_manifest(data=data)), OwnerOrders(), 0.0)
    return replace(made, read=((100, 30), (40, 130)))


def of_experts() -> RunFacts:
    signed = sign(expert_manifest(num_experts=6, top_k=2, groups=3))
    groups = (ExpertGroup(0, 0, 0, 1, 2, 95, 95), ExpertGroup(0, 1, 2, 3, 0, 60, 95),
              ExpertGroup(1, 2, 4, 5, 1, None, 95))  # fmt: skip
    return replace(from_manifest(signed, OwnerOrders(), 0.0), rounds=(95, 95, 95), experts=groups)


REPORTS = {
    "manifest": facts,
    "provider": lambda: facts(signed=sign(replace(MANIFEST, provider=PROVIDER, license="apache-2.0"))),
    "nothing-stated": lambda: from_manifest(sign(tiny_manifest()), OwnerOrders(), 0.0),
    "started": started_from_a_model,
    "epoch": read_in_epochs,
    "experts": of_experts,
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_says_what_is_known_and_what_is_not(golden, name):
    found = REPORTS[name]()
    golden(f"report-{name}.md", as_markdown(found), run=found.signed.run_id)


def test_compute_and_energy_follow_from_rounds_and_say_what_was_assumed():
    rounds = (99,) * len(MANIFEST.stages)
    told = json.loads(as_json(facts(rounds=rounds, contributors=(CreditedContributor("peer", "attic", 5),))))
    compute = told["compute"]
    assert compute["tokens"] == 100 * MANIFEST.rounds.global_batch_tokens
    assert compute["floating_point_operations"] == 6 * compute["parameters"] * compute["tokens"]
    assert compute["energy_kilowatt_hours"] > 0
    assert len(compute["assumptions"]) == 4
    assert told["contributors"] == [
        {"peer": "peer", "name": "attic", "tokens": 5, "signed": 0, "device": "", "joules": 0}
    ]


def test_the_tokens_are_those_that_were_counted_in_settled_rounds_and_else_said_to_be_a_bound():
    rounds, target = (99, 99, 99), MANIFEST.rounds.global_batch_tokens
    counted, guessed = facts(rounds=rounds, finalized_tokens=(7_000, 6_000, None)), facts(rounds=rounds)
    assert counted.tokens == 7_000
    assert "- Tokens: 7,000 in 100 settled rounds" in as_markdown(counted)
    assert "- Tokens: at most 25,600 in 100 settled rounds" in as_markdown(guessed)
    parameters = counted._active()
    assert counted.flops == 6 * (7_000 * parameters[0] + 6_000 * parameters[1] + 100 * target * parameters[2])


def test_the_energy_is_that_of_the_devices_that_contributors_say_and_the_report_says_so():
    def kilowatt_hours(*devices):
        peers = tuple(CreditedContributor(f"p{n}", "", 50, 0, device) for n, device in enumerate(devices))
        found = facts(rounds=(99,) * 3, contributors=peers)
        return found.kilowatt_hours, as_markdown(found)

    on_gpus, on_processors = kilowatt_hours("cuda", "cuda"), kilowatt_hours("cpu", "cpu")
    mixed, silent = kilowatt_hours("cuda", "cpu"), kilowatt_hours("", "of a newer version")
    assert on_processors[0] == pytest.approx(20 * on_gpus[0])
    assert mixed[0] == pytest.approx((on_gpus[0] + on_processors[0]) / 2)
    assert silent[0] == on_processors[0]
    assert "50% of the work on processors at 1e+09" in mixed[1]
    assert "50% of the work on GPUs at 2e+10" in mixed[1]


def test_the_energy_is_what_gpus_have_measured_and_assumed_only_of_the_others():
    def told(*joules):
        peers = tuple(CreditedContributor(f"p{n}", "", 50, 0, "cuda", each) for n, each in enumerate(joules))
        found = facts(rounds=(99,) * 3, finalized_tokens=(10_000, 9_000, 8_000), contributors=peers)
        return found.kilowatt_hours * 3.6e6 / 1.5, as_markdown(found)

    measured, half, none = told(700, 300), told(700, 0), told(0, 0)
    assert measured[0] == pytest.approx(1000 * 27_000 / 100), "tokens have passed three stages"
    assert half[0] == pytest.approx(700 * 27_000 / 100 + none[0] / 2)
    assert "energy: 100% of the work on GPUs by their own measurement" in measured[1]
    assert "for the rest of the machines\n" in measured[1]
    assert "50% of the work on GPUs at 2e+10 operations per joule, 50% of the work on GPUs by" in half[1]
    assert "which is assumed where nothing was measured" in half[1]


def test_a_stage_that_was_left_out_has_fewer_rounds_and_costs_less():
    all_alike = facts(rounds=(99,) * len(MANIFEST.stages))
    left_out = facts(rounds=(99, *(49,) * (len(MANIFEST.stages) - 2), 99))
    assert left_out.tokens == all_alike.tokens, "the first stage sees all"
    assert left_out.flops < all_alike.flops
    assert left_out.round == 49
    assert facts(rounds=(99, *(-1,) * (len(MANIFEST.stages) - 1))).tokens == 0, "not every stage is known"


def test_the_work_of_a_mixture_is_that_of_the_experts_that_a_token_takes():
    made = of_experts()
    model = made.signed.manifest.model
    assert (
        made.parameters - made.active_parameters
        == 4 * 3 * model.hidden_size * model.intermediate_size * model.num_hidden_layers
    )
    compute = json.loads(as_json(made))["compute"]
    assert compute["floating_point_operations"] == 6 * compute["active_parameters"] * compute["tokens"]


# -- of a live run ------------------------------------------------------------------------------------


async def announce(network: MemoryNetwork, name: str, stage: int, **claims) -> str:
    """A peer of the run that says this of itself; its id."""
    identity = Identity.from_seed(name.encode())
    network.transport(identity.peer_id)
    directory, role = network.directory(identity.peer_id), claims.pop("role", "worker")
    record = PeerRecord(identity.peer_id, stage, role, [], 0, 0.0, "0", name=name,
                        **{"state": "training", **claims})  # fmt: skip
    sealed = seal_record(identity, SIGNED.run_id, record, directory.now())
    await directory.announce(SIGNED.run_id, stage, sealed, 1.0)
    return identity.peer_id


async def a_live_run(network: MemoryNetwork) -> list[str]:
    """Five peers of three stages and an archivist, and an order; the peers of stage 0."""
    told = [("one", 0, 9, 500), ("two | <b>", 0, 10, 700), ("liar", 0, 2**31, 10**15),
            ("three", 1, 8, 400), ("four", 2, 12, 0)]  # fmt: skip
    peers = [
        await announce(network, name, stage, settled=settled, tokens=tokens)
        for name, stage, settled, tokens in told
    ]
    await announce(network, "new", 1, state="joining", settled=-1)
    await announce(network, "keeper", NO_STAGE, state="serving", role="archivist")
    order = OwnerOrders(sequence=7_000_000, withdrawn=(Withdrawal("cd" * 32, "a name in it"),))
    await network.directory(OWNER.peer_id).put_order(
        SIGNED.run_id, seal_order(OWNER, SIGNED.run_id, order).data, 1.0
    )
    return peers[:3]


@on_virtual_clock
async def test_a_live_run_is_told_by_what_its_peers_say_of_themselves(golden):
    network = MemoryNetwork()
    await asyncio.sleep(1000.0)
    one, two, liar = await a_live_run(network)
    await asyncio.sleep(60.0)
    found = await from_directory(SIGNED, network.directory("reader"))
    assert found.rounds == (10, 8, 12), "the middle one of a stage, and of those who train"
    first, second, third, fourth = found.contributors
    assert first == CreditedContributor(liar, "liar", 10**15, None)
    assert second == CreditedContributor(two, "two | <b>", 700, None)
    assert third == CreditedContributor(one, "one", 500, None)
    assert fourth.name == "three"
    assert found.made_at.timestamp() == 1060.0

    documents = OpinionDocument("cd" * 32, "a name in it"), OpinionDocument("a page", "mine")
    for number, document in enumerate((*documents, documents[0])):
        identity = Identity.from_seed(bytes([number]))
        opinion = seal_opinion(identity, SIGNED.run_id, document, asyncio.get_running_loop().time())
        await network.directory("reader").put_opinion(opinion, 1.0)
    found = await from_directory(SIGNED, network.directory("reader"))
    golden("report-live.md", as_markdown(found), run=SIGNED.run_id)

    await asyncio.sleep(120.0)
    gone = await from_directory(SIGNED, network.directory("reader"))
    assert (gone.round, gone.contributors) == (-1, ()), "their records have run out"
    assert "what 0 peers (stage 0: 0, " in as_markdown(gone)
    assert "No contributors are known." in as_markdown(gone)


@on_virtual_clock
async def test_of_two_peers_of_a_stage_the_one_that_claims_less_counts():
    network = MemoryNetwork()
    for number, settled in enumerate((40, 7)):
        await announce(network, f"peer {number}", 0, settled=settled)
    found = await from_directory(SIGNED, network.directory("reader"))
    assert found.rounds == (7, -1, -1)
    assert found.origin.endswith("the newest order of the run's owner (none was found)")


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


ADDRESS = "/ip4/127.0.0.1/tcp/31330/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest.fixture
def reached(monkeypatch, tmp_path):
    """The directory that a visitor of the run reaches; lists by what it came there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    network, ways = MemoryNetwork(), []
    found = SimpleNamespace(signed=SIGNED, directory=network.directory("reader"), network=network, ways=ways)

    @asynccontextmanager
    async def reaching(run, bootstraps, cache, notify):
        ways.append((run, bootstraps))
        await a_live_run(network)
        yield found

    monkeypatch.setattr("peers.cli.connecting.visit_run", reaching)
    return found


@pytest.mark.parametrize("how", ["id", "file"])
def test_the_report_of_a_live_run_needs_its_id_and_a_way_in(published, reached, tmp_path, capsys, how):
    run = SIGNED.run_id if how == "id" else str(published[0])
    out = tmp_path / "report.json"
    assert swarmnet("report", run, "--bootstrap", ADDRESS, "--json", "--out", out) == 0
    assert reached.ways == [(run, [ADDRESS])]
    told = json.loads(out.read_text())
    assert told["from"].startswith("the run's directory as it was on ")
    assert len(told["contributors"]) == 4
    assert told["processing"]["withdrawn_documents"] == [{"document": "cd" * 32, "reason": "a name in it"}]


def test_a_directory_that_falls_silent_makes_no_report(reached, tmp_path, capsys, monkeypatch):
    async def silent(*_):
        raise Unreachable("the directory did not answer within 10 s")

    monkeypatch.setattr(reached.directory, "get_order", silent)
    out = tmp_path / "report.md"
    assert swarmnet("report", SIGNED.run_id, "--bootstrap", ADDRESS, "--out", out) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the directory did not answer within 10 s; a report needs every stage")
    assert len(said.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("report", "{tmp}/nowhere"), "is no archive"),
        (("report", "ab" * 32), "add --bootstrap MULTIADDR: this machine remembers no peer"),
        (("report", "ab" * 32, "--bootstrap", "x"), "is no multiaddr"),
        (("report", "{tmp}", "--bootstrap", ADDRESS), "neither a run id nor a published run file"),
        (("invite", "{run}", "--key", "{key}"), "name the invited peer with --peer"),
        (("invite", "{run}", "--peer", "Bob", "--key", "{key}"), "is no peer id"),
        (("order", "ban", "{run}", "Bob", "--key", "{key}"), "is no peer id"),
        (("order", "pause", "{run}", "--key", "{tmp}/none.key", "--bootstrap", "x"), "cannot read identity"),
        (("order", "pause", "{run}", "--key", "{key}"), "add --bootstrap MULTIADDR: this machine"),
        (("orders", "{run}"), "add --bootstrap MULTIADDR: this machine remembers no peer"),
        (("registry", "list"), "needs --bootstrap MULTIADDR"),
        (("registry", "list", "--bootstrap", "x"), "is no multiaddr"),
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


@pytest.mark.parametrize("kept", [True, False])
def test_an_archivist_of_the_run_is_seen_before_its_end_is_ordered(kept):
    async def story():
        network = MemoryNetwork()
        await announce(network, "one", 0)
        if kept:
            await announce(network, "keeper", NO_STAGE, state="serving", role="archivist")
        await announce(network, "watcher", NO_STAGE, state="serving", role="observer")
        return await is_archived(SimpleNamespace(signed=SIGNED, directory=network.directory("reader")))

    assert run(story()) is kept
