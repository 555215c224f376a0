"""Before a run is signed its text and tokenizer are opened: what cannot work is refused, what is odd said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from peers.tools.owner.run_check import HIGHEST_RATE, LOWEST_RATE, unusual
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import Data, Paths, Rounds, Sync

RUN = """
name: tiny
stages: [2, 2]
model: {vocab_size: 300}
data:
  sources: [{name: books, path: books.txt}]
  seq_len: 8
"""
TOKENIZER = RUN + "  tokenizer: tokenizer.json\n"
STANDARD = Manifest("standard", PeerId("owner"))


@pytest.fixture
def lab(swarmnet, tokenizer_file, tmp_path):
    """Writes tiny.yaml with a text and a tokenizer beside it; returns what types commands there."""

    def write(run=TOKENIZER, text="def function(self): return self\n" * 9):
        Path("tiny.yaml").write_text(run)
        if text is not None:
            Path("books.txt").write_text(text)
        Path("tokenizer.json").write_bytes(tokenizer_file.read_bytes())
        return swarmnet

    return write


def refused(swarmnet, *words, options=()):
    """Both commands refuse, in one line, and nothing is written: no published run, no owner's key."""
    for command in (["publish"], ["config", "check"]):
        code, out, err = swarmnet(*command, "tiny.yaml", *options)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (code, out, len(errors)) == (2, "", 1)
        assert "tiny.yaml" in errors[0]
        assert all(word in errors[0] for word in words), errors[0]
    assert not Path("tiny.run.json").exists()
    assert not Path("~/.local").expanduser().exists()


def warnings(swarmnet):
    """What both commands say, which let the run pass."""
    code, out, err = swarmnet("config", "check", "tiny.yaml")
    assert (code, ": ok, run file" in out) == (0, True)
    assert swarmnet("publish", "tiny.yaml")[::2] == (0, err)
    assert all(line.startswith("warning: ") for line in err.splitlines())
    return err.splitlines()


def test_a_tokenizer_that_is_not_there_is_named_with_the_folder_and_the_option(lab):
    swarmnet = lab()
    Path("tokenizer.json").unlink()
    refused(swarmnet, "tokenizer.json is not next to the run file", str(Path.cwd()), "--tokenizer FILE")


def test_a_tokenizer_that_is_none_is_refused(lab):
    swarmnet = lab()
    Path("tokenizer.json").write_text("{}")
    refused(swarmnet, "tokenizer.json is not a tokenizer.json")


