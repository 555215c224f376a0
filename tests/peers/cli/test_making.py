"""What is made before anything starts: a tokenizer from a text, and a peer's id from its file."""

import re
from pathlib import Path

import pytest

from peers.data.tokenizer import open_tokenizer
from protocols.signed.identity import load

WORDS = "the quick brown fox jumps over the lazy dog\n" * 40


def refused(outcome, *words):
    code, out, err = outcome
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert all(word in err for word in words), err


def test_a_tokenizer_of_ones_own_text_fits_the_run_file_that_it_prints(swarmnet):
    Path("books").mkdir()
    Path("books/one.txt").write_text(WORDS)
    Path("books/two.txt").write_text(WORDS + "π and ζ")
    code, out, err = swarmnet("tokenizer", "books", "--vocab-size", 280, "--out", "own.json")
    assert (code, err) == (0, "")
    assert "2 documents" in out
    assert "wrote  own.json: 280 tokens" in out
    keys = re.findall(r"(?:run   |      ) (.+: \{.+\})", out)
    Path("run.yaml").write_text(
        "\n".join([keys[0], keys[1].replace("{", "{sources: [{name: books, path: books}], ")])
    )
    assert swarmnet("config", "check", "run.yaml")[::2] == (0, "")
    made = open_tokenizer(Path("own.json"), 280, "<|endoftext|>")
    text = "the fox, and what no text of it holds: \x00 🐝 ж"
    assert made.decode(made.encode(text.encode()).tolist()) == text.encode()
    assert len(made.encode(WORDS.encode())) < len(WORDS) / 2, "what it read often is few tokens"


def test_who_waits_for_a_tokenizer_hears_how_far_it_is(swarmnet, monkeypatch):
    Path("one.txt").write_text(WORDS * 2000)
    monkeypatch.setattr("peers.data.local_text.PROGRESS_SECONDS", 0.0)
    code, _, err = swarmnet("tokenizer", "one.txt", "--vocab-size", 280)
    assert code == 0
    assert re.match(r"reads the text: 1 of 4 MB, \d+ s to go\n", err)


def test_the_same_text_makes_the_same_tokenizer(swarmnet):
    Path("one.txt").write_text(WORDS)
    for name in ("a.json", "b.json"):
        assert swarmnet("tokenizer", "one.txt", "--vocab-size", 280, "--out", name)[0] == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_a_short_text_makes_fewer_tokens_and_that_is_said(swarmnet):
    Path("one.txt").write_text("once")
    code, out, _ = swarmnet("tokenizer", "one.txt")
    assert code == 0
    assert "wrote  tokenizer.json: 257 tokens" in out
    assert "fewer than 8,192" in out
    assert "model: {vocab_size: 257}" in out


def test_a_text_larger_than_memory_should_hold_is_read_a_part_at_a_time(swarmnet, monkeypatch):
    from peers.data import train_tokenizer

    seen = []

    def pieces_of(blocks):
        for block in blocks:
            seen.append(len(block))
            yield block

    monkeypatch.setattr(train_tokenizer, "pieces_of", pieces_of)
    Path("long.txt").write_text(WORDS * 2000)
    assert swarmnet("tokenizer", "long.txt", "--vocab-size", 260)[0] == 0
    assert len(seen) > 1
    assert max(seen) <= 2**20


def test_a_tokenizer_that_a_run_may_depend_on_stays(swarmnet):
    Path("one.txt").write_text(WORDS)
    Path("tokenizer.json").write_text("mine")
    refused(swarmnet("tokenizer", "one.txt"), "tokenizer.json exists already", "--replace")
    assert Path("tokenizer.json").read_text() == "mine"
    assert swarmnet("tokenizer", "one.txt", "--replace")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["nowhere"], "text nowhere does not exist"), (["empty.txt"], "no text in empty.txt")],
)
def test_no_tokenizer_is_made_of_no_text(swarmnet, arguments, word):
    Path("empty.txt").write_text("")
    refused(swarmnet("tokenizer", *arguments), word)
    assert not Path("tokenizer.json").exists()


