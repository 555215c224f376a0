"""Divide the parameters of a stage among rounds: which numbers a fragment has.

The polar factor of a matrix takes as long for one of its numbers as for all. The matrices of a block (a layer
or an expert) therefore form up to four groups, and a round concerns one group of each block. With four
fragments, a matrix is voted on whole. With eight, every second number has its turn, four rounds later the
others, and so on. Tables (embedding and head) have an n-th of their numbers in each of n fragments.

Every block is divided alone, by names and shapes only. Votes are therefore the same however the layers are
cut into stages. Each layer begins with another group, so that the unequal lengths of groups level out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from swarmnet.model.flat_layout import Entry
from swarmnet.model.parameters import trains_with_muon

MAX_GROUPS = 4
"""Maximum number of groups of a block's matrices. Eight groups, so with eight fragments only whole matrices,
had a higher loss (docs/learning.md)."""


@dataclass(frozen=True, slots=True)
class FragmentPart:
    """The numbers of a parameter that are in one fragment."""

    parameter: int
    """Number of the parameter in the order of the layout."""
    numbers: range


def cut_fragments(
    entries: Sequence[Entry], shapes: Sequence[tuple[int, ...]], fragments: int
) -> list[list[FragmentPart]]:
    """Return what each fragment has. `shapes` are those of the whole parameters, of which `entries` may be
    shards. `fragments` is a power of two."""
    blocks: defaultdict[str, list[int]] = defaultdict(list)
    for number, entry in enumerate(entries):
        blocks[entry.block].append(number)
    sizes = [prod(shape) for shape in shapes]
    groups = min(fragments, MAX_GROUPS)
    found: list[list[FragmentPart]] = [[] for _ in range(fragments)]
    for block, members in blocks.items():
        first = sum(int(part) for part in block.split(".") if part.isdecimal())
        longest = 3 * sum(sizes[number] for number in members) // (2 * groups)
        lengths = [0] * groups
        for number in sorted(members, key=lambda number: -sizes[number]):
            places = range(fragments)
            is_table = len(shapes[number]) > 1 and not trains_with_muon(entries[number].name, shapes[number])
            if not is_table and sizes[number] <= longest:
                shortest = lengths.index(min(lengths))
                lengths[shortest] += sizes[number]
                places = range((first + shortest) % groups, fragments, groups)
            for start, place in enumerate(places):
                found[place].append(FragmentPart(number, range(start, sizes[number], len(places))))
    return found
