"""The units of a network in a user's own loop, where a pruner removes those (patterns "unit" and "filter").

They are found from an example of what the loop calls its model with (`example`), once it is known: before the first
epoch where the script gives one, and after the first epoch (or step) otherwise, so that a network whose units cannot be
found, or a compression that they do not reach, is refused before the dense run is trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from rewound.foundations.errors import InputError, as_path
from rewound.loops.checkpoints import Folder
from rewound.loops.example import Example, FirstCall, read_example
from rewound.loops.optimizers import with_inner
from rewound.loops.progress import progress_of
from rewound.loops.slimming import Shrunk
from rewound.loops.snapshot import Stateful, Subjects
from rewound.method.flops import Profile, profile
from rewound.method.pruner import Pruner
from rewound.method.pruning.counts import parameter_count
from rewound.method.pruning.mask import Mask, first_names
from rewound.method.pruning.prunable import prunable_weights
from rewound.method.structure.groups import Units
from rewound.method.structure.kept import expanded, kept_indices, mask_of_dead_layers, shapes_of
from rewound.method.structure.slimming import Slim, slim_to
from rewound.method.structure.tracing import units
from rewound.states.tickets.rebuilding import described_example
from rewound.tasks import ranks

Parameters = Mapping[str, nn.Parameter]


@dataclass
class Structure:
    """The units of a run's network."""

    subjects: Subjects
    pruner: Pruner
    target: float
    """The density of the last level."""
    example: Example | None
    slims: bool
    """Whether the network is small in its levels."""
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    """Of the large network's parameters and buffers."""
    parameters: int = field(init=False)
    """How many the large network has."""
    counted: frozenset[str] = field(init=False)
    """The weights of the large network that a density counts; biases and normalisation of units are not."""
    _call: FirstCall | None = field(default=None, init=False)
    _waited: int = field(default=0, init=False)
    _shrunk: Shrunk | None = field(default=None, init=False)
    _checked_slots: bool = field(default=False, init=False)
    """Whether the optimizer had slots when it was checked that it can become small."""

    def __post_init__(self) -> None:
        model = self.subjects.model
        self.shapes, self.parameters = shapes_of(model), parameter_count(model)
        self.counted = frozenset(self.pruner.counted(prunable_weights(model), model))

    @cached_property
    def units(self) -> Units:
        """What lives or dies together in the network; an error where that is not known."""
        with _own_forward(self.subjects.model):
            return units(self.subjects.model, *self._here)

    @property
    def _here(self) -> Example:
        """The example on the device of the model."""
        if self.example is None:
            raise InputError("the units of this network are not known before its first pass; give example_inputs=")
        return self.example.on(next(self.subjects.model.parameters()).device)

    # The example

    def read(self, folder: Folder) -> None:
        """Take the example that the run kept before it was resumed, unless the script gives one."""
        if self.example is None and (content := folder.read_content("example")) is not None:
            self.example = read_example(content)

    def watch(self, until: ExitStack) -> None:
        """Note what the loop calls its model with, unless that is known."""
        if self.example is None:
            self._call = FirstCall(self.subjects.model, until)

    def learn(self, folder: Folder, run: str, patience: int) -> None:
        """Keep what was noted, and check what can be known from it; to be called after each epoch or step.

        After `patience` of them without a call of the model it is an error.
        """
        if self._call is not None:
            self._learn(self._call, folder, run, patience)
        if self.example is not None and self._shrunk is None and not self._checked_slots:
            self._check_small()

    def _learn(self, call: FirstCall, folder: Folder, run: str, patience: int) -> None:
        self._waited += 1
        found = ranks.from_first(call.example)
        if found is None and self._waited < patience:
            return
        if found is None:
            raise InputError(
                f"pattern {self.pruner.pattern!r} needs to know what the model takes, and the loop has not called the "
                "model itself; call that (its forward) instead of its parts, or give example_inputs= (and "
                "example_keywords=), a batch of what it takes"
            )
        call.close()
        self._call, self.example = None, found.short
        try:
            _ = self.units
        except InputError:
            if found.rows == self.example.rows:
                raise
            self.example = found  # its code needs a batch of that size
        self.check()
        content = {"inputs": list(self.example.inputs), "keywords": self.example.keywords}
        folder.write_content("example", content, run)

    def check(self) -> None:
        """An error if the network cannot become as small as asked for, by what is known before the dense run."""
        model = self.subjects.model
        shapes = {name: tuple(p.shape) for name, p in self.subjects.trained_parameters.items()}
        self.pruner.kept(shapes, self.target, model=model, groups=self.units, profile=self._profile)
        self._check_small(even_without_slots=True)

    def _check_small(self, *, even_without_slots: bool = False) -> None:
        """An error if the model, its optimizer or an average cannot become small; an optimizer has slots once it has
        stepped."""
        has_slots = any(each.state for each in with_inner(self.subjects.optimizer))
        if self.slims and (has_slots or even_without_slots):
            mask = self.pruned(self.subjects.trained_parameters, self.target, None)
            Shrunk(self.subjects, self._slim(mask)).check()
            self._checked_slots = has_slots

    # Small networks

    def fit(self, mask: Mask | None) -> None:
        """Give the subjects the shapes that a mask leaves, if the run is slim; None: those of the large network."""
        if self._shrunk is not None:
            self._shrunk.make(small=False)
            self._shrunk = None
        if self.slims and mask is not None:
            _ = self._profile  # that of the large network, also where a run is resumed in a level
            shrunk = Shrunk(self.subjects, self._slim(mask))
            shrunk.make(small=True)
            self._shrunk = shrunk

    def _slim(self, mask: Mask) -> Slim:
        kept = kept_indices(self.units, mask, self.shapes)
        with _own_forward(self.subjects.model):
            slim = slim_to(self.subjects.model, kept, *self._here)
        return replace(slim, mask=mask_of_dead_layers(mask, kept))

    def large_state(self, state: Mapping[str, Tensor], mask: Mask) -> dict[str, Tensor]:
        """A state of the small network that this mask leaves, in the shapes of the large one."""
        kept = kept_indices(self.units, mask, self.shapes) if self.slims else {}
        first = first_names({name: each for name, each in state.items() if isinstance(each, Tensor)})
        large = expanded({name: state[name] for name in state if first.get(name, name) == name}, kept, self.shapes)
        return {name: large[first.get(name, name)] for name in state}  # tied ones are one tensor, as they were

    @property
    def facts(self) -> dict[str, object]:
        """What a ticket needs to say, so that the small network can be built from the large one."""
        kind = None if self.example is None else described_example(*self.example)
        kind_of_model = type(self.subjects.model)
        model = f"{kind_of_model.__module__}:{kind_of_model.__qualname__}"
        return {"model": model} if kind is None else {"model": model, "example": kind}

    def held(self, mask: Mask) -> Mask:
        """What must stay attached of a mask: all of it, or in a small network what stands for layers that are gone."""
        return mask if self._shrunk is None else self._shrunk.slim.mask

    # Pruning

    def pruned(self, parameters: Parameters, density: float, before: Mask | None) -> Mask:
        """The mask without the units that go, of the parameters that may be pruned."""
        model, seed = self.subjects.model, torch.initial_seed()
        groups, costs = self.units, self._profile
        return self.pruner.prune(parameters, density, before, seed=seed, model=model, groups=groups, profile=costs)

    def flops_left(self, mask: Mask) -> float | None:
        """The fraction of the operations of a forward pass that a mask leaves, where the pruner counts those."""
        if self.pruner.of != "flops" or self.example is None:
            return None
        costs = self._profile
        assert costs is not None  # as the example is known
        return costs.total(mask) / costs.total()

    @cached_property
    def _profile(self) -> Profile | None:
        """What a pass of the large network costs, where the pruner counts that."""
        if self.pruner.of != "flops" or self.example is None:
            return None
        inputs, keywords = self._here
        with _own_forward(self.subjects.model):
            return profile(self.subjects.model, inputs, keywords=keywords)


@contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """Inside, a model is called as it is: for mixed precision, Accelerate puts another `forward` around its own.

    In a trace that is one operation, of which nobody knows what it ties.
    """
    wrapped, own = (vars(model).get(name) for name in ("forward", "_original_forward"))
    if wrapped is None or own is None:
        yield
        return
    vars(model)["forward"] = own
    try:
        yield
    finally:
        vars(model)["forward"] = wrapped


def made_small(
    model: nn.Module,
    also: Sequence[Stateful],
    pruner: Pruner,
    example: Example | None,
    folder: str | Path,
    saved: Mapping[str, object],
) -> Structure | None:
    """Give a model the shapes that it had when a trainer saved it, so that the trainer can load it; `fit` undoes that.

    It takes what `state_dict` of the run gave; None where the model was large.
    """
    if (mask := progress_of(saved).mask) is None:
        return None
    subjects = Subjects(model, torch.optim.SGD(model.parameters(), lr=0.0), also=also)
    structure = Structure(subjects, pruner, 1.0, example, slims=True)
    structure.read(Folder(as_path("checkpoint", folder)))
    structure.fit(mask)
    return structure
