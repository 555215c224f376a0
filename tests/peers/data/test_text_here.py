"""A run's text is read where the machine's own peer file says, and nowhere else. A machine without it says so
with the cure, and holds any stage but the one that reads."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm import sign, tiny_manifest

from peers.config.errors import ConfigError, UserError
from peers.config.peer_file import PeerFile, load
from peers.config.run_file import load_manifest, published_text
from peers.data.documents import ReadSummary, TextError, files_at, joined, text_at
from peers.data.local_text import (
    first_shard_here,
    missing_text,
    places_here,
    tokenizer_here,
    unservable_stages,
)
from peers.tools.doctor.stage_memory import judge_text
from peers.worker.find_run import find_run
from swarmnet.identifiers import PeerId
from swarmnet.placement.policy import MoveRules, View, choose_move, choose_stage
from swarmnet.run.schema import Data, TextSource


def unheard(_done, _all):
    """Progress that nobody wants to know."""


RUN = """
name: library
stages: [1, 1, 1]
model: {num_hidden_layers: 3, hidden_size: 32, num_attention_heads: 2,
  num_key_value_heads: 2, head_dim: 16, intermediate_size: 64}
data:
  sources: [{name: library, path: library}]
"""
PLACES = ("/etc/hostname", "~/.ssh/id_ed25519", "/proc/self/environ", "../secret", ".", "", "s.txt", "C:\\x")
"""What a hostile owner would like to be read."""
WITHOUT_TEXT = PeerFile(run="ab" * 32, state=Path("state"))


def received(path, tokenizer="bytes"):
    """The manifest of a run whose owner wrote it without this program's `publish`."""
    data = Data((TextSource("stories", str(path)),), tokenizer, seq_len=32)
    return tiny_manifest((1, 1, 1), data=data)


