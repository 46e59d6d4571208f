"""The levels of a run as files to choose from afterwards: a ticket of each, and a table.

    levels/1.00x.safetensors    the dense network, which the others are measured against
    levels/3.81x.safetensors    the level that was pruned to a compression of 3.81
    levels/levels.csv           a row each

The name of a file has the compression that the level was to be pruned to, as far as its run knows no better; the table
has what was measured: whole units meet a compression only nearly, and that of FLOPs is none of weights.

All that a row says follows from its ticket, which has a checksum. So the table is written anew from the tickets
whenever a run goes on, and neither loses rows nor has one twice. A run that goes on to a larger compression adds its
levels; where two compressions look the same with two decimals, the later file gets more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from rewound.foundations.csvfiles import write_table
from rewound.foundations.errors import InputError
from rewound.method.pruning.counts import Counts
from rewound.method.pruning.mask import Mask
from rewound.states.tickets.ticket import load, save

COLUMNS = (
    *("level", "compression", "network_compression", "weights_kept", "weights", "parameters", "bytes", "flops"),
    *("metric", "value", "returned", "ticket"),
)
_FACTS = ("level", "density", "flops", "metric", "value", "ticket")
_DECIMALS = range(2, 17)
LevelName = tuple[int, str]


def place_of(level: int, density: float) -> LevelName:
    """What tells a level from others: that of another compression may have the same number.

    >>> place_of(3, 0.8**3) == place_of(3, 0.512)
    True
    """
    return level, f"{density:.9g}"


@dataclass(frozen=True, kw_only=True)
class KeptLevel:
    """One level, and the file that it is kept in."""

    level: int
    density: float
    """What it was to be pruned to, or what is left; the name of its file says this."""
    counts: Counts
    flops: int | None
    """Of one example; None where nobody knows them."""
    metric: str
    value: float | None
    """What the level reached, if that was told."""
    ticket: str = ""
    bytes: int = 0

    @property
    def place(self) -> LevelName:
        """What tells it from the others."""
        return place_of(self.level, self.density)

    def row(self, returned: bool) -> tuple[object, ...]:
        """What the table says of it, in the order of `COLUMNS`."""
        ratios = (1 / self.counts.density(self.density), self.counts.network_compression)
        sizes = (self.counts.kept, self.counts.selected, self.counts.network, self.bytes, self.flops)
        metric = "" if self.value is None else self.metric
        return (self.level, *ratios, *sizes, metric, self.value, returned, self.ticket)

    def about(self, run: str) -> dict[str, object]:
        """What its ticket says of it."""
        return {"level": {name: getattr(self, name) for name in _FACTS} | {"run": run}}


class KeptLevels:
    """The folder of the levels of one run; `run` is a name that other runs do not have."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self.kept: dict[LevelName, KeptLevel] = {}

    def read(self, count: Callable[[Mask], Counts], say: Callable[[str], None]) -> None:
        """Find the tickets of this run; one that is damaged or of another run is set aside, and nothing is lost.

        `count` counts what a mask keeps; earlier versions wrote other counts of whole units into their tickets.
        """
        self.kept.clear()
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                ticket = load(path)
                facts = ticket.about.get("level")
                if not isinstance(facts, dict) or "run" not in facts:
                    continue  # somebody else's, and left alone
                self._check(facts, path)
                known = {name: facts[name] for name in _FACTS}
                found = KeptLevel(**known, counts=count(ticket.mask), bytes=path.stat().st_size)
            except (InputError, KeyError, TypeError) as error:
                self._set_aside(path, str(error) if isinstance(error, InputError) else f"{path} is no level", say)
            else:
                self.kept[found.place] = found

    def _check(self, facts: Mapping[str, object], path: Path) -> None:
        if facts["run"] != self.run:
            raise InputError(f"{path} is a level of another run")
        if facts["ticket"] != path.name:
            raise InputError(f"{path} is {facts['ticket']} under another name")

    def add(
        self, level: KeptLevel, state: Mapping[str, Tensor], mask: Mask, about: Mapping[str, object] | None = None
    ) -> None:
        """Write the ticket of a level; one of the same level is replaced."""
        named = replace(level, ticket=self._name(level))
        said = {**(about or {}), **level.counts.facts(mask), **named.about(self.run)}
        save(state, mask, path := self.folder / named.ticket, said)
        self.kept[level.place] = replace(named, bytes=path.stat().st_size)

    def write_table(self, returned: LevelName) -> Path:
        """Write levels.csv, with a mark at the level that is returned."""
        levels = sorted(self.kept.values(), key=lambda level: (-level.density, level.level))
        rows = (level.row(level.place == returned) for level in levels)
        write_table(COLUMNS, rows, table := self.folder / "levels.csv", durable=True)
        return table

    def _name(self, level: KeptLevel) -> str:
        """The name of a level's file, with as many decimals as tell it from the others."""
        if level.place in self.kept:
            return self.kept[level.place].ticket
        names = (f"{1 / level.density:.{decimals}f}x.safetensors" for decimals in _DECIMALS)
        return next(name for name in names if not (self.folder / name).exists())

    def _set_aside(self, path: Path, why: str, say: Callable[[str], None]) -> None:
        aside = self.folder / "set-aside" / path.name
        while aside.exists():
            aside = aside.with_name(f"{aside.stem}-again{aside.suffix}")
        aside.parent.mkdir(exist_ok=True)
        path.replace(aside)
        say(f"{why}; set aside as {aside}")
