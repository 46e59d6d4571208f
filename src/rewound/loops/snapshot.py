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
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rewound.errors import InputError, few, shown
from rewound.loops import ranks
from rewound.loops.schedulers import Scheduler

Content = dict[str, object]


class Stateful(Protocol):
    """Anything that can be saved and restored."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: dict[str, object], /) -> object: ...


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

    def rewind(self, content: Content) -> None:
        """Put back what belongs to the weights (law 4): parameters, buffers, optimizer slots, EMA and scaler."""
        self.model.load_state_dict(cast(dict[str, Tensor], content["model"]))
        self.rewind_optimizer(content)
        self.restore_also(content)

    def restore_also(self, content: Content) -> None:
        """Put back what the loop keeps beside the model."""
        states = cast(list[Content], content.get("also", []))  # a trainer's checkpoint had none before
        if states and len(states) != len(self.also):
            raise InputError(
                f"this run was made with {len(states)} objects in also, not {len(self.also)}; give the same"
            )
        for thing, state in zip(self.also, states, strict=False):
            thing.load_state_dict(state)

    def rewind_optimizer(self, content: Content) -> None:
        """Put back the optimizer; hyperparameters that are tensors stay the same tensors."""
        groups = cast(dict[str, list[dict[str, list[object]]]], content["optimizer"])["param_groups"]
        if (before := _sizes(groups)) != (now := _sizes(self.optimizer.param_groups)):
            raise InputError(
                f"cannot rewind the optimizer from {now} parameters in its groups to {before}: groups that join or "
                "grow on the way were not there; give it all of them before the first epoch"
            )
        tensors = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(cast(Content, content["optimizer"]))
        for group, old in zip(self.optimizer.param_groups, tensors, strict=True):
            for name, held in old.items():
                if isinstance(held, Tensor):
                    group[name] = held.copy_(torch.as_tensor(group[name]))

    def resume(self, content: Content) -> None:
        """Put back everything, as if the process had never ended."""
        self._check_is_of(content)
        self.rewind(content)
        for scheduler, state in zip(self.schedulers, cast(list[Content], content["schedulers"]), strict=True):
            scheduler.load_state_dict(state)
        states = cast(list[Content], content["random"])
        if ranks.rank() < len(states):  # a rank that was not there before goes on with its own numbers
            _set_random_states(states[ranks.rank()], self.generators)

    def _check_is_of(self, content: Content) -> None:
        """An error that names what a snapshot was taken of, where that is not what is here."""
        made, here = (_shapes(cast(Content, state)) for state in (content["model"], self.model.state_dict()))
        if wrong := [name for name in {**made, **here} if made.get(name) != here.get(name)]:
            raise InputError(
                f"this run was made with another model: names or shapes differ for {few(wrong)}; give the same, or "
                "another folder"
            )
        groups = cast(dict[str, list[dict[str, list[object]]]], content["optimizer"])["param_groups"]
        for what, before, now in (
            ("parameters in the optimizer's groups", _sizes(groups), _sizes(self.optimizer.param_groups)),
            ("schedulers", len(cast(list[object], content["schedulers"])), len(self.schedulers)),
            ("objects in also", len(cast(list[object], content["also"])), len(self.also)),
            ("generators in also", len(_generators(cast(list[Content], content["random"])[0])), len(self.generators)),
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
                    f"the state of {type(thing).__name__} is not plain data, so that it could be read again safely; "
                    "give its state_dict only tensors, numbers, texts and containers of them"
                ) from error


def _shapes(state: Content) -> dict[str, object]:
    return {name: getattr(tensor, "shape", "no tensor") for name, tensor in state.items()}


def _sizes(groups: Sequence[Mapping[str, Sequence[object]]]) -> str:
    return " + ".join(str(len(group["params"])) for group in groups)


def _random_states(generators: Sequence[torch.Generator]) -> Content:
    shared = np.random.get_state(legacy=False)  # noqa: NPY002  # the generator that loops and data sets share
    return {
        "python": random.getstate(),
        "numpy": {**shared, "state": {**shared["state"], "key": shared["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "generators": [generator.get_state() for generator in generators],
    }


def _generators(states: Mapping[str, object]) -> list[Tensor]:
    return cast(list[Tensor], states.get("generators", []))  # there were none before they could be given


def _set_random_states(states: Mapping[str, object], generators: Sequence[torch.Generator]) -> None:
    random.setstate(cast(tuple[object, ...], states["python"]))
    np.random.set_state(cast(dict[str, object], states["numpy"]))  # noqa: NPY002
    torch.set_rng_state(cast(Tensor, states["torch"]))
    for device, state in enumerate(cast(list[Tensor], states["cuda"])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
    for generator, state in zip(generators, _generators(states), strict=True):
        generator.set_state(state)
