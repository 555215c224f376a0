"""Seeded hostile inputs to everything that decodes bytes of others: `scripts/soak fuzz`.

    scripts/soak fuzz [--inputs 100000 --seed 1 --only records --only frames]

A table of every decoder (fuzz_wire.py, fuzz_files.py) on standard error: inputs decoded in a second of CPU,
how many were taken and refused, the slowest input, growth of memory. The same as JSON on standard output.
Ends with 1 where a decoder raised anything but its own kinds of error, took too long for one input, or kept
memory. An input that did is shown, and comes again from the same seed with --only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import fuzz_files
import fuzz_wire
import msgspec
import psutil
import torch
from fuzz_inputs import Decoder

ROOT = Path(__file__).parents[3]
DECODERS = (*fuzz_wire.DECODERS, *fuzz_files.DECODERS)
SLOW_SECONDS = 0.25
"""Of CPU for one input: an event loop that stands still for so long is late with what neighbours wait for,
and four such inputs a second would stop it."""
GROWTH_MIB = 64.0
"""What the interpreter and its allocators were seen to keep of honest work is below 20."""
WARM_INPUTS = 50
"""Decoded before memory is measured: what is loaded and kept at first use is no growth."""
SHOWN_BYTES = 300
"""Of an input that was one too many."""


@dataclass(slots=True)
class Fuzzed:
    """What became of one decoder's inputs."""

    decoder: str
    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    """Of CPU, in the decoder alone."""
    slowest_seconds: float = 0.0
    slowest: str = ""
    growth_mib: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    """Errors of another kind, and where they came from."""
    examples: dict[str, str] = field(default_factory=dict)
    """A fault's first input."""

    def wrong(self) -> list[str]:
        """What is wrong with the decoder, in words; nothing where all is well."""
        found = [
            f"{count} x {fault}, the first with {self.examples[fault]}"
            for fault, count in self.faults.items()
        ]
        if self.slowest_seconds > SLOW_SECONDS:
            found.append(f"{self.slowest_seconds:.2f} s of CPU for one input: {self.slowest}")
        if self.growth_mib > GROWTH_MIB:
            found.append(f"memory grew by {self.growth_mib:.0f} MiB")
        return [f"{self.decoder}: {problem}" for problem in found]


def fuzz(decoder: Decoder, inputs: int, seed: int) -> Fuzzed:
    """Decode so many inputs. Deterministic but for the times."""
    found, chance = Fuzzed(decoder.name), Random(f"{seed} {decoder.name}")
    torch.set_num_threads(1)
    memory = psutil.Process()
    before = memory.memory_info().rss
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        for number in range(inputs):
            hostile = decoder.make(chance)
            fault, seconds = _decode(decoder, hostile, Path(folder), runner.run)
            if seconds > SLOW_SECONDS:  # Once more: a collection of garbage is not the input's doing.
                seconds = min(seconds, _decode(decoder, hostile, Path(folder), runner.run)[1])
            if seconds > found.slowest_seconds:
                found.slowest_seconds, found.slowest = seconds, repr(hostile)[:SHOWN_BYTES]
            found.inputs += 1
            found.seconds += seconds
            found.refused += fault == REFUSED
            if fault not in ("", REFUSED):
                found.faults[fault] += 1
                found.examples.setdefault(fault, repr(hostile)[:SHOWN_BYTES])
            if number == WARM_INPUTS:
                gc.collect()
                before = memory.memory_info().rss
    gc.collect()
    found.growth_mib = (memory.memory_info().rss - before) / 2**20
    return found


REFUSED = "refused"


def _decode(decoder: Decoder, hostile: object, folder: Path, run: Callable[..., object]) -> tuple[str, float]:
    """Empty, REFUSED or the fault; and the CPU's seconds."""
    fault, began = "", time.thread_time()
    try:
        result = decoder.decode(hostile, folder)
        if inspect.iscoroutine(result):
            run(result)
    except decoder.errors:
        fault = REFUSED
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = re.sub(r"0x[0-9a-f]+|[0-9]+", "N", str(error))[:80]
        fault = f"{type(error).__name__} ({said}) in {Path(place.filename).name}:{place.name}"
    return fault, time.thread_time() - began


def chosen(words: Sequence[str]) -> list[Decoder]:
    """The decoders with one of these words in their names; all of them if there are no words."""
    return [decoder for decoder in DECODERS if not words or any(word in decoder.name for word in words)]


def line(found: Fuzzed) -> str:
    """Of the table."""
    speed, faults = found.inputs / max(found.seconds, 1e-9), found.faults.total()
    return (
        f"{found.decoder:32} {found.inputs:7} inputs  {speed:8.0f}/s  "
        f"{found.inputs - found.refused - faults:6} taken  {found.refused:6} refused  "
        f"slowest {1e3 * found.slowest_seconds:6.1f} ms  memory {found.growth_mib:+6.1f} MiB  {faults} faults"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="per decoder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="decoders with it in their names"
    )
    arguments = parser.parse_args()
    decoders = chosen(arguments.only)
    if not decoders:
        names = ", ".join(decoder.name for decoder in DECODERS)
        parser.error(f"no decoder has {' or '.join(arguments.only)} in its name; there are: {names}")
    warnings.simplefilter("error")
    results = []
    for decoder in decoders:
        results.append(fuzz(decoder, arguments.inputs, arguments.seed))
        print(line(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"seed": arguments.seed, "decoders": msgspec.to_builtins(results)}, indent=1))
    wrong = [problem for found in results for problem in found.wrong()]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
