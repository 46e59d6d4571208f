"""Train^t(W, m, g): the paper's one function, and the state it maps to the next.

`train(recipe, W, m, lr=S.segments(g, g + t))` trains the weights W under the mask m for t steps along the schedule S
from step g. Every retraining technique is one call of it; fine-tuning, rewinding and training from scratch differ only
in which W and which g they pass (see `technique`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import Diverged, InputError, check_kind, shown
from rewound.foundations.randomness import fold, own_draws
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Segment, total
from rewound.tasks.feed import seconds_waited
from rewound.tasks.parallel import Together
from rewound.tasks.recipe import Batch, Position, Recipe, Scores, changed_fields, check_recipe

_COUNTS = ("step", "mu_product")
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False, repr=False)
class State:
    """Everything that training changes: W in the paper's sense, with what belongs to it (law 4)."""

    model: Mapping[str, Tensor]
    """Parameters and buffers, by the model's own names."""
    slots: Mapping[str, Tensor]
    """Optimizer state by name ("momentum_buffer/conv1.weight"), never by index."""
    seed: int
    """The trial's seed: with `position`, the source of all randomness."""
    position: Position
    loss: float = math.nan
    """The mean training loss since the previous stop; for information, not part of the state."""
    waited: float = 0.0
    """Seconds that training has waited for data since the previous stop, of several processes the one that waited
    longest; for information, too."""

    def __repr__(self) -> str:
        where = f"prunings {self.position.prunings}, steps {self.position.steps:,}"
        return f"State({len(self.model)} tensors, {len(self.slots)} slots, seed {self.seed}, {where})"

    def clone(self) -> "State":
        """A copy that outlives the next training step."""
        copies = [{name: tensor.detach().clone() for name, tensor in part.items()} for part in (self.model, self.slots)]
        return replace(self, model=copies[0], slots=copies[1])

    def pruned(self, mask: Mask, prunings: int, seed: int, *, steps: int = 0) -> "State":
        """W (.) m, at the position at which training goes on: the start of a new level, or so many steps after it.

        Slots that belong to a pruned weight are masked with it.
        """

        def masked(name: str, tensor: Tensor) -> Tensor:
            kept = mask.get(name)
            if kept is None or kept.shape != tensor.shape:  # a step count, or the factors of Adafactor
                return tensor
            return tensor.masked_fill(~kept.to(tensor.device), 0)

        model = {name: masked(name, tensor) for name, tensor in self.model.items()}
        slots = {name: masked(name.split("/", 1)[1], tensor) for name, tensor in self.slots.items()}
        return State(model, slots, seed, Position(prunings, steps))


def never() -> bool:
    """No stops but the given ones."""
    return False


class Training(Protocol):
    """What trains as `train` does."""

    def __call__(
        self,
        recipe: Recipe,
        state: State,
        mask: Mask | None = None,
        *,
        lr: Sequence[Segment],
        stops: Collection[int] = (),
        due: Callable[[], bool] = never,
        device: torch.device | str = "cpu",
    ) -> Iterator[State]: ...


def begin(recipe: Recipe, seed: int, *, fresh: bool = False) -> State:
    """W_0, the initial weights of a trial; `fresh` draws other ones, as reinitialization does (law 6)."""
    check_recipe(recipe)
    with own_draws(_CPU):
        model = recipe.model(fold(seed, "reinitialization") if fresh else fold(seed, "initialization"))
    return State(model.state_dict(), {}, seed, Position(0, 0))


