"""All that a user's training loop changes, taken at one moment and put back.

A snapshot holds the model, the optimizer, the schedulers, whatever else has a `state_dict` (an EMA, a GradScaler) and
the random states of Python, numpy, torch and the loop's own generators. Random states are put back when a run resumes,
never when it rewinds: a level draws on.
"""

import io
import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rewound.errors import InputError, few, shown
from rewound.loops import ranks
from rewound.loops.schedulers import Scheduler
from rewound.pruning.mask import plain_name

StateDict = dict[str, object]


class RandomStates(TypedDict):
    """All that one process draws from."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: Tensor
    cuda: list[Tensor]
    generators: NotRequired[list[Tensor]]  # missing in earlier files


class Content(TypedDict):
    """What is taken of the subjects."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedulers: list[StateDict]
    also: list[StateDict]
    random: list[RandomStates]
    """By rank."""


class Stateful(Protocol):
    """Anything that can be saved and restored."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state: StateDict, /) -> object: ...


@dataclass(frozen=True)
class Subjects:
    """What is trained, and what is moved along with it."""

    model: nn.Module
    optimizer: Optimizer
    schedulers: Sequence[Scheduler] = ()
    also: Sequence[Stateful] = ()
    generators: Sequence[torch.Generator] = ()

    def taken(self) -> Content:
        """The present state of everything; tensors are the live ones, to be written before training goes on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "also": [thing.state_dict() for thing in self.also],
            "random": ranks.gathered(_random_states(self.generators)),
        }

    def not_finite(self) -> list[str]:
        """The names of what training has made NaN or infinite: trained parameters, statistics of normalisation."""
        trained = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        looked_at: list[tuple[str, Tensor]] = [
            (name, p) for name, p in self.model.named_parameters() if id(p) in trained
        ]
        # Of other buffers nothing is known: a causal mask is infinite, and an observer begins so.
        for prefix, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                looked_at += module.named_buffers(prefix)
        return [plain_name(name) for name, tensor in looked_at if not bool(tensor.detach().isfinite().all())]

    def rewind(self, content: Content) -> None:
        """Put back what belongs to the weights (law 4): parameters, buffers, optimizer slots, EMA and scaler."""
        self.model.load_state_dict(content["model"])
        self.rewind_optimizer(content["optimizer"])
        self.restore_also(content["also"])

    def restore_also(self, states: Sequence[StateDict]) -> None:
        """Put back what the loop keeps beside the model."""
        if states and len(states) != len(self.also):
            raise InputError(
                f"this run was made with {len(states)} objects in also, not {len(self.also)}; give the same"
            )
        for thing, state in zip(self.also, states, strict=False):
            thing.load_state_dict(state)

    def rewind_optimizer(self, state: dict[str, Any]) -> None:
        """Put back the optimizer; hyperparameters that are tensors stay the same tensors."""
        if (before := _sizes(state["param_groups"])) != (now := _sizes(self.optimizer.param_groups)):
            raise InputError(
                f"cannot rewind the optimizer: its groups have {now} parameters and had {before} when the weights were "
                "saved; give it all of them before the first epoch"
            )
        tensors = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state)
        for group, old in zip(self.optimizer.param_groups, tensors, strict=True):
            for name, held in old.items():
                if isinstance(held, Tensor):
                    group[name] = held.copy_(torch.as_tensor(group[name]))

    def resume(self, content: Content) -> None:
        """Put back everything, as if the process had never ended."""
        self._check_is_of(content)
        self.rewind(content)
        for scheduler, state in zip(self.schedulers, content["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        states = content["random"]
        if ranks.rank() < len(states):  # a rank that was not there before goes on with its own numbers
            _set_random_states(states[ranks.rank()], self.generators)

    def _check_is_of(self, content: Content) -> None:
        """An error that names what a snapshot was taken of, where that is not what is here."""
        made, here = _shapes(content["model"]), _shapes(self.model.state_dict())
        if wrong := [name for name in {**made, **here} if made.get(name) != here.get(name)]:
            raise InputError(
                f"this run was made with another model: names or shapes differ for {few(wrong)}; give the same, or "
                "another folder"
            )
        groups, generators = content["optimizer"]["param_groups"], content["random"][0].get("generators", [])
        for what, before, now in (
            ("parameters in the optimizer's groups", _sizes(groups), _sizes(self.optimizer.param_groups)),
            ("schedulers", len(content["schedulers"]), len(self.schedulers)),
            ("objects in also", len(content["also"]), len(self.also)),
            ("generators in also", len(generators), len(self.generators)),
        ):
            if before != now:
                raise InputError(f"this run was made with {before} {what}, not {now}; give the same, or another folder")

    def check(self) -> None:
        """An error that names what could not be read again without running its code."""
        for thing in (self.optimizer, *self.schedulers, *(t for t in self.also if not isinstance(t, nn.Module))):
            if isinstance(thing, type) or not hasattr(thing, "state_dict"):
                raise InputError(
                    f"{shown(thing)} has no state to be saved; give schedulers, and in also torch.Generators and what "
                    "has a state_dict"
                )
            buffer = io.BytesIO()
            try:
                torch.save(thing.state_dict(), buffer)
                buffer.seek(0)
                torch.load(buffer, weights_only=True)
            except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
                raise InputError(
                    f"the state of {type(thing).__name__} is not plain data, so it could not be read back safely; "
                    "let its state_dict hold only tensors, numbers, texts and containers of them"
                ) from error


def _shapes(state: Mapping[str, object]) -> dict[str, object]:
    return {name: getattr(tensor, "shape", "no tensor") for name, tensor in state.items()}


def _sizes(groups: Sequence[Mapping[str, Sequence[object]]]) -> str:
    return " + ".join(str(len(group["params"])) for group in groups)


def _random_states(generators: Sequence[torch.Generator]) -> RandomStates:
    shared = np.random.get_state(legacy=False)  # noqa: NPY002  # the generator that loops and data sets share
    return {
        "python": random.getstate(),
        "numpy": {**shared, "state": {**shared["state"], "key": shared["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "generators": [generator.get_state() for generator in generators],
    }


def _set_random_states(states: RandomStates, generators: Sequence[torch.Generator]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
    for generator, state in zip(generators, states.get("generators", []), strict=True):
        generator.set_state(state)
