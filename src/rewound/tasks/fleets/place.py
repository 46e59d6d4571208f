"""Train^t(W, m, g) on static buffers, its step captured as one CUDA graph.

A place holds the tensors of one run at a time, at fixed addresses, and the graph of one step over them. What changes
from step to step (learning rate, data position, keys, the order of the epoch) lives in device memory, so that one graph
serves every run that ever takes the place, and the host only replays it. `Place.step` is plain tensor code: on the CPU,
where nothing is captured, it is the same step.

Streamed data (`feed`) is no different: a place then has memory for the examples of one step, and before each step they
are put there.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice

import torch
from torch import Tensor

from rewound.foundations.errors import Diverged
from rewound.foundations.randomness import fold, own_draws
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Segment, total
from rewound.tasks.feed import Feed, Source, seconds_waited
from rewound.tasks.fleets.captured import Program, counts, kernels, quiet_compilation
from rewound.tasks.recipe import Position, Recipe, Scores
from rewound.tasks.training import State, never, scored

_ROUND = 3 << 24  # bytes, of whole pixels: the largest step of the next run is mostly a little larger or smaller
_LEAD = 32  # how many steps the host runs ahead: work for a pause of 0.1 s in a fleet, in bounded memory


@dataclass(frozen=True)
class Run:
    """One Train^t(W, m, g) to do: `stops` are counted in steps from the start, the last step is always one.

    `due` is asked after each step whether to stop there, too: by the clock, for example. `recipe` is that of a slim
    network; None: the fleet's.
    """

    state: State
    mask: Mask | None
    lr: Sequence[Segment]
    stops: Collection[int] = ()
    due: Callable[[], bool] = never
    recipe: Recipe | None = None


class Place:
    """Room for one run at a time: static buffers, the graph of one step over them, and the stream it is replayed on."""

    def __init__(self, program: Program) -> None:
        self.program, device = program, program.device
        self.model = program.model()
        self.update = program.update(self.model)
        parameters = dict(self.model.named_parameters())
        self.parameters = [parameters[name] for name in program.parameters]
        counting = [module for module in self.model.modules() if counts(module)]
        self.batches_seen = torch.zeros(len(counting), dtype=torch.int64, device=device)
        for module, count in zip(counting, self.batches_seen, strict=True):
            module.num_batches_tracked = count
        buffers = dict(self.model.named_buffers())
        self.buffers = [buffers[name] for name in program.buffers]
        self.lr, self.losses = torch.zeros((), device=device), torch.zeros((), dtype=torch.float64, device=device)
        parts = program.parts
        self.positions, self.keys = (torch.zeros(len(parts), dtype=torch.int64, device=device) for _ in range(2))
        # The orders of an even and an odd epoch: data position n is entry n % 2N, also where a batch straddles two.
        self.orders = [torch.zeros(2 * part.examples, dtype=torch.int64, device=device) for part in parts]
        self.data: Sequence[Tensor] | None = program.data
        self.feed: Feed | None = None
        if program.source is not None:  # of a step, n is example n % N of those that are put there
            self.orders = [torch.arange(part.batch_size * program.recipe.accumulation, device=device) for part in parts]
        self.stop_losses = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.draws = torch.Generator(device) if program.probe.draws else None
        self._ahead: deque[torch.cuda.Event] = deque()
        self._arrival: torch.cuda.Event | None = None
        self._replays: list[Callable[[], None]] = []
        if self.data is not None:
            self._capture()

    def step(self, part: int) -> None:
        """One training step, in device memory alone."""
        program, accumulation = self.program, self.program.recipe.accumulation
        # New leaves on the same memory: a parameter's own node in the autograd graph may remember the stream of an
        # earlier use, and the capture would then wait for a stream outside of it (pytorch#180090).
        leaves = [parameter.detach().requires_grad_(parameter.requires_grad) for parameter in self.parameters]
        reached = [name in program.probe.reached for name in program.parameters]
        sums: list[Tensor | None] = []
        for number in range(accumulation):
            position = self.positions[part] + number if number else self.positions[part]
            batch = program.batch(part, self.data, self.orders[part], position, self.keys[part])
            loss = program.loss(leaves, self.buffers, *batch)
            found = iter(torch.autograd.grad(loss, list(compress(leaves, reached))))
            with torch.no_grad():
                clipped = self.update.clipped([next(found) if has else None for has in reached])
                sums = [_sum(a, b) for a, b in zip(sums, clipped, strict=True)] if sums else list(clipped)
            self.losses += loss.detach()
        with torch.no_grad():
            self.update.apply(sums, self.lr)
            self.batches_seen += accumulation
            self.positions[part] += accumulation

    def _capture(self) -> None:
        """A graph of the step for each part of the data; they share memory, since they never run at once."""
        self._replays = [partial(self.step, part) for part in range(len(self.program.parts))]
        if (stream := self.stream) is None:
            return
        graphs: list[torch.cuda.CUDAGraph] = []
        with kernels(search=True), quiet_compilation(), self._drawing():
            for step in self._replays:
                step()  # compiles, and measures kernels, on the ordinary stream
                torch.cuda.synchronize(self.program.device)
                with torch.cuda.stream(stream):  # allocates what belongs to the stream (cuBLAS workspaces)
                    for _ in range(3):
                        step()
                graph = torch.cuda.CUDAGraph()
                pool = graphs[0].pool() if graphs else None
                # The backward pass is launched by autograd's own thread.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    step()
                torch.cuda.synchronize(self.program.device)
                graphs.append(graph)
        self._replays = [graph.replay for graph in graphs]

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Inside, torch's generator of the device is this place's own: graphs replayed side by side share no seed."""
        if self.draws is None or self.stream is None:
            yield
            return
        shared = torch.cuda.default_generators[self.draws.device.index or torch.cuda.current_device()]
        before = shared.graphsafe_get_state()
        shared.graphsafe_set_state(self.draws)
        try:
            yield
        finally:
            shared.graphsafe_set_state(before)

    def takes(self, recipe: Recipe) -> bool:
        """Whether networks of a recipe have the shapes of this place."""
        return recipe == self.program.recipe

    def start(self, run: Run) -> None:
        """Take a run: copy its state into the static buffers."""
        state = run.state
        self._seed, (self._prunings, self._first) = state.seed, state.position
        self._rates = (rate for rate, steps in run.lr for _ in range(steps))
        self._rate = math.nan
        self._stops = deque(sorted({step for step in run.stops if 0 < step < total(run.lr)} | {total(run.lr)}))
        self._done, self._since, self._due = 0, 0, run.due
        recipe = self.program.recipe
        self._turns = recipe.turns(state.seed, recipe.first_batch(state.position))
        self._numbers = [-1 for _ in self.program.parts]
        self._epochs = [[-1, -1] for _ in self.program.parts]
        self._ahead.clear()
        self._at_stop, self._arrival = False, None
        self._waited = 0.0
        self._waits_since: float | None = None  # with nothing else to do
        self._has_first = False  # the examples of the first step are in place
        if self.program.source is not None:
            self._begin_feed(self.program.source, total(run.lr))
        self.resume()  # the state may just have been made on the caller's stream
        with torch.cuda.stream(self.stream), torch.no_grad():
            self.model.load_state_dict(dict(state.model))
            self.update.load(state.slots, run.mask)
            if run.mask is not None:
                run.mask.apply(self.model)  # also finds a mask that is for another model
            self.losses.zero_()
            for part, key in enumerate(self.keys):
                key.fill_(recipe.key(self._seed, self._prunings, part))

    def launch(self) -> bool:
        """Queue one step, unless the next stop is reached or enough are queued; whether it did."""
        if self._at_stop or self._is_far_ahead() or not self._has_data():
            return False
        with torch.cuda.stream(self.stream):
            part = self._feed()
            if self.draws is None:
                self._replays[part]()
            else:
                self._replay_drawing(part, fold(self._seed, self._prunings, self._first + self._done))
            self._done += 1
            if self.stream is not None:
                self._ahead.append(self.stream.record_event())
            if self._done == self._stops[0] or self._due():
                self._at_stop = True
                self.stop_losses.copy_(self.losses, non_blocking=True)
                self.losses.zero_()
                self._arrival = self.stream.record_event() if self.stream is not None else None
        return True

    def arrived(self) -> bool:
        """Whether the next stop has been reached."""
        return self._at_stop and (self._arrival is None or self._arrival.query())  # type: ignore[no-untyped-call]

    def report(self) -> tuple[State | Diverged, bool]:
        """What there is to see at the stop, and whether the run has ended; valid until `resume` or `start`."""
        mean, waited = self.stop_losses.item() / (self._done - self._since), self._waited
        self._since, self._at_stop, self._arrival, self._waited = self._done, False, None, 0.0
        position = Position(self._prunings, self._first + self._done)
        if self._done == self._stops[0]:
            self._stops.popleft()
        if self.feed is not None and not (self._stops and math.isfinite(mean)):
            self.feed.close()
        if not math.isfinite(mean):
            return Diverged(position.steps, mean), True
        return State(self.model.state_dict(), self.update.slots(), self._seed, position, mean, waited), not self._stops

    def resume(self) -> None:
        """Go on only after what the caller has queued on its own stream, e.g. a clone of the view."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.program.device))

    def evaluate(self) -> Scores:
        """The recipe's own evaluation of the weights where they are."""
        position = Position(self._prunings, self._first + self._done)
        with torch.cuda.stream(self.stream), kernels(search=False):
            scores = scored(self.program.recipe, self.model, self._seed, position, self.program.device)
        self.model.train()
        return scores

    def _is_far_ahead(self) -> bool:
        while self._ahead and self._ahead[0].query():  # type: ignore[no-untyped-call]
            self._ahead.popleft()
        return len(self._ahead) >= _LEAD

    def _replay_drawing(self, part: int, seed: int) -> None:
        """A step whose draws are a function of the seed."""
        if self.stream is None or self.draws is None:
            with own_draws(self.program.device, seed):
                self._replays[part]()
        else:
            self.draws.manual_seed(seed)
            self._replays[part]()

    def _begin_feed(self, source: Source, steps: int) -> None:
        """Begin to decode what a run needs; its first examples are put where steps read them.

        A larger step than any before needs more memory there, and a new graph. It is known beforehand: the order and
        the sizes of the examples are.
        """
        if self.feed is not None:
            self.feed.close()
        recipe, device, before = self.program.recipe, self.program.device, seconds_waited()
        position = recipe.first_batch(Position(self._prunings, self._first))
        chosen = recipe.chosen(self._seed, position, at_once=recipe.accumulation)
        self.feed = Feed(source, islice(chosen, steps), device)
        first = next(self.feed)
        self._waited += seconds_waited() - before
        most = recipe.largest(source, self._seed, position, steps, device)
        if is_larger := self.data is None or len(self.data[0]) < most:
            room = torch.zeros(-(-most // _ROUND) * _ROUND, dtype=torch.uint8, device=device)
            self.data = [room, *map(torch.empty_like, first[1:])]
        self._put(first)
        self._has_first = True
        if is_larger:
            self._capture()

    def _put(self, examples: Sequence[Tensor]) -> None:
        """Put the examples of a step where it reads them."""
        assert self.data is not None  # as made when the feed began
        for there, each in zip(self.data, examples, strict=True):
            there[: len(each)].copy_(each)

    def _has_data(self) -> bool:
        """Whether the examples of the next step are decoded; while the device has nothing else to do, it waits."""
        if self.feed is None or self._has_first or self.feed.is_ready():
            if self._waits_since is not None:
                self._waited += time.perf_counter() - self._waits_since
                self._waits_since = None
            return True
        if self._waits_since is None and not self._ahead:
            self._waits_since = time.perf_counter()
        return False

    def _feed(self) -> int:
        """Put into device memory what the next step needs and has changed; says which part its batch comes from."""
        recipe, device = self.program.recipe, self.program.device
        if (rate := next(self._rates)) != self._rate:
            self._rate = rate
            self.lr.fill_(rate)
        part, number = next(self._turns)
        for _ in range(recipe.accumulation - 1):
            next(self._turns)
        if self._numbers[part] != number:
            self.positions[part] = number
        self._numbers[part] = number + recipe.accumulation
        if self.feed is not None:
            if not self._has_first:
                self._put(next(self.feed))
            self._has_first = False
            return part
        for epoch in recipe.epochs_of(part, number, recipe.accumulation):
            if self._epochs[part][epoch % 2] != epoch:
                self._epochs[part][epoch % 2] = epoch
                half = self.orders[part].view(2, -1)[epoch % 2]
                half.copy_(recipe.order(self._seed, self._prunings, epoch, part, device))
        return part


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b
