"""Conversations are rendered by the model's template, as transformers does it, and answers are learned."""

import hashlib
import json
import warnings
from dataclasses import replace

import pyarrow
import pytest
import torch
from chats import CHATML, VOCABULARY, chat_folder, pair, riddles, write_lines
from pyarrow import parquet

from peers.data.chat_settings import settings_beside
from peers.data.conversations import ChatTemplate
from peers.data.documents import DocumentText, TextError, text_at
from peers.data.files import local_file
from peers.data.shards import Shard
from peers.data.tokenizer import open_reader
from peers.data.tokens import ShardCache, encoded
from peers.lab.planner.new_run.text_facts import format_of
from swarmnet.identifiers import PeerId
from swarmnet.model.sampling import IGNORE_INDEX, as_context, inputs_and_labels
from swarmnet.run.boundary_settings import Boundary
from swarmnet.run.manifest import Manifest, ManifestError
from swarmnet.run.manifest_check import check
from swarmnet.run.schema import Data, ModelShape

QWEN3 = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""As Qwen3 does it: the thoughts of earlier answers are left out."""
MESSAGES = Data(tokenizer="tokenizer.json", format="messages")
NARROW = ModelShape(boundary=Boundary("token-anchored", width=16, after=(2,)))
TALK = [*pair("one", "two")["messages"], *pair("two", "three")["messages"]]


def silent(_done, _all):
    """Progress that no test looks at."""


def read(tmp_path, *records, template=CHATML):
    """The tokenizer of the run's text, that text, and its tokens."""
    file = write_lines(tmp_path / "talks.jsonl", records)
    reads = open_reader(MESSAGES, chat_folder(tmp_path / "model", template), VOCABULARY)
    text = text_at([str(file)], parse_line=reads.parse_line)
    return reads, text, torch.cat(list(encoded(text, reads, silent)))


def shown(reads, tokens):
    """The text of all tokens, and of those that are learned."""
    every = torch.where(tokens < 0, as_context(tokens), tokens)
    return reads.decode(every.tolist()).decode(), reads.decode(tokens[tokens >= 0].tolist()).decode()


@pytest.mark.parametrize("template", [CHATML, QWEN3], ids=["chatml", "qwen3"])
def test_the_text_and_its_tokens_are_those_of_transformers(tmp_path, template):
    with warnings.catch_warnings():
        from transformers import PreTrainedTokenizerFast

    _reads, _, tokens = read(tmp_path, {"messages": TALK}, template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    assert ChatTemplate(tmp_path / "model" / "tokenizer.json").render(TALK)[0] == theirs.apply_chat_template(
        TALK, tokenize=False
    )
    every = torch.where(tokens < 0, as_context(tokens), tokens).tolist()
    assert every == theirs.apply_chat_template(TALK, tokenize=True)["input_ids"]


def test_answers_are_learned_to_their_end_and_the_rest_is_context(tmp_path):
    reads, text, tokens = read(tmp_path, {"messages": TALK}, {"prompt": "naïve 日本", "completion": " 日 ok"})
    every, learned = shown(reads, tokens)
    assert learned == "two<|im_end|>\nthree<|im_end|>\n 日 ok<|im_end|>\n"
    assert every.count("<|im_start|>assistant\n") == 3
    assert tokens.dtype == torch.int32
    assert text.reading.documents == 2
    inputs, labels = inputs_and_labels([tokens])
    assert inputs.min() >= 0
    assert labels[labels != IGNORE_INDEX].tolist() == tokens[tokens >= 0].tolist()


def test_an_answer_that_the_template_shows_differently_later_is_context(tmp_path):
    reads, _, tokens = read(tmp_path, {"messages": TALK}, template=QWEN3)
    assert shown(reads, tokens)[1] == "<think>\n\n</think>\n\nthree<|im_end|>\n"


def test_lines_without_a_conversation_are_left_out_and_counted(tmp_path):
    bad = [
        {"text": "no messages"},
        {"messages": []},
        {"messages": [{"role": "user", "content": "alone"}]},
        {"messages": [{"content": "who"}]},
        pair("a", "<|im_end|> and more"),
        {"prompt": "a", "completion": ""},
    ]
    _, text, _ = read(tmp_path, pair("good", "one"), *bad)
    assert (text.reading.documents, text.reading.left_out) == (1, len(bad))
    kinds = list(text.reading.kinds)
    assert "a special token in a message" in kinds
    assert len(kinds) >= 4
    (tmp_path / "prose.txt").write_text("no conversation")
    reads = open_reader(MESSAGES, tmp_path / "model" / "tokenizer.json", VOCABULARY)
    with pytest.raises(TextError, match="holds no lines of JSON"):
        list(text_at([str(tmp_path / "prose.txt")], parse_line=reads.parse_line).blocks())


def test_a_folder_without_a_template_or_with_a_bad_one_is_refused_by_name(tmp_path):
    path = chat_folder(tmp_path, "")
    with pytest.raises(TextError, match="no chat template next to"):
        open_reader(MESSAGES, path, VOCABULARY)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(TextError, match="is no Jinja template"):
        open_reader(MESSAGES, path, VOCABULARY)


def test_a_template_cannot_reach_python(tmp_path):
    spell = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(TextError, match="the chat template refuses"):
        read(tmp_path, pair("a", "b"), template=spell)


@pytest.mark.parametrize(
    "spell",
    [
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ messages[0].content.ljust(10 ** 11) }}",
    ],
    ids=["doubling", "padding"],
)
def test_a_template_gets_little_memory_and_the_next_conversation_another_try(tmp_path, spell):
    greedy = "{% if messages[0].content == 'more' %}" + spell + "{% endif %}" + CHATML
    _, text, _ = read(tmp_path, pair("more", "b"), pair("a", "b"), template=greedy)
    assert (text.reading.documents, text.reading.left_out) == (1, 1)
    assert "needs too much memory" in text.reading.first_left_out


