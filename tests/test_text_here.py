"""A machine without a run's text: it is said with the cure, and it holds any stage but the one that reads."""

from random import Random

import pytest

from peers.config.peer_file import load
from peers.doctor.stage import judge_text
from peers.errors import UserError
from peers.run_file import load_manifest
from peers.text_here import missing_text, never_held, read_text_here, text_here
from swarmnet.identifiers import PeerId
from swarmnet.moving import MoveRules, View, choose_move, choose_stages

RUN = """
name: library
stages: [1, 1, 1]
model: {layers: 3, width: 32, heads: 2, key_value_heads: 2, head_width: 16, feed_forward: 64}
data:
  sources: [{name: library, path: /nowhere/library}]
"""


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
    assert "/nowhere/library does not exist" in missing
    assert missing.endswith("in the peer file: text: {library: PATH}")
    with pytest.raises(UserError, match="source `library`"):
        read_text_here(manifest, peer("stage: 0\n"), 0, frozenset())


def test_what_the_peer_file_says_where_it_is_is_read_there(manifest, peer, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "book.txt").write_text("call me by my name")
    config = peer("text: {library: here}\n")
    assert missing_text(manifest, config) == ""
    assert never_held(manifest, config, missing_text(manifest, config)) == frozenset()
    assert bytes(read_text_here(manifest, config, 0, frozenset()).tolist()) == b"call me by my name"


def test_a_tokenizer_is_where_the_peer_file_says_and_named_where_it_is_missing(tmp_path, peer):
    (tmp_path / "book.txt").write_text("text")
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("/nowhere/library", "book.txt") + "  tokenizer: tokenizer.json\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    manifest = load_manifest(file, PeerId("owner"), {})
    config = peer(f"text: {{library: {tmp_path / 'book.txt'}}}\ntokenizer: mine.json\n")
    assert missing_text(manifest, config).endswith("in the peer file: tokenizer: PATH")
    (tmp_path / "mine.json").write_text("{}")
    assert missing_text(manifest, config) == ""
    assert text_here(manifest, config).tokenizer == str(tmp_path / "mine.json")


def test_a_machine_without_the_text_takes_any_stage_but_the_first(manifest, peer):
    never = never_held(manifest, peer(), missing_text(manifest, peer()))
    assert never == {0}
    rules = MoveRules((1.0, 1.0, 1.0), never=never)
    empty = View((0.0, 0.0, 0.0))
    assert {choose_stages(empty, rules, 1, Random(seed))[0] for seed in range(50)} == {1, 2}
    assert choose_stages(View((0.0, 5.0, 1.0)), rules, 1, Random(0)) == range(2, 3)
    assert choose_stages(empty, rules, 2, Random(0)) == range(1, 3)


def test_a_machine_without_the_text_never_moves_to_the_first_stage(manifest, peer):
    view, me = View((0.0, 8.0, 2.0), peers=10, usual=1.0), PeerId("me")
    anybody = choose_move(view, me, 1, 1.0, MoveRules((1.0, 1.0, 1.0)), 0.0, Random(0))
    without = MoveRules((1.0, 1.0, 1.0), never=never_held(manifest, peer(), missing_text(manifest, peer())))
    assert anybody is not None
    assert anybody.target == 0
    moved = choose_move(view, me, 1, 1.0, without, 0.0, Random(0))
    assert moved is not None
    assert moved.target == 2, "the poorest that it can serve"


def test_a_stage_that_a_person_chose_is_held_or_fails_with_the_reason(manifest, peer):
    missing = missing_text(manifest, peer())
    assert missing
    assert never_held(manifest, peer("stage: 0\n"), missing) == frozenset()
    assert never_held(manifest, peer("stages: 3\n"), missing) == frozenset(), "it would hold all there are"


def test_the_doctor_says_whether_the_text_is_here(manifest, peer):
    missing = missing_text(manifest, peer())
    assert judge_text(None, "").level == "ok"
    free, first, second = (judge_text(wish, missing) for wish in (None, 0, 1))
    assert (free.level, first.level, second.level) == ("warn", "fail", "ok")
    assert "text: {library: PATH}" in free.fix
    assert "any stage but the first" in free.text