def train(
    recipe: Recipe,
    state: State,
    mask: Mask | None = None,
    *,
    lr: Sequence[Segment],
    stops: Collection[int] = (),
    due: Callable[[], bool] = never,
    device: torch.device | str = "cpu",
    processes: ProcessGroup | None = None,
) -> Iterator[State]:
    """Train^t(W, m, g): yields the state after each of `stops` steps, when `due` says so, and after the last step.

    What is yielded is a live view, valid until the next one is asked for; `.clone()` keeps it. torch's global
    generators are the caller's: a step draws from its own seed, and leaves them as they were.

    With `processes`, a process group of torch.distributed, all of them train this network together, each on its own
    device; every process makes the same call, and `due` is asked on rank 0. The group needs a backend for CPU tensors,
    too: `init_process_group("cpu:gloo,cuda:nccl")`.
    """
    check_kind("mask", mask, (Mask, NoneType), "make one with a rewound.Pruner")
    check_kind("lr", lr, Sequence, "give segments, as recipe.schedule.segments(0, 100)")
    device, together = torch.device(device), Together(processes)
    seed, (prunings, start) = state.seed, state.position
    together.check(recipe, _named(state, mask), seed, state.position, device)
    model, optimizer = restored(recipe, state, device)
    model.train()
    together.wrap(recipe, model)
    batches = together.batches(recipe, seed, recipe.first_batch(state.position), device)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    marks = {*stops, total(lr)}
    done, since, losses = 0, 0, torch.zeros((), dtype=torch.float64, device=device)
    waited = seconds_waited()
    with (mask or Mask({})).attached(model, optimizer):
        for rate, steps in lr:
            for group, factor in zip(optimizer.param_groups, recipe.rate_factors, strict=True):
                group["lr"] = rate * factor  # law 9
            for _ in range(steps):
                # Dropout and its like draw the same, whatever came before.
                with own_draws(device, fold(seed, prunings, start + done, *together.salt)):
                    optimizer.zero_grad()
                    for loss in _differentiate(recipe, model, trained, batches, together, done):
                        losses += loss
                    _take_step(optimizer, recipe)
                done += 1
                if together.decided(done in marks or due()):
                    loss_sum, longest = together.joined(losses, seconds_waited() - waited)
                    mean = loss_sum / (done - since)
                    if not math.isfinite(mean):
                        raise Diverged(start + done, mean)
                    view = viewed(model, optimizer, seed, Position(prunings, start + done), mean)
                    if done == total(lr):
                        together.prove(_named(view, mask))
                    with together.looked_at():
                        yield replace(view, waited=longest)
                    since, waited = done, seconds_waited()
                    losses.zero_()


def _named(state: State, mask: Mask | None) -> dict[str, Tensor]:
    """All tensors by name."""
    kept = {f"mask of {name}": tensor for name, tensor in (mask or {}).items()}
    return {**state.model, **state.slots, **kept}


def _differentiate(
    recipe: Recipe,
    model: nn.Module,
    trained: Sequence[Tensor],
    batches: Iterator[Batch],
    together: Together,
    done: int,
) -> list[Tensor]:
    """Compute the gradient of the next step, clipped; returns what each of its batches adds to the loss."""
    losses, clipped = list[Tensor](), _Clipped(trained, recipe.clip_norm / recipe.accumulation)
    for number in range(1, recipe.accumulation + 1):
        if (batch := next(batches, None)) is None:
            raise InputError(
                f"the batches of {recipe.label()} ended after {done:,} steps; a recipe's batches are endless: begin "
                "another pass over the data"
            )
        with together.averaging(now=recipe.clip_each or number == recipe.accumulation):
            loss = one_number(together.loss(recipe, model, batch), recipe) / recipe.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        if recipe.clip_each:
            clipped.add()
    if recipe.clip_each:
        clipped.restore()
    elif math.isfinite(recipe.clip_norm):
        nn.utils.clip_grad_norm_(trained, recipe.clip_norm)
    return losses


class _Clipped:
    """The sum of gradients that are clipped one by one."""

    def __init__(self, parameters: Sequence[Tensor], norm: float) -> None:
        self.parameters, self.norm = parameters, norm
        self.sums: dict[Tensor, Tensor] = {}

    def add(self) -> None:
        """Clip the gradients that are there, and take them away."""
        nn.utils.clip_grad_norm_(self.parameters, self.norm)
        for parameter in self.parameters:
            if parameter.grad is not None:
                before = self.sums.get(parameter)
                self.sums[parameter] = parameter.grad if before is None else before + parameter.grad
                parameter.grad = None

    def restore(self) -> None:
        """Put their sum where the optimizer takes gradients from."""
        for parameter, gradient in self.sums.items():
            parameter.grad = gradient