def test_a_template_that_never_ends_ends_the_reading(tmp_path, monkeypatch):
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3 + CHATML
    template = ChatTemplate(chat_folder(tmp_path, loops))
    monkeypatch.setattr("peers.data.conversations.RENDER_SECONDS", 1.0)
    for _ in range(2):
        with pytest.raises(TextError, match="takes more than 1 s"):
            template.render(TALK)
    assert template._process.wait(5.0) != 0


def test_marked_tokens_are_stored_and_made_again_for_another_template(tmp_path):
    file = write_lines(tmp_path / "talks" / "a.jsonl", riddles(20))
    shard = Shard("talks/a.jsonl", (local_file(file),))

    def opened(template):
        tokenizer = chat_folder(tmp_path / "model", template)
        cache = ShardCache(
            tokenizer=tokenizer, vocabulary=VOCABULARY, state=tmp_path / "state", data=MESSAGES
        )
        return cache.open(shard, silent)

    first, again, other = opened(CHATML), opened(CHATML), opened(QWEN3)
    assert (first.made, again.made, other.made) == (True, False, True)
    assert torch.equal(first.tokens, again.tokens)
    assert first.tokens.min() < 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": replace(MESSAGES, tokenizer="bytes")}, "needs the model's own tokenizer.json"),
        ({"data": replace(MESSAGES, chat_template_sha256="abc")}, "chat_template_sha256 is no SHA-256"),
        ({"model": NARROW, "data": MESSAGES}, "with which labels do not travel"),
    ],
    ids=["bytes", "template", "narrow"],
)
def test_a_run_of_conversations_needs_a_template_and_labels(changes, reason):
    check(Manifest("talks", PeerId(""), stages=(2, 2), data=MESSAGES))
    with pytest.raises(ManifestError, match=reason):
        check(Manifest("talks", PeerId(""), stages=(2, 2), **changes))


def test_rows_of_parquet_are_read_as_the_same_lines_and_named_by_the_same_hash(tmp_path):
    talks = [*riddles(70), pair("naïve", "日本")]
    reads, _, expected = read(tmp_path, *talks)
    rows = pyarrow.Table.from_pylist(talks)
    parquet.write_table(rows.append_column("id", [range(71)]), tmp_path / "a.parquet", row_group_size=30)
    line = json.dumps(talks[3], ensure_ascii=False, separators=(",", ":"))

    def tokens(path, withdrawn=()):
        text = DocumentText([local_file(path)], withdrawn=withdrawn, parse_line=reads.parse_line)
        return torch.cat(list(encoded(text, reads, silent))), text.reading

    assert torch.equal(tokens(tmp_path / "a.parquet")[0], expected)
    gone = hashlib.sha256(line.encode()).digest()
    assert tokens(tmp_path / "a.parquet", {gone})[1].documents == len(talks) - 1
    pairs = pyarrow.table({"prompt": ["one"], "completion": ["two"], "text": ["x"]})
    parquet.write_table(pairs, tmp_path / "b.parquet")
    assert shown(reads, tokens(tmp_path / "b.parquet")[0])[1] == "two<|im_end|>\n"
    parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "c.parquet")
    assert "has no column messages, and no prompt" in tokens(tmp_path / "c.parquet")[1].first_left_out
    assert [format_of(str(tmp_path / f"{name}.parquet")) for name in "abc"] == [
        "messages",
        "messages",
        "text",
    ]


def test_a_template_has_a_hash_wherever_it_is_stored_and_another_one_is_refused(tmp_path):
    path = chat_folder(tmp_path / "model")
    settings = settings_beside(path)
    assert settings.eos_token == "<|im_end|>"
    (tmp_path / "model" / "chat_template.jinja").write_text(CHATML)
    assert settings_beside(path, settings.sha256()) == settings
    (tmp_path / "model" / "chat_template.jinja").write_text(QWEN3)
    with pytest.raises(TextError, match="is not the run's"):
        open_reader(replace(MESSAGES, chat_template_sha256=settings.sha256()), path, VOCABULARY)
    (tmp_path / "model" / settings.sha256()).write_bytes(settings.encoded())
    assert settings_beside(path, settings.sha256()) == settings, "other peers have sent it"
    (tmp_path / "model" / settings.sha256()).write_bytes(b'{"chat_template": 3}')
    with pytest.raises(TextError, match="cannot be used"):
        settings_beside(path, settings.sha256())
