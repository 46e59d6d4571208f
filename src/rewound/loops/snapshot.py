"""A snapshot: all that a user's training loop changes, taken at one moment, kept in one file and put back.

It holds the states of the model, the optimizer, the schedulers, whatever else has a `state_dict` (an EMA, a GradScaler)
and the random states of Python, numpy, torch and the loop's own generators. Random states are put back when a run
resumes, but not when it rewinds: a level draws new numbers.

The file is one of torch's: a zip archive, which torch does not check when it reads it, so that a flipped bit would be
another weight. The archive's comment is therefore a seal, and `torch.load` still reads the file:

    {"run": "8f0c...", "file": "level-03", "sha256": "5b1e..."}

The checksum is over all bytes of the file, and the run and the name tell where the file belongs, so that a file that is
damaged or in the wrong place is found out before anything is read from it. SHA-256 because most processors have
instructions for it: it takes 0.6 s per GB, and torch 0.6 s to write the file. (BLAKE2b takes 1.2 s; all on one thread
of an AMD EPYC.)
"""

import errno
import hashlib
import io
import os
import pickle
import random
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NotRequired, Protocol, TypedDict, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, few, shown
from rewound.foundations.wholefiles import replacing
from rewound.loops.optimizers import Scheduler, members, unsaved_inner, with_inner
from rewound.method.pruning.mask import plain_name, plain_parameters
from rewound.method.pruning.prunable import prunable_weights
from rewound.tasks import ranks

StateDict = dict[str, object]


