"""The demo's words, without its peers."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from peers.config.peer_file import DemoOptions
from peers.demo.show import Demo

REPORT = {
    "kill_to_commit_seconds": 0.5, "join_to_contribution_seconds": None, "loss_start": 5.5, "loss_end": 2.5,
    "bits_per_byte": 3.5, "tokens": 1000, "rounds": 10, "unequal_digests": [],
}  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_what_happened_is_told_once(tmp_path, terminal):
    demo = Demo(DemoOptions(), tmp_path)
    demo.console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    demo._say("a fresh peer joins")
    told_at_once = "a fresh peer joins" in demo.console.file.getvalue()
    assert told_at_once is not terminal, "a terminal shows it in the live table"
    demo._tell(REPORT, "pass", Path("model"), Path("report.json"))
    assert demo.console.file.getvalue().count("a fresh peer joins") == 1