def test_a_bootstraps_address_is_known_before_its_first_start(swarmnet):
    Path("boot.yaml").write_text(
        "role: bootstrap\nstate: boot\nlisten: [/ip4/0.0.0.0/tcp/31330, /ip4/10.0.0.7/tcp/31330]\n"
    )
    code, out, err = swarmnet("identity", "boot.yaml")
    assert (code, err) == (0, "")
    peer = load(Path("boot/identity.key")).peer_id
    assert out.splitlines() == [
        f"peer     {peer}  ({Path.cwd()}/boot/identity.key)",
        f"address  /ip4/ADDRESS/tcp/31330/p2p/{peer}",
        f"address  /ip4/10.0.0.7/tcp/31330/p2p/{peer}",
    ]
    assert swarmnet("identity", "boot.yaml")[1] == out, "the key is made once"
    assert swarmnet("identity", "boot/identity.key")[1].startswith(f"peer     {peer}\n")


def test_what_is_announced_is_what_others_dial_and_a_free_port_is_left_open(swarmnet):
    Path("boot.yaml").write_text(
        "role: bootstrap\nstate: boot\nannounce: [/dns4/boot.example.org/tcp/31330]\n"
    )
    assert "address  /dns4/boot.example.org/tcp/31330/p2p/12D3Koo" in swarmnet("identity", "boot.yaml")[1]
    Path("free.yaml").write_text("role: bootstrap\nstate: boot\n")
    assert "address  /ip4/ADDRESS/tcp/PORT/p2p/12D3Koo" in swarmnet("identity", "free.yaml")[1]


def test_an_identity_of_a_wrong_file_is_refused_and_nothing_is_written(swarmnet):
    Path("boot.yaml").write_text("role: bootstrop\nstate: boot\n")
    refused(swarmnet("identity", "boot.yaml"), "boot.yaml:1: role")
    assert not Path("boot").exists()
    refused(swarmnet("identity", "gone.yaml"), "gone.yaml: no such file")
    Path("other.key").write_text("no key")
    Path("other.key").chmod(0o600)
    refused(swarmnet("identity", "other.key"), "no Ed25519 identity")
    refused(swarmnet("identity", "new.key", "--set", "stage=2"), "identity PEER.yaml")
    assert not Path("new.key").exists()


def test_a_text_is_shown_as_a_run_would_read_it_with_a_line_for_each_kind_that_is_skipped(swarmnet):
    Path("books").mkdir()
    Path("books/one.txt").write_text(WORDS)
    lines = ['{"text": "fine"}', '{"content": "x"}', "{", '{"content": "y"}', '{"text": "too"}']
    Path("books/lines.jsonl").write_text("\n".join(lines))
    for name in ("a.pdf", "b.doc"):
        Path("books", name).write_bytes(b"other")
    code, out, err = swarmnet("text", "books")
    assert code == 0
    text_bytes = len(WORDS.encode()) + len("finetoo")
    assert f"read   3 documents in 2 files, {text_bytes:,} bytes" in out
    assert f"makes  {text_bytes + 2 * 2:,} tokens of bytes;" in out, "an empty line lies between two"
    ending, field, wrong = err.splitlines()
    assert re.search(r"books/a.pdf: of a folder only .* are read, and 1 more$", ending)
    assert re.search(r'books/lines.jsonl:2: no field "text" with a string in it, and 1 more$', field)
    assert re.search(r"books/lines.jsonl:3: not JSON: .*\)$", wrong)


def test_a_text_is_counted_in_tokens_of_a_file(swarmnet):
    Path("one.txt").write_text(WORDS)
    assert swarmnet("tokenizer", "one.txt", "--vocab-size", 280)[0] == 0
    code, out, err = swarmnet(
        "text", "one.txt", "--tokenizer", "tokenizer.json", "--eos-token", "<|endoftext|>"
    )
    assert (code, err) == (0, "")
    count = len(open_tokenizer(Path("tokenizer.json"), 280).encode(WORDS.encode()))
    assert f"makes  {count:,} tokens of tokenizer.json, which has " in out
    for wrong in (
        ["nowhere"],
        ["one.txt", "--tokenizer", "nowhere.json"],
        ["one.txt", "--eos-token", "two words"],
    ):
        code, out, err = swarmnet("text", *wrong)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
