"""Render conversations by a chat template, in a process of its own: a template is a stranger's program.

The process reads lines of JSON and answers each with a line: {"result": ...} or {"error": text}. The first
line has the template and its tokens. Jinja's sandbox keeps the template from Python, the process limits its
memory, and the parent limits its time (`ChatTemplate` in peers/data/conversations.py).
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ANSWERER = "assistant"
"""Role whose messages are learned."""
MAX_CHARACTERS = 2**20
"""Maximum characters of a rendered conversation. The tokenizers package needs 1.4 s for as many bytes without
a line end (peers/data/tokenizer.py)."""
MEMORY_BYTES = 2**30
"""Address space of the process: Python and Jinja, and a conversation of 16 MiB several times."""
Message = dict[str, Any]
Span = tuple[int, int]
"""First character of an answer, and the one behind its last."""


class _Generation(Extension):
    """Accept `{% generation %}`, with which some templates mark answers, and render what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Renderer:
    """A template with the tokens that it may name."""

    def __init__(self, template: str, tokens: Mapping[str, str]) -> None:
        """Raises ValueError if Jinja cannot read the template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        self._tokens = tokens
        try:
            self._template = environment.from_string(template)
        except (TemplateError, MemoryError) as error:
            raise ValueError(f"is no Jinja template: {error}") from None

    def render(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and where its answers are. An answer begins behind the prompt
        that a user of the model would type, and includes the template's end of a message. An answer is
        left out if the template shows it differently once more messages follow. Raises ValueError with
        the defect of the conversation."""
        text, spans = self.text(messages), []
        for number, message in enumerate(messages):
            if message["role"] != ANSWERER:
                continue
            before = self.text(messages[:number], add_generation_prompt=True)
            through = self.text(messages[: number + 1])
            if through.startswith(before) and text.startswith(through):
                spans.append((len(before), len(through)))
        if not spans:
            raise ValueError("no answer: the template shows no message of the assistant behind its prompt")
        return text, spans

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of messages; with `add_generation_prompt`, the model continues it with its answer.
        Raises ValueError."""
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except MemoryError:
            raise ValueError("the chat template refuses a conversation: it needs too much memory") from None
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"the chat template refuses a conversation: {error}") from None
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"a conversation of more than {MAX_CHARACTERS:,} characters")
        return text


def _as_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)


def main() -> None:
    """Answer until the parent closes the input."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    renderer: Renderer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        result: object = None
        try:
            if renderer is None:
                renderer = Renderer(request["template"], request["tokens"])
            elif request["is_prompt"]:
                result = renderer.text(request["messages"], add_generation_prompt=True)
            else:
                result = renderer.render(request["messages"])
            answer: dict[str, object] = {"result": result}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
