"""What a process answers that holds several stages: every peer in it is asked, and the answers become one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from peers.runtime.control_server import Answer, Control, Request

OTHERS = "others"
"""Key of the answers of all but the first peer."""


def answers_of_all(controls: Sequence[Control]) -> Mapping[str, Answer]:
    """For the process' own socket. The first peer's answer, and below `others` those of its siblings."""

    def asking(word: str) -> Answer:
        async def ask(request: Request) -> dict[str, Any]:
            return _one(await _asked(controls, word, request))

        return ask

    return {word: asking(word) for word in controls[0].answers}


async def _asked(controls: Sequence[Control], word: str, request: Request) -> list[dict[str, Any]]:
    """All at once: a pause of one must not wait for another's. UserError if one refuses."""
    return list(await asyncio.gather(*(control.answers[word](request) for control in controls)))


def _one(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whatever is of the whole process is so in every answer."""
    first, *others = answers
    if "seconds" in first:  # A pause lasts until the last of them rests.
        slowest = max(answers, key=lambda answer: float(answer["seconds"]))
        return {**slowest, "bytes_before": first["bytes_before"]}
    if "paused" in first:
        return first
    return {**first, OTHERS: others}
