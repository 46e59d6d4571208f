"""Several Train^t(W, m, g) of one recipe advancing together on one device.

On CUDA each run has a place with its own stream and captured step (`place`), and the streams share the GPU: a small
network alone leaves most of it idle. Slim networks of the recipe have programs and places of their own, by their
shapes. Elsewhere, for recipes whose step cannot be captured, and where that is asked for, a fleet drives `train` in
turn. Runs end, branch (a clone of one's state starts another) and fail separately; what one computes does not depend on
the others.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from rewound.foundations.errors import Diverged, Failed, InputError, first_line
from rewound.method.schedule import total
from rewound.tasks.fleets.captured import Program, capturable, program
from rewound.tasks.fleets.place import Place, Run
from rewound.tasks.recipe import Recipe, Scores
from rewound.tasks.resident import ResidentRecipe
from rewound.tasks.training import State, Training, evaluate, train

CAPACITY = 12
"""How many captured runs share a GPU with the memory: eight are 2% slower, sixteen no faster (docs/performance.md)."""
_RESERVE = 2 << 30  # bytes left free for evaluation, orders and whoever else is there
_NAP = 2e-4  # seconds; the queues hold far more work than that


class Event(NamedTuple):
    """A member has come to a stop, or has diverged."""

    member: int
    outcome: State | Diverged
    """A live view, valid until the next event is asked for or a run is started; `.clone()` keeps it."""
    ended: bool
    """Whether this is the member's last event."""


class _Room(Protocol):
    """Where one run at a time is done."""

    def takes(self, recipe: Recipe) -> bool: ...
    def start(self, run: Run) -> None: ...
    def launch(self) -> bool: ...
    def arrived(self) -> bool: ...
    def report(self) -> tuple[State | Diverged, bool]: ...
    def resume(self) -> None: ...
    def evaluate(self) -> Scores: ...


