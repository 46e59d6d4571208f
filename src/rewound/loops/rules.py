"""Learning rates that a rule draws for a level, as a recording.

A rule `(S, T, t, facts) -> Schedule` counts in steps. In a user's own loop, S is what the dense run did, T its steps,
and t as many for each epoch of the level as the dense run had on average. Several optimizers take a step together: a
rule that warms up for 100 steps does so for 100 batches, whoever steps in them.
"""

from dataclasses import replace

from rewound.loops.joint import members
from rewound.loops.recording import Recording
from rewound.loops.run import Run
from rewound.schedule import Schedule, Segment, sliced
from rewound.technique import Facts, Rule, drawn_by


def recording_of(run: Run) -> tuple[Recording, int]:
    """The recording that the present level reads, and from which epoch: a rule's drawing follows the dense run."""
    level, rule, recording, facts = run.present, run.course.how.lr, run.recording, run.progress.facts
    if level.schedule_from is not None:
        return recording, level.schedule_from
    assert callable(rule)
    assert facts is not None  # of the pruning before it
    return drawn(rule, recording, facts, level.length, len(members(run.subjects.optimizer))), recording.epochs


def drawn(rule: Rule, recording: Recording, facts: Facts, epochs: int, optimizers: int = 1) -> Recording:
    """The recording with what a rule draws for so many epochs after its end."""
    S = _of_all(recording.schedule(), optimizers)
    steps = max(1, round(S.steps / recording.trained_epochs))
    rates = drawn_by(rule, S, epochs * steps, facts)
    cuts = [sliced(rates, epoch * steps, (epoch + 1) * steps) for epoch in range(epochs)]
    return recording.extended([[Segment(rate, count * optimizers) for rate, count in cut] for cut in cuts])


def _of_all(S: Schedule, optimizers: int) -> Schedule:
    """The schedule with one step where each of the optimizers took one."""
    pieces = tuple(piece._replace(until=piece.until / optimizers) for piece in S.pieces)
    return replace(S, steps=S.steps // optimizers, pieces=pieces)
