"""A pruned network in one small file: `save` writes what the mask keeps, `load` gives it back bit for bit.

What the file looks like, and why reading it needs no trust, is in `fileformat`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from rewound.foundations.copying import copied
from rewound.foundations.errors import InputError, as_path, check_kind, few, warn
from rewound.foundations.wholefiles import write_whole
from rewound.method.pruning.counts import Counts, parameter_count
from rewound.method.pruning.mask import Mask, by_plain_name, first_names
from rewound.method.structure.examples import as_arguments
from rewound.method.structure.slimming import Slim, slim
from rewound.states.tickets.fileformat import DTYPE_NAMES, DTYPES, REMEDY, Extent, Packed, decoded, encoded
from rewound.states.tickets.rebuilding import Model, drawn_example, large_network, recipe_of


@dataclass(frozen=True, eq=False, repr=False)
class Ticket:
    """A pruned network that was read from a file."""

    state: Mapping[str, Tensor]
    """Parameters and buffers by their plain names, pruned weights exactly zero; tied ones are one tensor."""
    mask: Mask
    about: Mapping[str, object]
    """What was said of it when it was saved: recipe, technique, lineage, ..."""
    hash: str
    """The same for the same network, whatever is said about it."""
    parameters: int | None = None
    """How many parameters the network has, buffers not among them; None if it was saved from a state_dict."""

    @property
    def counts(self) -> Counts | None:
        """How far the pruned weights and the whole network are compressed, if its parameters are known.

        Those that a run counted where it said so, else all that the mask is for.
        """
        if self.parameters is None:
            return None
        masks: dict[int, Tensor] = {id(self.state[name]): kept for name, kept in self.mask.items()}  # tied: once
        kept = sum(int(each.count_nonzero()) for each in masks.values())
        total = sum(each.numel() for each in masks.values())
        match self.about.get("counts"):
            case {"weights_kept": int(left), "weights": int(of)}:
                gone, gone_in_all = of - left, total - kept
                if 0 <= left <= kept and 0 <= gone <= gone_in_all:
                    return Counts(left, of, self.parameters, gone_in_all - gone)
        return Counts(kept, total, self.parameters)

    def __repr__(self) -> str:
        return f"Ticket({len(self.state)} tensors, {self.mask!r}, hash {self.hash[:12]})"

    def into(self, model: nn.Module) -> None:
        """Put the weights and buffers into `model`, whatever it is wrapped in; its dtypes and devices stay.

        Bit for bit where the dtypes are the ticket's; else values are rounded to the model's.
        """
        check_kind("model", model, nn.Module, "give the model itself")
        inside = _averaged(model)
        own = inside.state_dict()
        names = by_plain_name({name: name for name in own})
        self._check_fits({plain: own[name] for plain, name in names.items()})
        inside.load_state_dict({names[name]: tensor for name, tensor in self.state.items()})

    def slim(
        self,
        model: Model | None = None,
        example_inputs: object = None,
        example_keywords: Mapping[str, object] | None = None,
    ) -> Slim:
        """The small network: without the units that the mask removes, which must be whole ones.

        `model` is the large network, which stays as it is, or a function or "package.module:name" that makes it; a
        ticket of a recipe that comes with the package needs none. The example that it is traced with is by default of
        the kind that the ticket says. Nothing is imported because a ticket names it.

        >>> import tempfile
        >>> from rewound.method.structure.tracing import units
        >>> net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4)
        >>> mask = units(net, (x,)).mask_without(units(net, (x,)).groups[0].units[:5])
        >>> mask.apply(net)
        >>> save(net, mask, path := Path(tempfile.mkdtemp(), "ticket.safetensors"))
        >>> load(path).slim(net, x).model[0]
        Linear(in_features=4, out_features=3, bias=True)
        """
        network = copied(large_network(model, self.about))
        self.into(network)
        inputs, keywords = self._example(model, example_inputs, example_keywords)
        return slim(_averaged(network), self.mask, inputs, keywords)

    def _example(
        self, model: object, inputs: object, keywords: Mapping[str, object] | None
    ) -> tuple[tuple[Any, ...], Mapping[str, object]]:
        if inputs is not None or keywords is not None:
            return as_arguments(inputs), keywords or {}
        if (drawn := drawn_example(self.about.get("example"))) is not None:
            return drawn
        if model is None and (recipe := recipe_of(self.about)) is not None:
            return recipe.example(), {}
        raise InputError(
            "this ticket does not say what its network takes; give example_inputs= (and example_keywords=), a batch"
        )

    def _check_fits(self, own: Mapping[str, Tensor]) -> None:
        """An error for a model whose state would not hold this ticket's network."""
        shapes = {name: getattr(tensor, "shape", None) for name, tensor in own.items()}
        wrong = [name for name, tensor in self.state.items() if shapes.get(name) != tensor.shape]
        wrong += [name for name in own if name not in self.state]
        if wrong:
            raise InputError(f"this ticket is for another model: names or shapes differ for {few(wrong)}")
        for name, tensor in self.state.items():
            if own[name].is_meta:
                raise InputError("this model has no memory yet (meta device); call model.to_empty(device=...) first")
            if own[name].is_floating_point() != tensor.is_floating_point():
                raise InputError(
                    f"cannot put {name}, {tensor.dtype}, into {own[name].dtype}: its values would be lost; load it "
                    "into a model of floating-point weights, and convert that"
                )
        for name, owner in first_names(own).items():
            tensor, tied = self.state[name], self.state[owner]
            if tensor is not tied and not torch.equal(tensor, tied):
                raise InputError(
                    f"this ticket is for another model: {owner} and {name} are tied in this one, and differ in the "
                    "ticket; untie them first"
                )


