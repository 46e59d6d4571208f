"""`rewound.slim`: a new, smaller network without the units that a mask removes, equal to the masked one (law 8).

It is another way to train, store and run what the mask describes; to prune further or to rewind, go back to the large
shapes (`kept.expanded`).

A mask may remove every unit of a layer, if the network's outputs depend on its inputs by another way (a residual
connection). As torch has few layers without units, the smaller network then keeps one of zeros there, and `Slim.mask`
keeps it at zero during training.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from rewound.foundations.copying import weights_used
from rewound.foundations.errors import InputError, check_kind, few, in_a_line, warn
from rewound.method.copies import evaluating, flatten_recurrent, runnable_copy, to_run
from rewound.method.pruning.mask import Mask, bare_model, check_memory, plain_name
from rewound.method.structure.examples import Call, call_of
from rewound.method.structure.fitting import correct_counts, counts_in
from rewound.method.structure.groups import Units
from rewound.method.structure.kept import (
    KeptIndices,
    contracted,
    cut,
    cut_copy,
    kept_indices,
    mask_of_dead_layers,
    replace_data,
    shapes_of,
    tensors_of,
    zero_gone,
)
from rewound.method.structure.paths import check_path
from rewound.method.structure.tracing import check_runs, units


@dataclass(frozen=True)
class Slim:
    """A network that has physically shrunk, and what is left of the large one's tensors."""

    model: nn.Module
    kept: KeptIndices
    shapes: Mapping[str, tuple[int, ...]]
    """Of the large network's parameters and buffers."""
    mask: Mask
    """Of the small network: it holds the unit of zeros in each layer that is wholly gone, and is empty if none is.
    Keep it attached while the small network is trained."""
    counts: Mapping[str, Mapping[str, int | Sequence[int]]] = field(default_factory=dict)
    """By module, the whole numbers that count what has shrunk (`out_channels`, `num_heads`, ...), as they are now; if
    one of several in a tuple or list has changed, all of them."""
    names: Mapping[Tensor, str] = field(default_factory=dict, repr=False)
    """Of the parameters of the model that was given to `slim`, for as long as they exist."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "names": {}}  # a copy of a parameter is another parameter

    def state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state of the large network (a snapshot, an average of weights), cut to what is left."""
        check_kind("state", state, Mapping, "give tensors of the large network by name")
        for name, tensor in state.items():
            shape = self.shapes.get(plain_name(name)) if plain_name(name) in self.kept else None
            if shape is not None and tuple(tensor.shape) != shape:
                raise InputError(
                    f"{name} has the shape {tuple(tensor.shape)}, where the large network has {shape}; "
                    "give a state of the large network"
                )
        return contracted(state, self.kept)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The same kind of optimizer over the slim parameters: its slots are cut, groups and step counts kept.

        The given one trains the model that was given to `slim`.
        """
        names = _names_of(optimizer, self.names, "the model that was given to slim")
        self._check_vectors(optimizer)
        here = dict(self.model.named_parameters())
        groups = [
            {**group, "params": [here[names[parameter]] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        known = inspect.signature(type(optimizer)).parameters
        try:
            smaller = type(optimizer)(groups, **{key: each for key, each in optimizer.defaults.items() if key in known})
        except TypeError as error:
            raise InputError(
                f"a {type(optimizer).__name__} cannot be made from its defaults ({error}); make model and optimizer "
                "small in place, by into and into_optimizer, or begin with a new optimizer over the slim network"
            ) from error
        for parameter, name in names.items():
            if parameter in optimizer.state:
                slots = optimizer.state[parameter].items()
                smaller.state[here[name]] = {key: copy.deepcopy(self.slot(name, key, value)) for key, value in slots}
        return smaller

    def for_inference(self) -> nn.Module:
        """A copy to run in evaluation mode, in which the layers that are wholly gone take no time.

        Where a branch of a residual network is gone, its convolutions and linear layers give zeros (and their biases)
        without a look at their inputs. The names and shapes of its tensors are those of `model`.
        """
        model = evaluating(runnable_copy(self.model))
        for name, module in model.named_modules():
            kept = self.mask.get(f"{name}.weight")
            if kept is None or kept.any():
                continue
            if getattr(type(module), "_conv_forward", None) in _CONVOLVED:
                module._conv_forward = MethodType(_no_convolution, module)
            elif type(module).forward is nn.Linear.forward:
                module.forward = MethodType(_no_product, module)
        return model

    def into(self, model: nn.Module) -> None:
        """Make a model of the same class small in place: it takes this network's tensors and counts.

        Its modules, parameters and buffers stay the same objects, so that an optimizer, a scheduler and a training loop
        that hold them see the small ones. Gradients are dropped. Then call `into_optimizer`.
        """
        check_kind("model", model, nn.Module, "give the large model that is to become small")
        model = bare_model(model)
        self._check_same_modules(model)
        there, here, shapes = tensors_of(model), tensors_of(self.model), shapes_of(model)
        if other := [name for name in {**there, **here} if shapes.get(name) != self.shapes.get(name)]:
            raise InputError(
                f"this model has other tensors, or of other shapes, than the large one that was slimmed: {few(other)}; "
                "give a model that is made in the same way"
            )
        for name, tensor in there.items():
            replace_data(tensor, here[name])
            tensor.grad = None
        for name, numbers in self.counts.items():
            vars(model.get_submodule(name)).update(numbers)
        flatten_recurrent(model)

    def _check_same_modules(self, model: nn.Module) -> None:
        theirs, ours = dict(model.named_modules()), dict(self.model.named_modules())
        for name in {**theirs, **ours}:
            if _kind(theirs.get(name)) != _kind(ours.get(name)):
                one, other = (type(found[name]).__name__ if name in found else "nothing" for found in (theirs, ours))
                raise InputError(
                    f"{name or 'the model'} is {one} here and {other} in the network that was slimmed; give a model "
                    "that is made in the same way"
                )

    def into_optimizer(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Cut an optimizer's slots in place, once `into(model)` has made its parameters small."""
        names, small = _names_of(optimizer, _parameters_of(model), "this model"), shapes_of(self.model)
        if large := [name for parameter, name in names.items() if tuple(parameter.shape) != small[name]]:
            raise InputError(
                f"{few(large)} of this model have not become small; call into(model) before into_optimizer"
            )
        self._check_vectors(optimizer)
        cut = [
            (slots, {key: self.slot(name, key, value) for key, value in slots.items()})
            for parameter, name in names.items()
            if (slots := optimizer.state.get(parameter))
        ]
        for slots, smaller in cut:
            slots.update(smaller)

    def _check_vectors(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS) and optimizer.state and self.kept:
            raise InputError(
                "LBFGS keeps its last steps as vectors of all parameters together, which cannot be cut; begin with a "
                "new optimizer over the slim network"
            )

    def slot(self, name: str, key: str, value: Any) -> Any:
        """What is left of an optimizer's slot: of the parameter's shape, or of some of its dimensions (Adafactor)."""
        kept, shape = self.kept.get(name, {}), self.shapes[name]
        if kept and has_several(value):
            raise InputError(
                f"the optimizer's slot {key} of {name} is a {type(value).__name__} of tensors, and it is not known how "
                f"they follow from the parameter's shape, {shape}; begin with a new optimizer over the slim network"
            )
        if not isinstance(value, Tensor) or value.numel() == 1 or not kept:
            return value
        found = [cut(value, dims) for dims in slot_dimensions(tuple(value.shape), shape, kept)]
        if not found or any(not torch.equal(each, found[0]) for each in found[1:]):  # NaN equals nothing
            raise InputError(
                f"the optimizer's slot {key} of {name} has the shape {tuple(value.shape)}, and it is not known how it "
                f"follows from the parameter's, {shape}; begin with a new optimizer over the slim network"
            )
        return found[0]


