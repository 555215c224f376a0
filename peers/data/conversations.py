"""Render conversations with the model's own chat template, and mark the tokens of the answers.

A line of a .jsonl file has `messages`, a list of {role, content}, or `prompt` and `completion`. Only the
assistant's tokens are learned: all others are context (`swarmnet/model/sampling.py`). The template lies in
the folder of the run's tokenizer.json, as Hugging Face stores it. It runs in a process of its own
(`rendering.py`).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.data import rendering
from peers.data.chat_settings import settings_beside
from peers.data.documents import TextError
from peers.data.forms import record_of
from peers.data.rendering import ANSWERER, Message, Span
from peers.data.tokenizer import DocumentSeparator, FileTokenizer, Tokenizer
from swarmnet.model.sampling import as_context

MAX_MESSAGES = 1000
"""Maximum messages of a conversation: the template runs up to twice for each."""
RENDER_SECONDS = 60.0
"""Timeout for one conversation, with the start of the process; one usually takes less than a millisecond."""


class ChatTemplate:
    """The chat template next to a tokenizer.json, in a process that renders conversations with it."""

    def __init__(self, tokenizer: Path, sha256: str = "") -> None:
        """Read the template of `settings_beside`. Raises TextError, also if Jinja cannot read it."""
        self.settings = settings_beside(tokenizer, sha256)
        command = [sys.executable, "-m", rendering.__name__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        weakref.finalize(self, _end, self._process)
        try:
            self._ask({"template": self.settings.chat_template, "tokens": self.settings.tokens})
        except ValueError as error:
            raise TextError(f"the chat template next to {tokenizer} {error}") from None

    def render(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and where its answers are (`Renderer.render`). Raises ValueError
        with the defect of the conversation, and TextError if the template takes too long."""
        text, spans = self._ask({"messages": messages, "is_prompt": False})
        return text, [(first, last) for first, last in spans]

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return what the model continues with its answer to `messages`. Raises as `render` does."""
        return str(self._ask({"messages": messages, "is_prompt": True}))

    def _ask(self, request: dict[str, object]) -> Any:  # noqa: ANN401 - what JSON holds
        process = self._process
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        answer = bytearray()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            while not answer.endswith(b"\n"):
                ready, _, _ = select.select([process.stdout], [], [], RENDER_SECONDS)
                part = os.read(process.stdout.fileno(), 2**20) if ready else b""
                if not part:
                    raise BrokenPipeError
                answer += part
        except BrokenPipeError:
            process.kill()
            raise TextError(
                f"the run's chat template takes more than {RENDER_SECONDS:g} s for one conversation: ask the "
                "run's owner for another one"
            ) from None
        told = json.loads(answer)
        if "error" in told:
            raise ValueError(told["error"])
        return told["result"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that renders, and wait for it."""
    process.kill()
    process.communicate()


class ChatTokenizer(Tokenizer):
    """Tokenizer of conversations: a piece of text is one that `parse_line` has returned."""

    end = DocumentSeparator(b"")
    """The template writes ends of its own."""

    def __init__(self, path: Path, eos_token: str = "", template_sha256: str = "") -> None:
        """Raises TextError."""
        # Special tokens are read as such, because the template writes some; messages may have none.
        self._tokenizer = FileTokenizer(path, eos_token, reads_special_tokens=True)
        self._template = ChatTemplate(path, template_sha256)
        self.vocabulary, self.warning = self._tokenizer.vocabulary, self._tokenizer.warning
        self.form = f"messages {self._template.settings.chat_template}"
        self.parse_line = self._parse_line

    @property
    def dtype(self) -> torch.dtype:
        """A signed type, for `as_context`."""
        return torch.int32

    def _parse_line(self, line: bytes) -> tuple[bytes, bytes]:
        """Return a conversation, rendered, as JSON, and the line, whose SHA-256 names it. Raises ValueError
        with the defect of the line."""
        messages = messages_of(line)
        _refuse_special_tokens(self._tokenizer, messages)
        return json.dumps(self._template.render(messages)).encode(), line.strip()

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[Tensor]:
        """Return the tokens of each conversation, int32; those that are not learned by `as_context`."""
        conversations = [json.loads(piece) for piece in pieces]
        encoded = self._tokenizer.encode_with_offsets([text for text, _ in conversations])
        return [
            _marked(ids, offsets, spans)
            for (ids, offsets), (_, spans) in zip(encoded, conversations, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return self._tokenizer.decode(tokens)


class PromptTokenizer(FileTokenizer):
    """Tokenizer of a prompt that a chat template has rendered, and of the model's answer."""

    def __init__(self, path: Path, template_sha256: str = "") -> None:
        """Raises TextError."""
        self._template = ChatTemplate(path, template_sha256)
        super().__init__(path, self._template.settings.tokens["eos_token"], reads_special_tokens=True)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return what the model continues with its answer to `messages`. Raises TextError."""
        try:
            _refuse_special_tokens(self, messages)
            return self._template.prompt(messages)
        except ValueError as error:
            raise TextError(f"the prompt cannot be rendered: {error}") from None

    def _split_at_end_of_text(self, text: str) -> list[str]:
        """Return the whole text: ends of messages are read as what they are."""
        return [text]


def prompts_of(
    tokenizer: Path | None, talks: Sequence[Sequence[Message]], template_sha256: str = ""
) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer of prompts, and the prompt that asks the model to answer each conversation, by the
    template next to `tokenizer`, a tokenizer.json. Raises TextError."""
    if tokenizer is None:
        raise TextError("the model's tokens are bytes, and it has no chat template: leave out --chat")
    reads = PromptTokenizer(tokenizer, template_sha256)
    return reads, [reads.prompt(messages) for messages in talks]


def _refuse_special_tokens(tokenizer: FileTokenizer, messages: Sequence[Message]) -> None:
    """Raise ValueError if a message holds a special token: it would end a message, or begin one."""
    contents = json.dumps([message.get("content") for message in messages], ensure_ascii=False)
    for token in tokenizer.special_tokens:
        if token in contents:
            raise ValueError(f"a special token in a message: {token}; remove it there")


def messages_of(line: bytes) -> list[Message]:
    """Return the messages of a .jsonl line. Raises ValueError with the defect of the line."""
    record = record_of(line)
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    messages = record.get("messages")
    if messages is None and "prompt" in record and "completion" in record:
        messages = [
            *_messages(record["prompt"], "user"),
            *_messages(record["completion"], ANSWERER),
        ]
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise ValueError(
            f"no field `messages` with 1 to {MAX_MESSAGES:,} of them, and no `prompt` and `completion`"
        )
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message without a `role`")
        if message["role"] == ANSWERER and not message.get("content"):
            raise ValueError("an answer without `content`")
    return messages


def _messages(value: object, role: str) -> list[Any]:
    """Return a prompt or a completion as messages: it is a text, or a list of messages already."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _marked(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> Tensor:
    """Return tokens, int32 [tokens], as context where they are outside the answers' `spans`. `offsets` are
    the characters of each token; some tokenizers leave out white space at its ends."""
    is_learned, reached = [], 0
    for start, end in offsets:
        start = min(start, reached)
        reached = max(reached, end)
        is_learned.append(any(first <= start and end <= last for first, last in spans))
    tokens = torch.tensor(ids, dtype=torch.int32)
    return torch.where(torch.tensor(is_learned, dtype=torch.bool), tokens, as_context(tokens))