def save(
    model: nn.Module | Mapping[str, Tensor], mask: Mask, path: str | Path, about: Mapping[str, object] = {}
) -> None:
    """Write W (.) m, a model's or a state_dict's, to one file whose size falls with the density.

    The network should have been trained under the mask; where it was not, a warning says so.
    `about` takes plain facts (text, numbers, lists, tables): whatever is worth knowing of the network later.

    >>> import tempfile
    >>> net = nn.Linear(100, 100)
    >>> path = Path(tempfile.mkdtemp(), "ticket.safetensors")
    >>> mask = Mask({"weight": net.weight > 0.08})
    >>> mask.apply(net)
    >>> save(net, mask, path, about={"technique": "lr-rewinding"})
    >>> path.stat().st_size / (4 * 100 * 101) < 0.2
    True
    >>> ticket = load(path)
    >>> ticket.into(net)
    >>> bool((net.weight[~ticket.mask["weight"]] == 0).all()), ticket.about
    (True, {'technique': 'lr-rewinding'})
    """
    if mask is None:
        raise InputError(
            "mask is None, as run.mask is before the first pruning and where no level was within max_drop; "
            "save a dense network with torch.save"
        )
    check_kind("model", model, (nn.Module, Mapping), "give the model itself, or its state_dict")
    check_kind("mask", mask, Mask, "the order is rewound.save(model, mask, path)")
    file = as_path("ticket", path)
    state = _plain(_averaged(model).state_dict() if isinstance(model, nn.Module) else model)
    parameters = parameter_count(_averaged(model)) if isinstance(model, nn.Module) else None
    content = encoded(_packed(state, mask, about, parameters))
    _warn_of_cut(state, mask)
    try:
        write_whole(file, content)
    except OSError as error:
        raise InputError(f"cannot write ticket {path}: {error.strerror}; choose another path") from error