def _kind(module: nn.Module | None) -> object:
    """What modules of the same code have in common; each graph of torch.fx is a class of its own."""
    return module.code if isinstance(module, GraphModule) else type(module)


_CONVOLVED = [kind._conv_forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]


def _no_convolution(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a convolution puts out whose weights are zero."""
    dimensions = len(layer.kernel_size)
    sizes = list(x.shape[-dimensions:])
    if layer.padding != "same":
        pads = [0] * dimensions if layer.padding == "valid" else layer.padding
        reach = [dilation * (size - 1) + 1 for dilation, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        sides = zip(sizes, pads, reach, layer.stride, strict=True)
        sizes = [(size + 2 * pad - width) // stride + 1 for size, pad, width, stride in sides]
    zeros = x.new_zeros(*x.shape[: -dimensions - 1], layer.out_channels, *sizes)
    return zeros if bias is None else zeros + bias.reshape(-1, *[1] * dimensions)


def _no_product(layer: Any, x: Tensor) -> Tensor:
    """What a linear layer puts out whose weights are zero."""
    zeros = x.new_zeros(*x.shape[:-1], layer.out_features)
    return zeros if layer.bias is None else zeros + layer.bias


@torch.inference_mode(False)  # tensors that are made in it could never be trained
def slim(
    model: nn.Module,
    mask: Mask,
    example_inputs: Sequence[Any],
    example_keywords: Mapping[str, Any] | None = None,
    *,
    groups: Units | None = None,
) -> Slim:
    """A copy of the model without the units that the mask removes; the given one stays as it is.

    Of a compiled or parallel model, it is a copy of what is inside. `groups` are the model's units, if they are known;
    otherwise they are found, for which the network is traced.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> groups = units(model, (torch.zeros(1, 4),))
    >>> mask = groups.mask_without(groups.groups[0].units[:5])
    >>> slim(model, mask, (torch.zeros(1, 4),), groups=groups).model[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    check_kind("mask", mask, Mask, "give one of whole units, as rewound.units(...).mask_without makes it")
    check_kind("model", model, nn.Module, "give the model itself")
    model = bare_model(model)
    groups = units(model, example_inputs, example_keywords) if groups is None else groups
    check_kind("groups", groups, Units, "give what rewound.units found in this model")
    kept = kept_indices(groups, mask, shapes_of(model))
    example, masked = call_of(example_inputs, example_keywords), runnable_copy(model)
    mask.apply(masked)
    try:
        check_path(model, groups, mask, example)
        made = _slimmed(model, masked, kept, example)
    except InputError:
        raise
    except Exception as error:  # whatever the model's own code raises
        check_runs(model, example)
        raise InputError(
            f"a smaller copy of this network cannot be run ({in_a_line(error)}): its code needs units that are gone; "
            "keep those with skip=, or keep the network as it is"
        ) from error
    if hooked := [name for name, parameter in model.named_parameters() if _has_hooks(parameter)]:
        warn(
            f"{few(hooked)} of this model {'has hooks' if len(hooked) == 1 else 'have hooks'} on gradients, which the "
            "smaller copy does not have; register them on its parameters, too, or make the model itself small by into"
        )
    return replace(made, mask=mask_of_dead_layers(mask, kept), names=WeakIdKeyDictionary(_parameters_of(model)))


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody's own code looks at the gradients of a parameter; ours does while a mask is attached."""
    after = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    modules = [str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in after]
    return bool(parameter._backward_hooks) or not all(name.startswith("rewound.") for name in modules)


def slim_to(
    model: nn.Module,
    kept: KeptIndices,
    example_inputs: Sequence[Any],
    example_keywords: Mapping[str, Any] | None = None,
) -> Slim:
    """A copy of the model with what is left of its tensors, as `kept_indices` says: `slim` without tracing the network.

    Its `mask` is empty; where a layer may be wholly gone, use `mask_of_dead_layers`.
    """
    return _slimmed(model, runnable_copy(model), kept, call_of(example_inputs, example_keywords))


def _slimmed(model: nn.Module, masked: nn.Module, kept: KeptIndices, example: Call) -> Slim:
    """`slim_to` by a copy of the model, in which what is gone may be set to zero."""
    check_memory(model)
    _check_copy(model, masked, example)
    shapes, small = shapes_of(masked), cut_copy(masked, kept)
    with torch.no_grad():
        for name, parameter in masked.named_parameters():
            zero_gone(parameter, kept.get(name, {}))
    correct_counts(masked, small, kept, example)
    flatten_recurrent(small)
    return Slim(small, kept, shapes, Mask({}), _changed_counts(masked, small))


@torch.no_grad()
def _check_copy(model: nn.Module, made: nn.Module, example: Call) -> None:
    """Refuse a network whose copy computes with weights of the original: those of the copy would not count."""
    tried = evaluating(to_run(made))

    def run() -> None:
        with suppress(Exception):  # whether it runs, and in which type, is seen in the trials
            example.run(tried)

    if used := weights_used(model, run):
        raise InputError(
            f"a copy of this network computes with weights of the original ({few(used)}): its code reaches them by a "
            "function that keeps them, such as a lambda, which is not copied; let the code read its layers from self "
            "where it uses them, or keep the network as it is"
        )


def _changed_counts(large: nn.Module, small: nn.Module) -> dict[str, dict[str, int | Sequence[int]]]:
    found: dict[str, dict[str, int | Sequence[int]]] = {}
    for (path, module), old in zip(small.named_modules(), large.modules(), strict=True):
        before = counts_in(old)
        if changed := {name: value for name, value in counts_in(module).items() if before.get(name) != value}:
            found[path] = changed
    return found


def _parameters_of(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}


def _names_of(optimizer: Optimizer, names: Mapping[Tensor, str], model: str) -> dict[Tensor, str]:
    """The names of the parameters that an optimizer trains."""
    check_kind("optimizer", optimizer, Optimizer, "give one of torch's kind")
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter not in names for parameter in trained):
        raise InputError(f"the optimizer trains parameters that {model} does not have; give its own optimizer")
    return {parameter: names[parameter] for parameter in trained}


def has_several(slot: object) -> bool:
    """Whether an optimizer's slot has several tensors of a parameter, as Shampoo and SOAP keep them."""
    return not isinstance(slot, Tensor) and any(isinstance(t, Tensor) and t.numel() > 1 for t in tree_leaves(slot))


def slot_dimensions(
    slot: tuple[int, ...], shape: tuple[int, ...], kept: Mapping[int, Tensor]
) -> Iterator[Mapping[int, Tensor]]:
    """What to keep of a slot, by each way in which its shape may follow from the parameter's."""
    if slot == shape:
        yield kept
    elif len(slot) == len(shape) and all(a in (b, 1) for a, b in zip(slot, shape, strict=True)):
        yield {dim: left for dim, left in kept.items() if slot[dim] > 1}
    elif len(slot) == len(shape) - 1:  # one of the last two dimensions was summed over
        for gone in range(max(len(shape) - 2, 0), len(shape)):
            if slot == (*shape[:gone], *shape[gone + 1 :]):
                yield {dim - (dim > gone): left for dim, left in kept.items() if dim != gone}
