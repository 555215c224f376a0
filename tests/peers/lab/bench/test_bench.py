"""The benchmarks as commands: what they promise is in what they print."""

import asyncio
import re

import pytest

from peers.cli import main as cli
from peers.lab.bench import transfer as bench_transfer
from peers.lab.bench.transfer import Arrivals, Report, Row, TcpCarrier, render
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
    for selection in ("top-k", "group", "seeded"):
        assert selection in text
    assert "float DeMo" in text


def test_the_transfer_table_shows_speed_and_time_with_their_ratios():
    row = Row(1 << 20, 400.0, 2000.0, 0.003, 0.001)
    text = render(Report(3, 0.0001, 0.00002, (row,)))
    assert (row.speed_ratio, row.time_ratio) == (pytest.approx(0.2), pytest.approx(3.0))
    assert "p2pd 100 us, TCP 20 us, 5.0 times" in text
    line = text.splitlines()[-1].split()
    assert line == ["1", "MiB", "400", "2,000", "0.20", "3.00", "1.00", "3.0"]


async def test_the_baseline_carries_every_byte_in_order():
    got, arrivals = [], Arrivals()

    async def serve(reader, writer):
        for size in (0, 5, 1 << 20):
            (length,) = bench_transfer._LENGTH.unpack(await reader.readexactly(4))
            assert length == size
            got.append(await reader.readexactly(length))
            arrivals.arrived()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        carrier = TcpCarrier(writer, arrivals)
        bodies = [b"", b"hello", bytes(range(256)) * 4096]
        for body in bodies:
            await carrier.send(body)
        await carrier.received(3)
        writer.close()
        await writer.wait_closed()
    assert got == bodies


@pytest.mark.loopback
def test_the_transfer_bench_measures_both_ways(capsys, monkeypatch):
    monkeypatch.setattr(bench_transfer, "STREAM_BYTES", 1 << 20)
    monkeypatch.setattr(bench_transfer, "SIZES", (64 * 1024, 256 * 1024))
    monkeypatch.setattr(bench_transfer, "SMALL_MESSAGES", 5)
    text = printed(capsys, "transfer", "--repeats", "1")
    rows = [line.split() for line in text.splitlines() if re.match(r" *\d+ KiB", line)]
    assert [row[0] for row in rows] == ["64", "256"]
    for row in rows:
        assert len([float(figure.replace(",", "")) for figure in row[2:]]) == 6
    assert "small message, one way: p2pd" in text
