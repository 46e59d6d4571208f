"""The learning rates that a state is trained along: given by a schedule, or drawn by a rule once the mask is known.

Both kinds say how many steps they span, which of them are known before anything runs, what an address has of them, and
what a person is told.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from rewound.foundations.names import path_of
from rewound.method.schedule import Schedule, Segment, total
from rewound.method.technique import Facts, Rule, drawn_by

_TOLD = 6  # of many rates, the first

canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
"""What addresses are hashes of."""


@dataclass(frozen=True)
class Given:
    """Rates of a schedule, run-length encoded; two runs that begin with the same ones share that beginning."""

    known: tuple[Segment, ...]

    @cached_property
    def steps(self) -> int:
        return total(self.known)

    @cached_property
    def identity(self) -> str:
        return canonical(self.known)  # once: a schedule that moves with every step has as many segments

    @property
    def told(self) -> str:
        first = ", ".join(f"{steps:,} at {rate:g}" for rate, steps in self.known[:_TOLD])
        return first if len(self.known) <= _TOLD else f"{first}, ... ({len(self.known)} rates)"


@dataclass(frozen=True)
class Ruled:
    """Rates that a rule draws: addressed by the rule's name and what it is given, shared whole or not at all."""

    rule: Rule
    schedule: Schedule
    steps: int

    @property
    def known(self) -> tuple[Segment, ...]:
        return ()

    @property
    def identity(self) -> str:
        given = (self.schedule.steps, self.schedule.pieces, self.schedule.declared_final)
        return ",".join(map(canonical, (self.path, given, self.steps)))

    @property
    def path(self) -> str:
        return path_of(self.rule)

    @property
    def told(self) -> str:
        return self.path

    def drawn(self, facts: Facts) -> list[Segment]:
        """The rates, now that the facts are known."""
        return drawn_by(self.rule, self.schedule, self.steps, facts)


Rates: TypeAlias = Given | Ruled