def test_what_a_tokenizer_changes_and_loses_is_said_as_at_loading(lab):
    swarmnet = lab(text="naïve\n" * 20)
    content = json.loads(Path("tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}
    Path("tokenizer.json").write_text(json.dumps(content))
    told = [line for line in warnings(swarmnet) if "data.tokenizer" in line]
    assert len(told) == 2
    assert 'switched off, as it changes a text: truncation {"' in told[0]
    assert "the tokenizer loses" in told[1]


def test_lines_without_a_text_are_counted_where_a_sequence_is_too_short(lab):
    swarmnet = lab(RUN.replace("books.txt", "books.jsonl"), text=None)
    Path("books.jsonl").write_text('{"messages": []}\n' * 3 + '{"text": "short"}\n')
    refused(swarmnet, 'books.jsonl:1: no field "text"', "and 2 more")


def test_a_vocabulary_that_the_tokenizer_does_not_fit_into_is_refused(lab):
    refused(lab(TOKENIZER.replace("300", "256")), "the model 256 tokens: set model.vocab_size: 277")


def test_an_end_of_text_that_is_several_tokens_is_refused(lab):
    run = TOKENIZER + "  eos_token: <|endoftext|>\n"
    refused(lab(run), "data.eos_token '<|endoftext|>' is", "it must be one")


def test_a_tokenizer_elsewhere_is_named_by_an_option(lab, tokenizer_file):
    swarmnet = lab()
    Path("tokenizer.json").unlink()
    code, out, _ = swarmnet("publish", "tiny.yaml", "--tokenizer", tokenizer_file)
    assert code == 0
    assert f"tokenizer={tokenizer_file}" in out
    assert swarmnet("config", "check", "tiny.yaml", "--tokenizer", tokenizer_file)[0] == 0


def test_a_tokenizer_for_a_run_that_reads_bytes_is_a_mistake(lab, tokenizer_file):
    refused(lab(RUN), "whose tokens are bytes: leave it out", options=["--tokenizer", tokenizer_file])


def test_the_tokenizer_of_what_is_no_run_file_is_a_mistake(lab, tokenizer_file):
    swarmnet = lab()
    Path("peer.yaml").write_text("role: bootstrap\n")
    code, _, err = swarmnet("config", "check", "peer.yaml", "--tokenizer", tokenizer_file)
    assert (code, "leave it out" in err) == (2, True)


@pytest.mark.parametrize("run", [RUN, TOKENIZER])
def test_a_text_that_is_there_and_empty_or_too_short_is_refused(lab, run):
    refused(lab(run, text=""), "has no text at", "books.txt; what is there is empty")
    refused(lab(run, text="a"), "the text has 1 tokens, and a sequence takes 9")


def test_a_folder_without_any_text_is_refused(lab):
    swarmnet = lab(RUN, text=None)
    Path("books.txt").mkdir()
    Path("books.txt/picture.png").write_bytes(b"\0")
    refused(swarmnet, "holds no text: put .txt, .md, .jsonl, .ndjson, ", ".parquet files there")


def test_a_text_that_is_read_in_epochs_is_opened_in_its_shards_and_by_its_index(lab):
    swarmnet = lab(RUN + "  sampling: epoch\n", text=None)
    Path("books.txt").mkdir()
    Path("books.txt/a.txt.zst").write_bytes(zstandard.compress(b"short"))
    refused(swarmnet, "the text has 5 tokens, and a sequence takes 9")
    Path("books.txt/a.txt.zst").write_bytes(zstandard.compress(b"long enough"))
    assert warnings(swarmnet) == []
    Path("tiny.run.json").unlink()
    Path("tiny.yaml").write_text(RUN.replace(".txt}", f".txt, index: {'ab' * 32}}}") + "  sampling: epoch\n")
    refused_now = swarmnet("config", "check", "tiny.yaml")
    assert refused_now[0] == 2
    assert "the index of the source `books`, index.json in" in refused_now[2]


def test_a_text_that_only_others_have_is_not_looked_at_and_that_is_said(lab):
    (line,) = warnings(lab(RUN, text=None))
    assert "the text `books` was not checked: books.txt is not next to the run file" in line


def test_who_has_no_tokenizer_here_may_sign_and_is_told_that_nothing_was_opened(lab):
    swarmnet = lab()
    Path("tokenizer.json").unlink()
    code, _, err = swarmnet("publish", "tiny.yaml", "--unchecked")
    assert code == 0
    assert "warning: text and tokenizer were not opened, as requested" in err.splitlines()


def test_a_usual_run_is_told_nothing(lab):
    assert warnings(lab(RUN)) == []
    assert unusual(STANDARD) == []


def test_a_tokenizers_run_without_an_end_of_text_is_told_what_that_means(lab):
    (line,) = warnings(lab())
    assert "data.eos_token is empty: the model will not learn where a text ends" in line


@pytest.mark.parametrize("rate", [50.0, HIGHEST_RATE, LOWEST_RATE / 2])
def test_a_learning_rate_at_which_nothing_was_ever_learnt_is_said_and_published(lab, rate):
    (line,) = warnings(lab(RUN + f"sync: {{learning_rate: {rate:.9f}}}\n"))
    assert f"sync.learning_rate is {rate:g}: " in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync": Sync(warmup_rounds=9, decay_rounds=9)}, "falls to its last value as soon as it has risen"),
        ({"rounds": Rounds(global_batch_tokens=511)}, "less than one microbatch of 512 tokens"),
        (
            {
                "stages": (1, 1, 1, 1),
                "paths": Paths(skip_ratio=0.3),
                "rounds": Rounds(global_batch_tokens=2047),
            },
            "at least 4 should meet in a round",
        ),
    ],
)
def test_values_that_make_no_sense_together_are_named(changes, words):
    (line,) = unusual(replace(STANDARD, **changes))
    assert words in line


def test_one_microbatch_to_a_round_is_usual_where_all_take_one_way():
    assert unusual(replace(STANDARD, data=Data(), rounds=Rounds(global_batch_tokens=512))) == []
