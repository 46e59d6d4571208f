"""Train^t(W, m, g) on static buffers, its step captured as one CUDA graph.

A place holds the tensors of one run at a time, at fixed addresses, and the graph of one step over them. What changes
from step to step (learning rate, data position, keys, the order of the epoch) lives in device memory, so that one graph
serves every run that ever takes the place, and the host only replays it. `Place.step` is plain tensor code: on the CPU,
where nothing is captured, it is the same step.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from rewound.errors import Diverged
from rewound.fleets.captured import Program, counts, kernels, quiet_compilation
from rewound.pruning.mask import Mask
from rewound.randomness import fold, permutation
from rewound.recipe import Position, Scores
from rewound.schedule import Segment, total
from rewound.training import State, scored

_LEAD = 32  # how many steps the host runs ahead: work for a pause of 0.1 s in a fleet, in bounded memory
_SLOT = "momentum_buffer"  # torch.optim.SGD's name for it


@dataclass(frozen=True)
class Run:
    """One Train^t(W, m, g) to do: `stops` are counted in steps from the start, the last step is always one."""

    state: State
    mask: Mask | None
    lr: Sequence[Segment]
    stops: Collection[int] = ()


class Place:
    """Room for one run at a time: static buffers, the graph of one step over them, and the stream it is replayed on."""

    def __init__(self, program: Program) -> None:
        self.program, device = program, program.device
        self.model = program.model()
        self.weights, self.momenta, self.gradient = (torch.zeros(program.size, device=device) for _ in range(3))
        self.mask = torch.ones(program.size, device=device)
        parameters = dict(self.model.named_parameters())
        for span in program.spans:
            view = span.of(self.weights)
            view.copy_(parameters[span.name].detach())
            parameters[span.name].data = view
        self.parameters = [parameters[span.name] for span in program.spans]
        counting = [module for module in self.model.modules() if counts(module)]
        self.batches_seen = torch.zeros(len(counting), dtype=torch.int64, device=device)
        for module, count in zip(counting, self.batches_seen, strict=True):
            module.num_batches_tracked = count
        buffers = dict(self.model.named_buffers())
        self.buffers = [buffers[name] for name in program.buffers]
        self.lr, self.losses = (torch.zeros((), dtype=kind, device=device) for kind in (torch.float32, torch.float64))
        self.position, self.key = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        # The orders of an even and an odd epoch: data position n is entry n % 2N, also where a batch straddles two.
        self.orders = torch.zeros(2 * program.recipe.train_size, dtype=torch.int64, device=device)
        self.stop_losses = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ahead: deque[torch.cuda.Event] = deque()
        self._arrival: torch.cuda.Event | None = None
        self._replay = self.step if self.stream is None else self._captured(self.stream)

    def step(self) -> None:
        """One training step, in device memory alone."""
        program = self.program
        # New leaves on the same memory: a parameter's own node in the autograd graph may remember the stream of an
        # earlier use, and the capture would then wait for a stream outside of it (pytorch#180090).
        leaves = [parameter.detach().requires_grad_() for parameter in self.parameters]
        loss = program.loss(leaves, self.buffers, *program.batch(self.orders, self.position, self.key))
        gradients = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            torch.cat(program.flattened(gradients), out=self.gradient)
            program.update(self.weights, self.momenta, self.mask, self.gradient, self.lr)
            self.losses += loss
            self.batches_seen += 1
            self.position += 1

    def _captured(self, stream: torch.cuda.Stream) -> Callable[[], None]:
        with kernels(search=True), quiet_compilation():
            self.step()  # compiles, and measures kernels, on the ordinary stream
            torch.cuda.synchronize(self.program.device)
            with torch.cuda.stream(stream):  # allocates what belongs to the stream (cuBLAS workspaces)
                for _ in range(3):
                    self.step()
            graph = torch.cuda.CUDAGraph()
            # The backward pass is launched by autograd's own thread.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.step()
            torch.cuda.synchronize(self.program.device)
        return graph.replay

    def start(self, run: Run) -> None:
        """Take a run: copy its state into the static buffers."""
        state = run.state
        self._seed, (self._prunings, self._first) = state.seed, state.position
        self._rates = (rate for rate, steps in run.lr for _ in range(steps))
        self._rate = math.nan
        self._stops = deque(sorted({step for step in run.stops if 0 < step < total(run.lr)} | {total(run.lr)}))
        self._done = self._since = 0
        self._epochs = [-1, -1]
        self._ahead.clear()
        self._at_stop, self._arrival = False, None
        self.resume()  # the state may just have been made on the caller's stream
        with torch.cuda.stream(self.stream), torch.no_grad():
            self.model.load_state_dict(dict(state.model))
            self.momenta.zero_()
            self.mask.fill_(1)
            for span in self.program.spans:
                if (slot := state.slots.get(f"{_SLOT}/{span.name}")) is not None:
                    span.of(self.momenta).copy_(slot)
                if run.mask is not None and span.name in run.mask:
                    span.of(self.mask).copy_(run.mask[span.name])
            if run.mask is not None:
                run.mask.apply(self.model)  # also finds a mask that is for another model
            self.momenta.masked_fill_(self.mask == 0, 0)
            self.losses.zero_()
            self.position.fill_(self._first)
            self.key.fill_(fold(self._seed, self._prunings, "augmentation"))

    def launch(self) -> bool:
        """Queue one step, unless the next stop is reached or enough are queued; whether it did."""
        if self._at_stop or self._is_far_ahead():
            return False
        with torch.cuda.stream(self.stream):
            self._feed()
            self._replay()
            self._done += 1
            if self.stream is not None:
                self._ahead.append(self.stream.record_event())
            if self._done == self._stops[0]:
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
        stop = self._stops.popleft()
        mean = self.stop_losses.item() / (stop - self._since)
        self._since, self._at_stop, self._arrival = stop, False, None
        position = Position(self._prunings, self._first + stop)
        if not math.isfinite(mean):
            return Diverged(position.steps, mean), True
        slots = {f"{_SLOT}/{span.name}": span.of(self.momenta) for span in self.program.spans}
        held = slots if self.program.momentum else {}
        return State(self.model.state_dict(), held, self._seed, position, mean), not self._stops

    def resume(self) -> None:
        """Go on only after what the caller has queued on its own stream, e.g. a clone of the view."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.program.device))

    def evaluate(self) -> Scores:
        """The recipe's own evaluation of the weights where they are."""
        with torch.cuda.stream(self.stream), kernels(search=False):
            scores = scored(self.program.recipe, self.model)
        self.model.train()
        return scores

    def _is_far_ahead(self) -> bool:
        while self._ahead and self._ahead[0].query():  # type: ignore[no-untyped-call]
            self._ahead.popleft()
        return len(self._ahead) >= _LEAD

    def _feed(self) -> None:
        """Put into device memory what the next step needs and the previous one had otherwise."""
        recipe = self.program.recipe
        if (rate := next(self._rates)) != self._rate:
            self._rate = rate
            self.lr.fill_(rate)
        begin = (self._first + self._done) * recipe.batch_size
        for epoch in (begin // recipe.train_size, (begin + recipe.batch_size - 1) // recipe.train_size):
            if self._epochs[epoch % 2] != epoch:
                self._epochs[epoch % 2] = epoch
                key = fold(self._seed, self._prunings, "order", epoch)
                half = self.orders.view(2, -1)[epoch % 2]
                half.copy_(permutation(key, recipe.train_size, self.program.device))
