"""All that a user's training loop changes, taken at one moment and put back.

A snapshot holds the model, the optimizer, the schedulers, whatever else has a `state_dict` (an EMA, a GradScaler) and
the random states of Python, numpy, torch and the loop's own generators. Random states are put back when a run resumes,
never when it rewinds: a level draws on.
"""

import io
import pickle
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, few, shown
from rewound.loops import ranks
from rewound.loops.joint import unsaved, with_held
from rewound.loops.schedulers import Scheduler
from rewound.method.pruning.mask import plain_name

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
    held: NotRequired[list[dict[str, Any]]]
    """Of the optimizers inside it that its own state leaves out; missing in earlier files."""
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
    is_compiled: bool = False

    def taken(self) -> Content:
        """The present state of everything; tensors are the live ones, to be written before training goes on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "held": [held.state_dict() for held in unsaved(self.optimizer)],
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
        self._rewind_optimizer(content)
        self.restore_also(content["also"])

    def restore_also(self, states: Sequence[StateDict]) -> None:
        """Put back what the loop keeps beside the model."""
        if states and len(states) != len(self.also):
            raise InputError(
                f"this run was made with {len(states)} objects in also, not {len(self.also)}; give the same"
            )
        for thing, state in zip(self.also, states, strict=False):
            thing.load_state_dict(state)

    def _rewind_optimizer(self, content: Content) -> None:
        """Put back the optimizer, and those inside it."""
        if (before := _sizes(content["optimizer"])) not in ("", now := _sizes(self.optimizer)):
            raise InputError(
                f"cannot rewind the optimizer: its groups have {now} parameters and had {before} when the weights were "
                "saved; give it all of them before the first epoch"
            )
        with _same_groups(self.optimizer):
            self.optimizer.load_state_dict(content["optimizer"])
            for held, state in zip(unsaved(self.optimizer), content.get("held", []), strict=False):
                held.load_state_dict(state)

    def resume(self, content: Content) -> None:
        """Put back everything, as if the process had never ended."""
        self._check_is_of(content)
        try:
            self._put_back(content)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise InputError(
                f"cannot put back what the run had come to: {type(error).__name__}: {error}; give the same objects as "
                "before, or another folder"
            ) from error

    def _put_back(self, content: Content) -> None:
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
        made_of, generators = _sizes(content["optimizer"]), content["random"][0].get("generators", [])
        for what, before, now in (
            ("parameters in the optimizer's groups", made_of, _sizes(self.optimizer) if made_of else ""),
            ("schedulers", len(content["schedulers"]), len(self.schedulers)),
            ("objects in also", len(content["also"]), len(self.also)),
            ("generators in also", len(generators), len(self.generators)),
        ):
            if before != now:
                raise InputError(f"this run was made with {before} {what}, not {now}; give the same, or another folder")

    def check(self) -> None:
        """An error that names what could not be read again without running its code."""
        optimizers = (self.optimizer, *unsaved(self.optimizer))
        for thing in (*optimizers, *self.schedulers, *(t for t in self.also if not isinstance(t, nn.Module))):
            if isinstance(thing, type) or not hasattr(thing, "state_dict"):
                raise InputError(
                    f"{shown(thing)} has no state to be saved; give schedulers, and in also torch.Generators and what "
                    "has a state_dict"
                )
            buffer = io.BytesIO()
            try:
                torch.save(_without_tensors(thing.state_dict()), buffer)
                buffer.seek(0)
                torch.load(buffer, weights_only=True)
            except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
                raise InputError(
                    f"the state of {type(thing).__name__} is not plain data, so it could not be read back safely; "
                    "let its state_dict hold only tensors, numbers, texts and containers of them"
                ) from error


def _without_tensors(state: object) -> object:
    """A state with a number for each plain tensor, which can be saved and takes memory."""
    if type(state) in (dict, OrderedDict):
        return type(state)((key, _without_tensors(value)) for key, value in state.items())  # type: ignore[attr-defined, call-arg]
    if type(state) in (list, tuple):
        return type(state)(map(_without_tensors, state))  # type: ignore[call-arg, call-overload]
    return 0 if type(state) in (Tensor, nn.Parameter) else state


def checked_content(content: object) -> Content:
    """What a file holds, if it has the parts of a snapshot, each of its kind; whoever wrote it."""
    for name in ("model", "optimizer"):
        _part(content, name, dict)
    held = ("held",) if "held" in _part({"": content}, "", dict) else ()
    for name in ("schedulers", "also", "random", *held):
        for entry in _part(content, name, list):
            if not isinstance(entry, dict):
                raise InputError(f"{name} holds a {type(entry).__name__}, not a dict")
    optimizer = _part(content, "optimizer", dict)
    if "param_groups" in optimizer:  # the rest, and in some kinds all of it, is the optimizer's own
        for group in _part(optimizer, "param_groups", list):
            _part(group, "params", list)
    if not _part(content, "random", list):
        raise InputError("random is empty")
    return cast(Content, content)


def _part(whole: object, name: str, kind: type) -> Any:
    """An entry of a dict, of this kind."""
    if not isinstance(whole, dict):
        raise InputError(f"a {type(whole).__name__} is where a dict belongs")
    if name not in whole:
        raise InputError(f"it has no {name}")
    if not isinstance(whole[name], kind):
        raise InputError(f"{name} is a {type(whole[name]).__name__}, not a {kind.__name__}")
    return whole[name]


def _shapes(state: Mapping[str, object]) -> dict[str, object]:
    return {name: getattr(tensor, "shape", "no tensor") for name, tensor in state.items()}


def _sizes(optimizer: Optimizer | Mapping[str, Any]) -> str:
    """How many parameters are in each group of an optimizer or of its state; some tell it nowhere in their state."""
    state = optimizer if isinstance(optimizer, Mapping) else {"param_groups": optimizer.param_groups}
    return " + ".join(str(len(group["params"])) for group in state.get("param_groups", []))


@contextmanager
def _same_groups(optimizer: Optimizer) -> Iterator[None]:
    """Inside, states may be loaded, and the groups stay the same objects, with the tensors that are in them.

    Loading a state makes new groups. Whoever shares the old ones, as SAM and Lookahead do with the optimizer inside
    them, and a scheduler through either, would go on with those.
    """
    before = [(each, each.param_groups, list(each.param_groups)) for each in with_held(optimizer)]
    tensors = [[{k: v for k, v in g.items() if isinstance(v, Tensor)} for g in groups] for _, _, groups in before]
    yield
    for (each, listed, groups), kept in zip(before, tensors, strict=True):
        for group, held, loaded in zip(groups, kept, each.param_groups, strict=True):
            values = {name: held[name].copy_(torch.as_tensor(v)) if name in held else v for name, v in loaded.items()}
            group.clear()
            group.update(values)
        listed[:] = groups
        if each.param_groups is not listed:
            each.param_groups = listed


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
