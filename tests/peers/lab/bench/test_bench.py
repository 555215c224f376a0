"""The benchmarks as commands: what they promise is in what they print."""

import re

import pytest

from peers.cli import main as cli
from protocols.framing.frames import FrameWriter
from protocols.messages.table import Contribution
from protocols.signed.envelope import ENVELOPE_BYTES


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_contribution_bench_counts_what_a_contribution_really_takes_on_the_wire(capsys):
    text = printed(capsys, "contribution", "--parameters", "5000", "--repeats", "1")
    claimed = int(re.search(r"(\d+) bytes of envelope and headers", text)[1])
    writer = FrameWriter()
    payload = bytes(5000)
    taken = writer.post(Contribution(), bytes(ENVELOPE_BYTES) + payload)
    pieces = iter(writer.next_piece, None)
    assert sum(map(len, pieces)) == taken == claimed + len(payload)
    for selection in ("top-k", "group"):
        assert selection in text
    assert "float DeMo" in text
