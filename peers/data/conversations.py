"""Render conversations with the model's own chat template, and mark the tokens of the answers.

A line of a .jsonl file has `messages`, a list of {role, content}, or `prompt` and `completion`. Only the
assistant's tokens are learned: all others are context (`swarmnet/model/sampling.py`). The template lies in
the folder of the run's tokenizer.json, as Hugging Face stores it. Jinja runs it in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor

from peers.config.atomic_files import is_file
from peers.data.documents import TextError
from peers.data.forms import record_of
from peers.data.tokenizer import DocumentSeparator, FileTokenizer, Tokenizer
from swarmnet.model.sampling import as_context

CHAT_TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
ANSWERER = "assistant"
"""Role whose messages are learned."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Tokens of tokenizer_config.json that a template may name."""
MAX_CHARACTERS = 2**20
"""Maximum characters of a rendered conversation. The tokenizers package needs 1.4 s for as many bytes without
a line end (peers/data/tokenizer.py)."""
MAX_MESSAGES = 1000
"""Maximum messages of a conversation: the template runs up to twice for each."""
MAX_CONFIG_BYTES = 16 * 2**20
Message = dict[str, Any]
Span = tuple[int, int]
"""First character of an answer, and the one behind its last."""


class _Generation(Extension):
    """Accept `{% generation %}`, with which some templates mark answers, and render what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The chat template next to a tokenizer.json."""

    def __init__(self, tokenizer: Path) -> None:
        """Raises TextError if there is no template next to `tokenizer`, or if Jinja cannot read it."""
        file, config = tokenizer.parent / CHAT_TEMPLATE, _read_config(tokenizer.parent / TOKENIZER_CONFIG)
        try:
            source = file.read_text(encoding="utf-8") if is_file(file) else _template_in(config)
        except (OSError, UnicodeDecodeError) as error:
            raise TextError(f"chat template {file} cannot be read: {error}") from None
        if not source:
            raise TextError(
                f"there is no chat template next to {tokenizer}: put the model's {CHAT_TEMPLATE} or "
                f"{TOKENIZER_CONFIG} there, or write data.format: text"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        self._tokens = {name: _content(config.get(name)) for name in NAMED_TOKENS}
        self.source = source
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TextError(f"the chat template next to {tokenizer} is no Jinja template: {error}") from None

    def render(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and where its answers are. An answer begins behind the prompt
        that a user of the model would type, and includes the template's end of a message. An answer is
        left out if the template shows it differently once more messages follow. Raises ValueError with
        the defect of the conversation."""
        text, spans = self._text(messages), []
        for number, message in enumerate(messages):
            if message["role"] != ANSWERER:
                continue
            before = self._text(messages[:number], add_generation_prompt=True)
            through = self._text(messages[: number + 1])
            if through.startswith(before) and text.startswith(through):
                spans.append((len(before), len(through)))
        if not spans:
            raise ValueError("no answer: the template shows no message of the assistant behind its prompt")
        return text, spans

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"the chat template refuses a conversation: {error}") from None
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"a conversation of more than {MAX_CHARACTERS:,} characters")
        return text


class ChatTokenizer(Tokenizer):
    """Tokenizer of conversations: a piece of text is one that `parse_line` has returned."""

    end = DocumentSeparator(b"")
    """The template writes ends of its own."""

    def __init__(self, path: Path, eos_token: str = "") -> None:
        """Raises TextError."""
        # Special tokens are read as such, because the template writes some; messages may have none.
        self._tokenizer = FileTokenizer(path, eos_token, reads_special_tokens=True)
        self._template = ChatTemplate(path)
        self.vocabulary, self.warning = self._tokenizer.vocabulary, self._tokenizer.warning
        self.form = f"messages {self._template.source}"
        self.parse_line = self._parse_line

    @property
    def dtype(self) -> torch.dtype:
        """A signed type, for `as_context`."""
        return torch.int32

    def _parse_line(self, line: bytes) -> tuple[bytes, bytes]:
        """Return a conversation, rendered, as JSON, and the line, whose SHA-256 names it. Raises ValueError
        with the defect of the line."""
        messages = messages_of(line)
        contents = json.dumps([message.get("content") for message in messages], ensure_ascii=False)
        for token in self._tokenizer.special_tokens:
            if token in contents:
                raise ValueError(f"a special token in a message: {token}; remove it there")
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


def _read_config(path: Path) -> dict[str, Any]:
    """Return a tokenizer_config.json; empty if there is none. Raises TextError."""
    if not is_file(path):
        return {}
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _template_in(config: dict[str, Any]) -> str:
    """Return the template in a tokenizer_config.json, which may have several by name; empty: none."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _content(token: object) -> str:
    """Return the text of a token, which is stored as a text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _as_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)