def one_number(loss: Tensor, recipe: Recipe) -> Tensor:
    """The loss, if it is a scalar."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise InputError(f"loss of recipe {recipe.label()} must return one number as a tensor, not {what}")
    return loss


def _take_step(optimizer: Optimizer, recipe: Recipe) -> None:
    try:
        optimizer.step()
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        given = " ".join([recipe.label(), *changed_fields(recipe)])
        raise InputError(
            f"a step of {given} needs a number that is too large for the type of its weights; "
            "lower the learning rate, momentum or weight decay"
        ) from error


def evaluate(recipe: Recipe, state: State, device: torch.device | str = "cpu") -> Scores:
    """The metric of a state on the validation and test data."""
    device = torch.device(device)
    with own_draws(device):
        model, _ = restored(recipe, state, device)
    return scored(recipe, model, state.seed, state.position, device)


def scored(recipe: Recipe, model: nn.Module, seed: int, position: Position, device: torch.device) -> Scores:
    """What the recipe's `evaluate` says of a model, if that is two numbers; its draws are a function of the state."""
    model.eval()
    with torch.no_grad(), own_draws(device, fold(seed, *position, "evaluation")):
        given = recipe.evaluate(model)
    try:
        val, test = map(float, given)
    except (TypeError, ValueError):
        raise InputError(
            f"evaluate of recipe {recipe.label()} must return two numbers, Scores(val, test), not {shown(given)}"
        ) from None
    others = given.others if isinstance(given, Scores) else {}
    return Scores(val, test, **{name: float(score) for name, score in others.items()})


def untrained_weights(recipe: Recipe, state: State, device: torch.device) -> list[str]:
    """The prunable weights that no gradient, or no optimizer, has reached on the way from W_0 to `state` (law 11).

    An optimizer has slots for what had a gradient, be it zero; where it keeps none, what is as it was at the start may
    have had none. A backward pass then decides.
    """
    touched = {name.split("/", 1)[1] for name in state.slots}
    first = {} if touched else begin(recipe, state.seed).model
    suspects = [
        name
        for name in recipe.shapes
        if (name not in touched if touched else torch.equal(state.model[name].cpu(), first[name].cpu()))
    ]
    if not suspects:
        return []
    device = torch.device(device)
    model, optimizer = restored(recipe, state, device)
    model.train()
    batch = next(recipe.batches(state.seed, recipe.first_batch(state.position), device))
    with own_draws(device, fold(state.seed, *state.position)):
        recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    weights = recipe.prunable(model)
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name in suspects if weights[name].grad is None or id(weights[name]) not in stepped]


def restored(recipe: Recipe, state: State, device: torch.device) -> tuple[nn.Module, Optimizer]:
    """The model and optimizer in that state, on that device."""
    check_recipe(recipe)
    check_kind("state", state, State, "give what rewound.begin or rewound.train made")
    model = loaded(recipe, state).to(device)
    optimizer = recipe.optimizer(model)
    slots: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in state.slots.items():
        slot, parameter = name.split("/", 1)
        slots[parameter][slot] = value
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        # torch keeps step counts on the CPU unless all of a step runs on the device.
        counts_on = device if group.get("capturable") or group.get("fused") else torch.device("cpu")
        for parameter in group["params"]:
            for slot, value in slots[names[parameter]].items():
                copy = value.clone().to(counts_on if slot in _COUNTS else device)
                optimizer.state[parameter][slot] = copy.item() if _was_python(copy) else copy
    return model, optimizer


def loaded(recipe: Recipe, state: State) -> nn.Module:
    """The model in that state."""
    with own_draws(_CPU):  # layers draw weights when they are made
        model = recipe.model(state.seed)
    model.load_state_dict(dict(state.model))
    return model


def viewed(model: nn.Module, optimizer: Optimizer, seed: int, position: Position, loss: float) -> State:
    """The live state of a model and its optimizer."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    slots = {
        f"{slot}/{names[parameter]}": value if isinstance(value, Tensor) else _number(value)
        for parameter, values in optimizer.state.items()
        for slot, value in values.items()
        if value is not None
    }
    return State(model.state_dict(), slots, seed, position, loss)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _was_python(value: Tensor) -> bool:
    # torch's own counts are tensors of the default type.
    return value.ndim == 0 and value.dtype in {torch.int64, torch.float64} - {torch.get_default_dtype()}
