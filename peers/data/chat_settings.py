"""The chat template of a model and the tokens that it may name.

Hugging Face stores them next to a tokenizer.json. Peers send them to each other as one file of JSON, which
the manifest names by its SHA-256 (`data.chat_template_sha256`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from peers.config.atomic_files import is_file
from peers.data.documents import TextError

CHAT_TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_CONFIG_BYTES = 16 * 2**20


class ChatSettings(msgspec.Struct, frozen=True):
    """The keys of a tokenizer_config.json that a conversation's text depends on."""

    chat_template: str
    bos_token: str = ""
    eos_token: str = ""
    unk_token: str = ""
    pad_token: str = ""

    @property
    def tokens(self) -> dict[str, str]:
        """Return the tokens that a template may name; empty: there is none."""
        return {name: getattr(self, name) for name in NAMED_TOKENS}

    def encoded(self) -> bytes:
        """Return the file that peers send to each other."""
        return msgspec.json.encode(self)

    def sha256(self) -> str:
        return hashlib.sha256(self.encoded()).hexdigest()


NAMED_TOKENS = ChatSettings.__struct_fields__[1:]


def settings_beside(tokenizer: Path, sha256: str = "") -> ChatSettings:
    """Return the settings next to a tokenizer.json: those with this SHA-256, which other peers may have sent,
    or any if it is empty. Raises TextError if there are none."""
    sent = tokenizer.parent / sha256
    if sha256 and is_file(sent):
        try:
            return msgspec.json.decode(sent.read_bytes(), type=ChatSettings)
        except (OSError, ValueError, RecursionError) as error:
            raise TextError(f"{sent}: the run's chat template cannot be used: {error}") from None
    file, config = tokenizer.parent / CHAT_TEMPLATE, _read_json(tokenizer.parent / TOKENIZER_CONFIG)
    try:
        source = file.read_text(encoding="utf-8") if is_file(file) else _template_in(config)
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"chat template {file} cannot be read: {error}") from None
    if not source:
        raise TextError(
            f"there is no chat template next to {tokenizer}: put the model's {CHAT_TEMPLATE} or "
            f"{TOKENIZER_CONFIG} there, or write data.format: text"
        )
    found = ChatSettings(source, *(_content(config.get(name)) for name in NAMED_TOKENS))
    if sha256 and found.sha256() != sha256:
        raise TextError(
            f"the chat template next to {tokenizer} is not the run's: put the model's {CHAT_TEMPLATE} and "
            f"{TOKENIZER_CONFIG} there; if the run's text is shared, leave `tokenizer` out of the peer file, "
            "and other peers send both"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; empty if there is none. Raises TextError."""
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