class Fleet:
    """Runs of one recipe, and of slim networks of it, on one device; as many at a time as there are places.

    `capacity` is how many places there are, by default as many as make it faster, but no more than `at_most`.

    >>> from rewound.tasks.recipes.digits import Digits
    >>> from rewound.method.schedule import Segment
    >>> from rewound.tasks.training import begin
    >>> fleet = Fleet(Digits(), "cpu", capacity=2)
    >>> members = [fleet.start(Run(begin(Digits(), seed), None, [Segment(0.1, 2)], stops=[1])) for seed in (1, 2)]
    >>> [(member, state.position.steps, ended) for member, state, ended in fleet.events()]
    [(0, 1, False), (1, 1, False), (0, 2, True), (1, 2, True)]
    """

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device | str,
        capacity: int | None = None,
        *,
        at_most: int | None = None,
        plain: bool = False,
        by: Training = train,
    ) -> None:
        self.recipe, self.device, self._train = recipe, torch.device(device), by
        plain = plain or by is not train  # several processes, for example
        self.captures = self.device.type == "cuda" and not plain and capturable(recipe, self.device)
        if self.captures and self.device.index is not None:
            torch.cuda.set_device(self.device)  # streams and graphs belong to the current device
        # Each run with streamed data would decode its own, and one keeps all cores busy.
        streams = isinstance(recipe, ResidentRecipe) and self.captures and recipe.source(self.device) is not None
        self.capacity = capacity if capacity is not None else CAPACITY if self.captures and not streams else 1
        self.capacity = min(self.capacity, self.capacity if at_most is None else at_most)
        if self.capacity < 1:
            raise InputError(f"a fleet has room for at least 1 run, not {self.capacity}")
        self._made, self._footprint = 0, 0
        self._names = itertools.count()
        self._idle: deque[_Room] = deque()
        self._busy: dict[int, _Room] = {}  # in the order in which they are looked at
        self._waiting: deque[tuple[int, Run]] = deque()  # started, but memory ran out before its place was made
        self._held: tuple[int, _Room] | None = None  # whose view the caller has

    @property
    def free(self) -> int:
        """How many more runs can be started now."""
        return self.capacity - len(self._busy) - len(self._waiting)

    @property
    def waiting(self) -> set[int]:
        """The members that have been started and wait for a place."""
        return {member for member, _ in self._waiting}

    def start(self, run: Run) -> int:
        """Begin a run beside the others; returns the number its events carry."""
        if self.free < 1:
            raise InputError(f"no place is free: {self.capacity} runs are under way; wait for one to end")
        if total(run.lr) < 1:
            raise InputError("a run must have at least 1 step, not 0")
        member = next(self._names)
        self._waiting.append((member, run))
        self._seat()
        return member

    def follow(self, member: int, run: Run) -> None:
        """Go on with another run in the place of the one that has just ended, as the same member."""
        if self._held is None or self._held[0] != member or self._held[1] not in self._idle:
            raise InputError(f"member {member} has not just ended; let another run follow it when its last event comes")
        room = self._held[1]
        self._held = None
        self._idle.remove(room)
        with self._explained():
            room.start(run)
        self._busy[member] = room

    def events(self) -> Iterator[Event]:
        """What happens, as it happens, until every run has ended; runs may be started in between."""
        while self._busy or self._waiting:
            yield self._next()

    def evaluate(self, member: int) -> Scores:
        """The metric of the member whose event came last, on the device and without copying it."""
        if self._held is None or self._held[0] != member:
            raise InputError(f"member {member} is not at a stop; evaluate it when its event comes")
        return self._held[1].evaluate()

    def _next(self) -> Event:
        if self._held is not None:
            self._held[1].resume()
            self._held = None
        self._seat()
        while True:
            # A step each in turn: the driver's queues are short, and who waits at a full one keeps the others waiting.
            launched = [room.launch() for room in self._busy.values()]
            arrived = next(((member, room) for member, room in self._busy.items() if room.arrived()), None)
            if arrived is not None:
                break
            if not any(launched):
                time.sleep(_NAP)
        member, room = self._held = arrived
        outcome, ended = room.report()
        del self._busy[member]
        if ended:
            self._idle.append(room)
        else:
            self._busy[member] = room  # at the end: the others come first
        return Event(member, outcome, ended)

    def _seat(self) -> None:
        while self._waiting and (room := self._room(self._waiting[0][1].recipe or self.recipe)) is not None:
            member, run = self._waiting.popleft()
            if self._held is not None and self._held[1] is room:
                self._held = None
            with self._explained():  # a place that is fed captures its step when a run begins
                room.start(run)
            self._busy[member] = room

    def _room(self, recipe: Recipe) -> _Room | None:
        """An idle place for the recipe, else a new one if there is memory for it; running out lowers the capacity."""
        if (room := next((room for room in self._idle if room.takes(recipe)), None)) is not None:
            self._idle.remove(room)
            return room
        if self._made == self.capacity and not self._give_up_idle():
            return None
        if not self.captures:
            self._made += 1
            return _Plain(self.recipe, self.device, self._train)
        before = self._memory()
        while self._made and before < self._footprint + _RESERVE and self._give_up_idle():
            before = self._memory()
        if self._made and before < self._footprint + _RESERVE:
            self.capacity = self._made
            return None
        try:
            with self._explained(before):
                place = Place(self._program(recipe))
        except Failed:
            if not self._made:
                raise
            self.capacity = self._made
            return None
        self._made += 1
        self._footprint = before - self._memory()  # the first one's holds what all share, too: an upper bound
        return place

    @contextmanager
    def _explained(self, free: int | None = None) -> Iterator[None]:
        """Inside, a step that cannot be made is one sentence; so many bytes were free before."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free = self._memory() if free is None else free
            raise Failed(
                f"a single network of {self.recipe.label()} does not fit into the memory of {self.device} "
                f"({free / 2**30:.1f} GiB are free): end what else runs there, or give a smaller batch-size"
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = first_line(getattr(error, "inner_exception", error))
            raise InputError(
                f"the training step does not compile here ({reason}); `rewound run --plain` trains without compiling"
            ) from error

    def _program(self, recipe: Recipe) -> Program:
        assert isinstance(recipe, ResidentRecipe)  # as capturable ones are, and their slim networks
        return program(recipe, self.device, self.recipe)

    def _give_up_idle(self) -> bool:
        """Drop an idle place, which is for another shape; whether there was one."""
        if not self._idle:
            return False
        room = self._idle.popleft()
        if self._held is not None and self._held[1] is room:
            self._held = None  # its view ends when a run is started
        self._made -= 1
        return True

    def _memory(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])


class _Plain:
    """A run by `train` itself, or by what is given instead of it."""

    def __init__(self, recipe: Recipe, device: torch.device, by: Training) -> None:
        self._default, self.recipe, self.device, self._train = recipe, recipe, device, by
        self._state: State | None = None

    def takes(self, recipe: Recipe) -> bool:
        return True

    def start(self, run: Run) -> None:
        self.recipe = run.recipe or self._default
        self._end = run.state.position.steps + total(run.lr)
        self._states = self._train(
            self.recipe, run.state, run.mask, lr=run.lr, stops=run.stops, due=run.due, device=self.device
        )

    def launch(self) -> bool:
        return False

    def arrived(self) -> bool:
        return True

    def report(self) -> tuple[State | Diverged, bool]:
        try:
            self._state = next(self._states)
        except Diverged as failure:
            self._state = None
            return failure, True
        if ended := self._state.position.steps == self._end:
            next(self._states, None)  # its hooks end with it, whoever keeps the fleet
        return self._state, ended

    def resume(self) -> None:
        pass

    def evaluate(self) -> Scores:
        if self._state is None:
            raise InputError("a run that diverged has no state to evaluate")
        return evaluate(self.recipe, self._state, self.device)