def load(path: str | Path) -> Ticket:
    """Read a ticket; a file that is not a whole ticket is an `InputError`."""
    try:
        data = as_path("ticket", path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read ticket {path}: {error.strerror}; {REMEDY}") from error
    return parsed(data, str(path))


def parsed(data: bytes, name: str = "the file") -> Ticket:
    """The ticket in the bytes of a file; `name` is what an error calls the file."""
    content = decoded(data, name)
    places = {name: place for name, place in content.state.items() if isinstance(place, Extent)}
    masks = Mask.unpacked(content.bits, {name: places[name].shape for name in content.bits})
    rest = dict(content.values)
    tensors: dict[str, Tensor] = {}
    for name, place in places.items():
        count = masks.counts.get(name, place.size)
        run, rest[place.dtype] = rest[place.dtype][:count], rest[place.dtype][count:]
        tensors[name] = _filled(run, masks[name]) if name in masks else run.clone().reshape(place.shape)
    owners = {name: name if isinstance(place, Extent) else place for name, place in content.state.items()}
    state = {name: tensors[owner] for name, owner in owners.items()}
    mask = Mask({name: masks[owners[name]] for name in content.mask})
    return Ticket(state, mask, content.about, content.hash, content.parameters)


def _filled(values: Tensor, kept: Tensor) -> Tensor:
    """The kept values in their places, zero elsewhere; moved as integers, which torch and numpy have for every size."""
    word = np.dtype(f"u{values.itemsize}")
    flat = np.zeros(kept.numel(), word)
    flat[kept.reshape(-1).numpy()] = values.view(torch.uint8).numpy().view(word)
    return torch.from_numpy(flat).view(values.dtype).reshape(kept.shape)


def _averaged(model: nn.Module) -> nn.Module:
    """The network itself, of torch's averages too: their count of updates is none of its tensors."""
    compiled = getattr(model, "_orig_mod", model)
    return compiled.module if isinstance(compiled, AveragedModel) else model


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their plain names, if a file can hold them."""
    state = by_plain_name(tensors)
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"cannot save {name}: it is a {type(tensor).__name__}, not a tensor")
        if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
            kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device.type}"
            raise InputError(f"cannot save {name} ({kind}): a ticket holds dense tensors of {', '.join(DTYPES)}")
    return state


def _packed(state: Mapping[str, Tensor], mask: Mask, about: Mapping[str, object], parameters: int | None) -> Packed:
    mask.check_shapes({name: tensor.shape for name, tensor in state.items()})
    owners = first_names(state)
    kept: dict[str, Tensor] = {}
    for name in (name for name in state if name in mask):  # tied: pruned under any of its names
        tensor, owner = mask[name].cpu(), owners[name]
        kept[owner] = kept[owner] & tensor if owner in kept else tensor
    places: dict[str, Extent | str] = {}
    runs: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        if owners[name] != name:
            places[name] = owners[name]
            continue
        place = places[name] = Extent(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        flat = tensor.detach().cpu().reshape(-1)
        runs.setdefault(place.dtype, []).append(flat[kept[name].reshape(-1)] if name in kept else flat)
    values = {dtype: torch.cat(run) for dtype, run in runs.items()}
    sizes = {name: place.size for name, place in places.items() if isinstance(place, Extent)}
    if parameters is not None and not sum(sizes[name] for name in kept) <= parameters <= sum(sizes.values()):
        parameters = None  # of a module whose state_dict does not hold them all
    bits = Mask({name: kept[name] for name in state if name in kept}).packed()
    return Packed(places, list(mask), bits, values, _facts(about), parameters)


def _warn_of_cut(state: Mapping[str, Tensor], mask: Mask) -> None:
    """Weights that were trained under a larger mask, or under none, do without what this one takes away."""
    cut = [name for name, kept in mask.items() if state[name].detach().cpu()[~kept.cpu()].to(torch.bool).any()]
    if cut:
        warn(
            f"this mask prunes weights that are not zero, in {few(cut)}: the network was not trained under it; save it "
            "with the mask of its own level, or call mask.apply(model) first to set them to zero"
        )


def _facts(about: Mapping[str, object]) -> dict[str, object]:
    try:
        facts: dict[str, object] = json.loads(json.dumps(dict(about), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"about takes plain facts (text, finite numbers, lists, tables): {error}") from error
    return facts
