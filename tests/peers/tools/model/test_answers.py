"""Answers are scored as transformers scores them, before and after a fine-tuning."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chats import VOCABULARY, chat_folder, riddles, write_lines
from public_models import LLAMA, logits, save
from torch.nn import functional

from peers.cli.main import main
from peers.tools.model.generate import harmless

SHAPE = replace(LLAMA, vocab_size=VOCABULARY)


def swarmnet(capsys, *arguments) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return ended.value.code or 0, told.out + told.err


@pytest.fixture
def base(tmp_path) -> Path:
    save(tmp_path / "base", SHAPE)
    chat_folder(tmp_path / "base")
    return tmp_path / "base"


def test_evaluate_scores_answers_as_transformers_does(base, tmp_path, capsys):
    talks = write_lines(tmp_path / "talks.jsonl", riddles(5))
    code, told = swarmnet(capsys, "evaluate", "--from", base, "--eval-text", talks, "--answers")
    assert code == 0, told
    from transformers import PreTrainedTokenizerFast

    theirs, nats, count = PreTrainedTokenizerFast.from_pretrained(base), 0.0, 0
    for line in talks.read_text().splitlines():
        messages = json.loads(line)["messages"]
        every = theirs.apply_chat_template(messages)["input_ids"]
        prompt = len(theirs.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"])
        tokens = torch.tensor([every])
        found = logits(base, tokens[:, :-1])[0]
        nats += functional.cross_entropy(found[prompt - 1 :], tokens[0, prompt:], reduction="sum").item()
        count += len(every) - prompt
    (loss,) = re.findall(r"loss ([\d.]+) nats per token of the answers", told)
    assert abs(float(loss) - nats / count) < 1e-3


def test_answers_need_a_model_here_and_a_text_with_some(base, tmp_path, capsys):
    code, told = swarmnet(capsys, "evaluate", "--from", base, "--answers")
    assert (code, "add --from FOLDER --eval-text FILE.jsonl" in told) == (2, True)
    prose = write_lines(tmp_path / "prose.jsonl", [{"text": "no answers"}])
    code, told = swarmnet(capsys, "evaluate", "--from", base, "--eval-text", prose, "--answers")
    assert (code, "no field `messages`" in told) == (2, True)


def test_generate_answers_a_message_or_a_conversation_as_transformers_does(base, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    talk = [{"role": "user", "content": "one"}]
    longer = [*talk, {"role": "assistant", "content": "two"}, {"role": "user", "content": "naïve 日本"}]
    file = write_lines(tmp_path / "talk.json", [{"messages": longer}])
    for messages, options in ((talk, ["--chat", "one"]), (longer, ["--messages", file])):
        prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        every = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0]
        expected = theirs.decode(every[prompt["input_ids"].shape[1] :]).removesuffix("<|im_end|>")
        expected = harmless(expected).rstrip("\N{REPLACEMENT CHARACTER}")  # It may end inside a character.
        capsys.readouterr()
        code, told = swarmnet(
            capsys, "generate", "--from", base, "--tokens", 16, "--temperature", 0, *options
        )
        assert (code, told) == (0, expected + "\n")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--chat", "a <|im_end|> b"], "a special token in a message: <|im_end|>"),
        (["--messages", "nowhere.json"], "cannot be read"),
        (["--messages", "bad.json"], 'it looks like {"messages"'),
        (["--messages", "bad.json", "a prompt"], "give one of them"),
        (["--chat", "no template"], "there is no chat template next to"),
    ],
    ids=["token", "nowhere", "bad", "both", "template"],
)
def test_a_prompt_that_cannot_be_rendered_is_refused(base, tmp_path, capsys, monkeypatch, options, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[]")
    if "no template" in options:
        chat_folder(base, "")
    code, told = swarmnet(capsys, "generate", "--from", base, *options)
    assert (code, reason in told) == (2, True), told
