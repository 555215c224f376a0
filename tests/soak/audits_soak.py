"""Honest peers of all kinds, every window of theirs computed again: is any of them ever found to lie?

    scripts/soak audits [--seconds 600] [--kept FILE]

Each play is a line of the file (audits.jsonl by itself), and a number that no line has is played next: what
was broken off goes on, and the counts grow from day to day. Prints the sums as a table, and ends with 1 if a
window did not agree.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swarm import corpus

from peers.lab.bench.work.many import DTYPES, Found, honest

SUMS = ("audits", "rounds", "carrying", "broken")


def line_of(found: Found) -> dict[str, Any]:
    play = found.play
    return {
        "seed": play.seed, "dtype": play.dtype, "threads": play.threads, "method": play.manifest.sync.method,
        "window": play.manifest.sync.afresh_rounds, "late": play.late, "audits": found.verdicts.total(),
        "verdicts": found.verdicts, "reasons": found.reasons, "rounds": found.rounds,
        "carrying": found.carrying, "broken": found.broken, "seconds": round(found.seconds, 2),
        "audit_seconds": round(found.audit_seconds, 2),
    }  # fmt: skip


def kept_lines(kept: Path) -> list[dict[str, Any]]:
    """Those that are whole: of the last one a part may be missing."""
    lines = []
    for line in kept.read_text().splitlines() if kept.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def play(kept: Path, seconds: float) -> list[dict[str, Any]]:
    """Until the time is over; all lines by then."""
    lines, until, text = kept_lines(kept), time.monotonic() + seconds, corpus()
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = 1 + max((line["seed"] for line in lines), default=-1)
    with kept.open("a") as file:
        for seed in range(first, first + 10**9):
            if time.monotonic() >= until:
                break
            lines.append(line_of(honest(seed, text)))
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
    return lines


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| numbers | threads | plays | audits: agrees / lied / unclear | rounds | carried into | broken |"
    yield "|---|---|---|---|---|---|---|"
    for dtype in DTYPES:
        of_dtype = [line for line in lines if line["dtype"] == dtype]
        for threads in sorted({line["threads"] for line in of_dtype}):
            yield _row(dtype, str(threads), [line for line in of_dtype if line["threads"] == threads])
    yield _row("all", "", lines)
    audits, making = (sum(line[name] for line in lines) for name in ("audit_seconds", "seconds"))
    count = sum(line["audits"] for line in lines)
    yield ""
    yield (
        f"{count / max(audits, 1e-9):.1f} audits a processor second, {count / max(making, 1e-9):.1f} with "
        "what they look into"
    )


def _row(dtype: str, threads: str, lines: Sequence[dict[str, Any]]) -> str:
    verdicts = sum((Counter(line["verdicts"]) for line in lines), Counter())
    sums = {name: sum(line[name] for line in lines) for name in SUMS}
    return (
        f"| {dtype} | {threads} | {len(lines)} | {verdicts['agrees']:,} / {verdicts['lied']:,} / "
        f"{verdicts['inconclusive']:,} | {sums['rounds']:,} | {sums['carrying']:,} | {sums['broken']:,} |"
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=600.0)
    options.add_argument("--kept", type=Path, default=Path("audits.jsonl"))
    typed = options.parse_args()
    lines = play(typed.kept, typed.seconds)
    print("\n".join(table(lines)))
    wrong = [line["seed"] for line in lines if line["verdicts"].keys() - {"agrees"}]
    print(f"seeds that did not agree: {wrong}" if wrong else "all agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