class RandomStates(TypedDict):
    """The states of all generators that one process draws from."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: Tensor
    cuda: list[Tensor]
    generators: NotRequired[list[Tensor]]  # missing in earlier files


class SavedStates(TypedDict):
    """The states of the subjects."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    held: NotRequired[list[dict[str, Any]]]
    """The states of optimizers inside it that its own state leaves out; missing in earlier files."""
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
    """The objects of a training loop whose states change: what is trained, and what is saved and rewound with it."""

    model: nn.Module
    optimizer: Optimizer
    schedulers: Sequence[Scheduler] = ()
    also: Sequence[Stateful] = ()
    generators: Sequence[torch.Generator] = ()
    is_compiled: bool = False

    @property
    def stepped_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the model that the optimizer has, by plain name."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in plain_parameters(self.model, tied=False).items() if id(p) in held}

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Those that the optimizer trains, since they are not frozen."""
        return {name: p for name, p in self.stepped_parameters.items() if p.requires_grad}

    @property
    def trained_weights(self) -> dict[str, nn.Parameter]:
        """The prunable weights that the optimizer trains: others would be pruned and never retrained."""
        trained = self.trained_parameters
        return {name: weight for name, weight in prunable_weights(self.model).items() if name in trained}

    def states(self) -> SavedStates:
        """The present states; the tensors are the live ones, to be written before training goes on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "held": [held.state_dict() for held in unsaved_inner(self.optimizer)],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "also": [thing.state_dict() for thing in self.also],
            "random": ranks.gathered(_random_states(self.generators)),
        }

    def not_finite(self) -> list[str]:
        """The names of trained parameters and statistics of normalisation that are NaN or infinite."""
        trained = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        checked: list[tuple[str, Tensor]] = [(name, p) for name, p in self.model.named_parameters() if id(p) in trained]
        # Other buffers may be infinite on purpose, as a causal mask is, and an observer of ranges at its start.
        for prefix, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                checked += module.named_buffers(prefix)
        return [plain_name(name) for name, tensor in checked if not bool(tensor.detach().isfinite().all())]

    def rewind(self, states: SavedStates) -> None:
        """Put back what belongs to the weights (law 4): parameters, buffers, optimizer slots, EMA and scaler."""
        self.model.load_state_dict(states["model"])
        self._rewind_optimizer(states)
        self.restore_also(states["also"])

    def restore_also(self, states: Sequence[StateDict]) -> None:
        """Put back the states of the objects in `also`."""
        if states and len(states) != len(self.also):
            raise InputError(
                f"this run was made with {len(states)} objects in also, not {len(self.also)}; give the same"
            )
        for thing, state in zip(self.also, states, strict=False):
            thing.load_state_dict(state)

    def _rewind_optimizer(self, states: SavedStates) -> None:
        """Put back the optimizer, and those inside it."""
        if (before := _sizes(states["optimizer"])) not in ("", now := _sizes(self.optimizer)):
            raise InputError(
                f"cannot rewind the optimizer: its groups have {now} parameters and had {before} when the weights were "
                "saved; give it all of them before the first epoch"
            )
        saved = states["optimizer"]
        loaded = list(zip(unsaved_inner(self.optimizer), states.get("held", []), strict=False))
        with _same_groups(self.optimizer):
            self.optimizer.load_state_dict(saved)
            for inner, state in loaded:
                inner.load_state_dict(state)
        if _types(states["model"]) == _types(self.model.state_dict()):
            for each, state in (*zip(members(self.optimizer), saved.get("members", [saved]), strict=True), *loaded):
                _put_back_types(each, state)

    def resume(self, states: SavedStates) -> None:
        """Put back everything, as if the process had never ended."""
        self._check_fits(states)
        try:
            self._put_back(states)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise InputError(
                f"cannot put back what the run had come to: {type(error).__name__}: {error}; give the same objects as "
                "before, or another folder"
            ) from error

    def _put_back(self, states: SavedStates) -> None:
        self.rewind(states)
        for scheduler, state in zip(self.schedulers, states["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if ranks.rank() < len(states["random"]):  # a rank that was not there before goes on with its own numbers
            _set_random_states(states["random"][ranks.rank()], self.generators)

    def _check_fits(self, states: SavedStates) -> None:
        """An error that names the first object whose saved state is not of what the script gives now."""
        saved, given = _shapes(states["model"]), _shapes(self.model.state_dict())
        if wrong := [name for name in {**saved, **given} if saved.get(name) != given.get(name)]:
            raise InputError(
                f"this run was made with another model: names or shapes differ for {few(wrong)}; give the same, or "
                "another folder"
            )
        sizes, generators = _sizes(states["optimizer"]), states["random"][0].get("generators", [])
        for what, before, now in (
            ("parameters in the optimizer's groups", sizes, _sizes(self.optimizer) if sizes else ""),
            ("schedulers", len(states["schedulers"]), len(self.schedulers)),
            ("objects in also", len(states["also"]), len(self.also)),
            ("generators in also", len(generators), len(self.generators)),
        ):
            if before != now:
                raise InputError(f"this run was made with {before} {what}, not {now}; give the same, or another folder")

    def check(self) -> None:
        """An error that names an object whose state cannot be saved, or not read again without running its code."""
        optimizers = (self.optimizer, *unsaved_inner(self.optimizer))
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
    """A state with 0 for each plain tensor: tensors can always be saved, and would take memory."""
    if type(state) in (dict, OrderedDict):
        return type(state)((key, _without_tensors(value)) for key, value in state.items())  # type: ignore[attr-defined, call-arg]
    if type(state) in (list, tuple):
        return type(state)(map(_without_tensors, state))  # type: ignore[call-arg, call-overload]
    return 0 if type(state) in (Tensor, nn.Parameter) else state


def checked_states(content: object) -> SavedStates:
    """What a file holds, if it has all parts of a snapshot, each of its type; anybody may have written the file."""
    for name in ("model", "optimizer"):
        _entry(content, name, dict)
    held = ("held",) if "held" in _entry({"": content}, "", dict) else ()
    for name in ("schedulers", "also", "random", *held):
        for entry in _entry(content, name, list):
            if not isinstance(entry, dict):
                raise InputError(f"{name} holds a {type(entry).__name__}, not a dict")
    optimizer = _entry(content, "optimizer", dict)
    if "param_groups" in optimizer:  # all else is up to the optimizer, and some have no groups in their state
        for group in _entry(optimizer, "param_groups", list):
            _entry(group, "params", list)
    if not _entry(content, "random", list):
        raise InputError("random is empty")
    return cast(SavedStates, content)


def _entry(whole: object, name: str, kind: type) -> Any:
    """An entry of a dict, if it is of this type."""
    if not isinstance(whole, dict):
        raise InputError(f"a {type(whole).__name__} is where a dict belongs")
    if name not in whole:
        raise InputError(f"it has no {name}")
    if not isinstance(whole[name], kind):
        raise InputError(f"{name} is a {type(whole[name]).__name__}, not a {kind.__name__}")
    return whole[name]


def _shapes(state: Mapping[str, object]) -> dict[str, object]:
    return {name: getattr(tensor, "shape", "no tensor") for name, tensor in state.items()}


def _types(state: Mapping[str, object]) -> dict[str, object]:
    return {name: getattr(tensor, "dtype", "no tensor") for name, tensor in state.items()}


def _put_back_types(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give the slots of an optimizer the types they were saved with.

    Torch's own `load_state_dict` casts each slot but "step" to the type of its parameter: NAdam's `mu_product`, the
    counters of an optimizer, and slots of float32 beside weights of bfloat16 would go on in another type.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for name, saved in state["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                optimizer.state[parameter][name] = saved.to(loaded.device, copy=True)


def _sizes(optimizer: Optimizer | Mapping[str, Any]) -> str:
    """How many parameters each group of an optimizer or of its state has; empty for a state without groups."""
    state = optimizer if isinstance(optimizer, Mapping) else {"param_groups": optimizer.param_groups}
    return " + ".join(str(len(group["params"])) for group in state.get("param_groups", []))


@contextmanager
def _same_groups(optimizer: Optimizer) -> Iterator[None]:
    """Inside, states may be loaded; the groups and the tensors in them stay the same objects.

    Loading a state makes new groups. SAM and Lookahead share their groups with the optimizer inside them, and so may a
    scheduler: they would go on with the old ones.
    """
    before = [(each, each.param_groups, list(each.param_groups)) for each in with_inner(optimizer)]
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
    shared = np.random.get_state(legacy=False)  # noqa: NPY002  # numpy's global generator, which many data sets use
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


# The file

_END = b"PK\x05\x06"  # begins the 22 bytes that end a zip archive; the last two are the length of its comment
_LONGEST = 1000  # the most bytes that such an end and a seal take
_SEAL = re.compile(rb'\{"run": "(\w*)", "file": "([\w-]*)", "sha256": "(\w*)"\}')


class Damaged(Exception):
    """A file whose bytes are not those that were written."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"cannot read {path}: it is damaged")
        self.path = path


class Seal(NamedTuple):
    """Where a file belongs: the run that wrote it, and the name it was written under."""

    run: str
    file: str

    def with_checksum(self, of_bytes: "hashlib._Hash") -> bytes:
        """The comment of an archive whose bytes have this hash."""
        checksum = of_bytes.copy()
        checksum.update(f"{self.run} {self.file}".encode())
        return f'{{"run": "{self.run}", "file": "{self.file}", "sha256": "{checksum.hexdigest()}"}}'.encode()


def write_sealed(content: object, path: Path, run: str) -> None:
    """Write a file with a seal; it is there completely or not at all."""
    with replacing(path) as temporary, temporary.open("r+b") as file:
        written = _Hashed(file)
        torch.save(content, written)  # type: ignore[arg-type]  # torch only calls write and flush
        comment = Seal(run, path.stem).with_checksum(written.hash)
        file.seek(-2, os.SEEK_END)
        file.write(len(comment).to_bytes(2, "little") + comment)


def read_unchecked(path: Path) -> object:
    """What a file holds, its tensors on the CPU; call `seal_of` before to check the bytes. No code in the file runs."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on wrong bytes, torch and pickle raise any kind of error
        # A file that was cut short makes torch raise EINVAL; other errors of the system may be temporary.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise _unreadable(path, error) from error
        raise Damaged(path) from error


def seal_of(path: Path) -> Seal | None:
    """The seal of a file, after checking its bytes; None for a file without one, as earlier versions wrote."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LONGEST))
            tail = file.read()
            end = tail.rfind(_END)
            if end < 0:
                raise Damaged(path)
            length, comment = tail[end + 20 : end + 22], tail[end + 22 :]
            if not comment:
                return None
            found = _SEAL.fullmatch(comment)
            if found is None or int.from_bytes(length, "little") != len(comment):
                raise Damaged(path)
            seal = Seal(found[1].decode(), found[2].decode())
            if seal.with_checksum(_hash_of(file, size - len(comment))) != comment:
                raise Damaged(path)
            return seal
    except OSError as error:
        raise _unreadable(path, error) from error


class _Hashed:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _hash_of(file: BinaryIO, size: int) -> "hashlib._Hash":
    """The hash of the first `size` bytes as torch wrote them: with 0 as the length of the comment."""
    hashed, left = hashlib.sha256(), size - 2
    file.seek(0)
    while left > 0 and (data := file.read(min(left, 1 << 20))):
        hashed.update(data)
        left -= len(data)
    hashed.update(b"\0\0")
    return hashed


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot read {path}: {error.strerror}; make it readable and run again")
