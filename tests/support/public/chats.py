"""A folder with a tokenizer and a chat template as Hugging Face stores them, and conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
START, END = "<|im_start|>", "<|im_end|>"
VOCABULARY = 300


def chat_folder(folder: Path, template: str = CHATML) -> Path:
    """The folder, with tokenizer.json and tokenizer_config.json. Returns tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant sum of one two three is " * 20], trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    config = {"chat_template": template, "eos_token": END, "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def pair(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, records: Iterable[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def riddles(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs whose answers follow from their questions, which are random: only answers can be learnt."""
    chance = Random(seed)
    questions = ["".join(chance.choices("abcdefgh", k=8)) for _ in range(count)]
    return [pair(question, f"{question[0].upper()} leads {question[0]}") for question in questions]
