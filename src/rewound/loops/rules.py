"""Learning rates that a rule draws for a level, as a recording.

A rule `(S, T, t, facts) -> Schedule` counts in steps. In a user's own loop, S is what the dense run did, T its steps,
and t as many for each epoch of the level as the dense run had on average. (A loop that counts steps has about one of
them in each.) Several optimizers take a step together: a
rule that warms up for 100 steps does so for 100 batches, whoever steps in them.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from rewound.loops.joint import members
from rewound.loops.recording import Recording
from rewound.loops.run import Run
from rewound.method.schedule import Schedule, Segment, sliced
from rewound.method.technique import Facts, Rule, drawn_by


def recording_of(run: Run) -> Recording:
    """The recording that the present level reads; what a rule draws follows the dense run."""
    course, rule, recording, facts = run.course, run.course.how.lr, run.recording, run.progress.facts
    if run.present.schedule_from is not None:
        return recording
    assert callable(rule)
    assert facts is not None  # of the pruning before it
    length = run.present.length
    parts = [1] * length if course.unit == "epoch" else [length]
    return drawn(rule, recording, facts, course.training_time, parts, len(members(run.subjects.optimizer)))


def drawn(
    rule: Rule, recording: Recording, facts: Facts, training: int, parts: Sequence[int], optimizers: int = 1
) -> Recording:
    """The recording of a training time with what a rule draws for parts of these lengths after its end."""
    S = _of_all(recording.schedule(), optimizers)
    steps = max(1, round(S.steps / training))
    rates = drawn_by(rule, S, sum(parts) * steps, facts)
    ends = accumulate((length * steps for length in parts), initial=0)
    cuts = [sliced(rates, start, stop) for start, stop in pairwise(ends)]
    return recording.extended([[Segment(rate, count * optimizers) for rate, count in cut] for cut in cuts])


def _of_all(S: Schedule, optimizers: int) -> Schedule:
    """The schedule with one step where each of the optimizers took one."""
    pieces = tuple(piece._replace(until=piece.until / optimizers) for piece in S.pieces)
    return replace(S, steps=S.steps // optimizers, pieces=pieces)
