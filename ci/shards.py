"""How suites are spread over jobs: longest processing time first, within 4/3 of the best that any plan can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil

from ci.registry import Registration
from ci.stages import Stage

Shards = tuple[tuple[str, ...], ...]
"""Files of each shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a stage runs on one class of machines. `seconds` by file; `shards` hold the files."""

    stage: str
    needs: str
    seconds: Mapping[str, float]
    shards: Shards

    def load(self, shard: Iterable[str]) -> float:
        """Seconds of one shard."""
        return sum(self.seconds[path] for path in shard)


def spread(seconds: Mapping[str, float], count: int) -> Shards:
    """Give each file, the longest first, to the shard that has least. Files of one length go in the order of names."""
    if count < 1:
        raise ValueError(f"shards={count}: must be 1 at least")
    shards: list[list[str]] = [[] for _ in range(count)]
    loads = [(0.0, index) for index in range(count)]
    heapify(loads)
    for path in sorted(seconds, key=lambda path: (-seconds[path], path)):
        load, index = loads[0]
        shards[index].append(path)
        heapreplace(loads, (load + seconds[path], index))
    return tuple(tuple(sorted(shard)) for shard in shards)


def fitted(seconds: Mapping[str, float], capacity: float) -> Shards:
    """As few shards as hold no more than `capacity` seconds each. Raises ValueError when a file alone is too long."""
    for path, needed in seconds.items():
        if needed > capacity:
            raise ValueError(
                f"{path}: takes {needed:g} s, and a shard holds {capacity:g} s; split the file, or give its stage more "
                "minutes in ci/stages.toml"
            )
    count = max(1, ceil(sum(seconds.values()) / capacity))
    while True:
        shards = spread(seconds, count)
        if all(sum(seconds[path] for path in shard) <= capacity for shard in shards):
            return shards
        count += 1


def groups(registrations: Sequence[Registration], stages: Mapping[str, Stage], shards: int = 0) -> list[Group]:
    """The plan: a group for each stage and class of machines that have suites. `shards` fixes how many, 0 fits them."""
    found = []
    for stage in stages.values():
        mine = [one for one in registrations if one.stage == (stage.suites_of or stage.name)]
        for needs in dict.fromkeys(one.needs for one in mine):
            seconds = {one.path: one.seconds * stage.times for one in mine if one.needs == needs}
            spread_out = spread(seconds, shards) if shards else fitted(seconds, stage.capacity)
            found.append(Group(stage=stage.name, needs=needs, seconds=seconds, shards=spread_out))
    return found


def group_of(found: Sequence[Group], stage: str, needs: str) -> Group:
    """Raises ValueError naming what there is."""
    for group in found:
        if (group.stage, group.needs) == (stage, needs):
            return group
    there = ", ".join(f"{group.stage} on {group.needs}" for group in found)
    raise ValueError(f"stage={stage!r}, needs={needs!r}: no suite is registered so; there are {there}")


def shard(
    registrations: Sequence[Registration], stages: Mapping[str, Stage], stage: str, needs: str, part: str
) -> frozenset[str]:
    """The files of part `K/N`, or of all parts where that is empty. Raises ValueError naming what does not fit."""
    number, _, count = part.partition("/")
    if part and not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"shard={part!r}: write K/N with 1 <= K <= N, such as 2/3")
    group = group_of(groups(registrations, stages, int(count) if part else 1), stage, needs)
    return frozenset(group.shards[int(number) - 1 if part else 0])