@pytest.fixture
def manifest(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return load_manifest(file, PeerId("owner"), {})


@pytest.fixture
def peer(tmp_path):
    def typed(more=""):
        file = tmp_path / "peer.yaml"
        file.write_text(f"role: worker\nrun: {'ab' * 32}\n{more}")
        return load(file)

    return typed


def test_text_that_is_not_here_is_named_with_what_to_write_in_the_peer_file(manifest, peer):
    missing = missing_text(manifest, peer())
    assert "source `library` is not on this machine" in missing
    assert missing.endswith("in the peer file: data_paths: {library: PATH}")
    with pytest.raises(UserError, match="source `library`"):
        first_shard_here(manifest, peer("stage: 0\n"), b"", unheard)


def test_a_reducer_needs_no_text_for_any_stage(manifest, peer):
    config = peer().model_copy(update={"role": "reducer"})
    assert missing_text(manifest, config) == ""
    assert unservable_stages(manifest, config, "") == frozenset()
    assert config.holds_stage
    assert not config.may_move


def test_what_the_peer_file_says_where_it_is_is_read_there(manifest, peer, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "book.txt").write_text("call me by my name")
    config = peer("data_paths: {library: here}\n")
    assert missing_text(manifest, config) == ""
    assert unservable_stages(manifest, config, missing_text(manifest, config)) == frozenset()
    read, shards = first_shard_here(manifest, config, b"", unheard)
    assert shards == 1
    assert bytes(read.tokens.tolist()) == b"call me by my name"


def test_a_tokenizer_is_where_the_peer_file_says_and_named_where_it_is_missing(tmp_path, peer):
    (tmp_path / "book.txt").write_text("text")
    file = tmp_path / "run.yaml"
    file.write_text(RUN + "  tokenizer: tokenizer.json\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    manifest = load_manifest(file, PeerId("owner"), {})
    config = peer(f"data_paths: {{library: {tmp_path / 'book.txt'}}}\ntokenizer: mine.json\n")
    assert missing_text(manifest, config).endswith("in the peer file: tokenizer: PATH")
    (tmp_path / "mine.json").write_text("{}")
    assert missing_text(manifest, config) == ""
    assert tokenizer_here(manifest, config) == tmp_path / "mine.json"


def test_a_path_in_a_received_manifest_is_never_opened(tmp_path, peer, monkeypatch):
    secret = tmp_path / "secret.txt"
    secret.write_text("the key of the house. " * 100)
    monkeypatch.chdir(tmp_path)
    for path in (secret, "secret.txt", tmp_path, "."):
        manifest = received(path)
        assert "stories" in missing_text(manifest, peer()), path
        assert unservable_stages(manifest, peer(), missing_text(manifest, peer())) == {0}
        for config in (peer(), peer("stage: 0\n"), peer("data_paths: {another: secret.txt}\n")):
            with pytest.raises(UserError, match=r"say where .* data_paths: \{stories: PATH\}$"):
                first_shard_here(manifest, config, b"", unheard)


@given(st.one_of(st.sampled_from(PLACES), st.text(max_size=40)))
def test_whatever_an_owner_calls_a_text_it_is_no_place_on_this_machine(path):
    config = WITHOUT_TEXT
    assert missing_text(received(path), config)
    assert places_here(received(path), config) == {}


def test_a_tokenizer_in_a_received_manifest_is_never_opened(tmp_path, peer):
    (tmp_path / "tokenizer.json").write_text("{}")
    manifest = received("python-stdlib", tokenizer=str(tmp_path / "tokenizer.json"))
    assert missing_text(manifest, peer()).endswith("in the peer file: tokenizer: PATH")
    assert tokenizer_here(manifest, peer()) is None


def test_the_sources_name_is_pasted_as_one_key_whatever_its_owner_wrote():
    manifest = replace(received("x"), data=Data((TextSource("a}, archive: /etc #", "x"),)))
    config = WITHOUT_TEXT
    assert missing_text(manifest, config).endswith('data_paths: {"a}, archive: /etc #": PATH}')


def test_the_librarys_own_text_needs_no_word_and_may_lie_elsewhere(peer, tmp_path):
    (tmp_path / "mine.txt").write_text("text")
    manifest = received("python-stdlib")
    assert missing_text(manifest, peer()) == ""
    assert places_here(manifest, peer()) == {"stories": "python-stdlib"}
    mapped = peer("data_paths: {stories: mine.txt}\n")
    assert places_here(manifest, mapped) == {"stories": str(tmp_path / "mine.txt")}


def test_a_link_in_a_folder_of_text_leads_nowhere_else(tmp_path):
    folder, secret = tmp_path / "here", tmp_path / "id_secret"
    folder.mkdir()
    secret.write_text("the key of the house")
    (folder / "book.txt").write_text("a book")
    (folder / "same.txt").symlink_to(folder / "book.txt")
    assert len(files_at(str(folder), ReadSummary())) == 2
    (folder / "more.txt").symlink_to(secret)
    text = text_at([str(folder)])
    assert joined(text) == b"a book\n\na book"
    assert re.search(r"more\.txt is a link to .*id_secret, out of .*here", text.reading.first_left_out)
    (folder / "book.txt").unlink()
    with pytest.raises(TextError, match="no text in"):
        joined(text_at([str(folder)]))


def test_who_asks_for_the_stage_that_reads_without_the_text_is_told_before_anybody_hears_of_it(
    tmp_path, peer
):
    (tmp_path / "run.json").write_text(published_text(sign(received("/etc/hostname"))))
    config = peer("stage: 0\n").model_copy(update={"run": str(tmp_path / "run.json")})

    async def join(_process):
        raise AssertionError("nothing is joined")

    process = SimpleNamespace(config=config, notify=lambda *_: None)
    network = SimpleNamespace(join=join)
    with pytest.raises(UserError, match="source `stories` is not on this machine"):
        asyncio.run(find_run(process, network))


@pytest.mark.parametrize(
    "path", ["/srv/books", "~/books", "~joe/books", "../books", "a/../../b", "C:\\books", "\\\\h\\x"]
)
def test_a_run_file_names_its_text_and_never_a_place(tmp_path, path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("path: library", f"path: '{path}'") + f"  tokenizer: '{path}'\n")
    with pytest.raises(ConfigError) as refused:
        load_manifest(file, PeerId("owner"), {})
    source, tokenizer = refused.value.problems
    assert source.startswith(f"{file}:7: data.sources.0.path: {path!r} is a place on one machine")
    assert source.endswith(f"data_paths: {{library: {path}}}")
    assert tokenizer.startswith(f"{file}:8: data.tokenizer: ")


def test_a_machine_without_the_text_takes_any_stage_but_the_first(manifest, peer):
    never = unservable_stages(manifest, peer(), missing_text(manifest, peer()))
    assert never == {0}
    rules = MoveRules((1.0, 1.0, 1.0), never=never)
    empty = View((0.0, 0.0, 0.0))
    assert {choose_stage(empty, rules, Random(seed)) for seed in range(50)} == {1, 2}
    assert choose_stage(View((0.0, 5.0, 1.0)), rules, Random(0)) == 2
    with pytest.raises(ValueError, match="none of 3 stages"):
        choose_stage(empty, replace(rules, never=frozenset(range(3))), Random(0))


def test_a_machine_without_the_text_never_moves_to_the_first_stage(manifest, peer):
    view, me = View((0.0, 8.0, 2.0), peers=10, usual=1.0), PeerId("me")
    anybody = choose_move(view, me, 1, 1.0, MoveRules((1.0, 1.0, 1.0)), 0.0, Random(0))
    without = MoveRules(
        (1.0, 1.0, 1.0), never=unservable_stages(manifest, peer(), missing_text(manifest, peer()))
    )
    assert anybody is not None
    assert anybody.target == 0
    moved = choose_move(view, me, 1, 1.0, without, 0.0, Random(0))
    assert moved is not None
    assert moved.target == 2, "the poorest that it can serve"


def test_a_stage_that_a_person_chose_is_held_or_fails_with_the_reason(manifest, peer):
    missing = missing_text(manifest, peer())
    assert missing
    assert unservable_stages(manifest, peer("stage: 0\n"), missing) == frozenset()
    whole = replace(manifest, stages=(sum(manifest.stages),))
    assert unservable_stages(whole, peer(), missing) == frozenset(), "there is no other"
    assert unservable_stages(manifest, peer("stage: 1\nauto_rebalance: true\n"), missing) == {0}, (
        "it would move there"
    )


def test_the_doctor_says_whether_the_text_is_here(manifest, peer):
    missing = missing_text(manifest, peer())
    assert judge_text(None, "").level == "ok"
    free, first, second = (judge_text(wish, missing) for wish in (None, 0, 1))
    assert (free.level, first.level, second.level) == ("warn", "fail", "ok")
    assert "data_paths: {library: PATH}" in free.fix
    assert "any stage but the first" in free.text
