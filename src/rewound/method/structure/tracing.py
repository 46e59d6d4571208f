"""`rewound.units`: the channels, heads and hidden units of any network, found from the graph of `torch.export`.

Operations tie indices of tensors (`rules`), and those that are tied live or die together (`atoms`).
"""

import copy
import io
import logging
import operator
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from rewound.foundations.collector import collector_paused
from rewound.foundations.errors import InputError, check_kind, few, in_a_line
from rewound.foundations.randomness import all_draws
from rewound.method.copies import apart, evaluating, sharing_copy
from rewound.method.pruning.mask import bare_model, check_apart, plain_name, plain_parameters
from rewound.method.structure.atoms import STAYS, Atoms, Labels, labelled
from rewound.method.structure.combining import plain
from rewound.method.structure.examples import Call, call_of
from rewound.method.structure.groups import TIED, Dimension, Unit, UnitGroup, Units
from rewound.method.structure.rehearsal import without_needed
from rewound.method.structure.rules import applied

_NOT_KNOWN = "so that its units are not known; unstructured pruning works all the same"


def units(model: nn.Module, example_inputs: Sequence[Any], example_keywords: Mapping[str, Any] | None = None) -> Units:
    """What lives or dies together in a network, as it runs on an example; `groups.pinned` says what cannot go, and why.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> groups = units(model, (torch.zeros(1, 3, 8, 8),))
    >>> groups, len(groups.groups[0])
    (Units(1 group, 8 units), 8)
    >>> groups.mask_without(groups.groups[0].units[:2])
    Mask(5 tensors, 396 of 528 weights kept, density 0.75)
    """
    check_kind("model", model, nn.Module, "give the model itself")
    model = bare_model(model)
    if hidden := [name for name, _ in model.named_parameters() if plain_name(name) != name]:
        if hidden[0].startswith("module."):
            raise InputError(
                f"{type(model).__name__} holds a network in its attribute `module` ({hidden[0]}), a name that is taken "
                "for that of a wrapper; give the network itself, model.module, or rename the attribute"
            )
        raise InputError(
            f"a part of this model is compiled ({hidden[0]}), and its units are found in what it was made of; prune it "
            "before torch.compile, or compile that part in place, by its own method compile"
        )
    plain_parameters(model, tied=False)  # an error for lazy ones
    check_apart(model)
    call = call_of(example_inputs, example_keywords)
    found = _found(model, exported(model, call))
    with _quiet():
        return without_needed(model, found, call)


def exported(model: nn.Module, example: Call) -> ExportedProgram:
    """The graph of a network in evaluation mode; the model is left as it was."""
    try:
        with _quiet():
            traced = apart(model, example.run)
        with all_draws(torch.device("cpu"), 0), _quiet(), torch.no_grad(), _in_evaluation(traced):
            return torch.export.export(traced, *example, strict=False)
    except Exception as error:  # whatever the model's own code raises while it is traced
        check_runs(model, example)
        reason = in_a_line(error)
        if "data-dependent" in reason:
            reason = f"what it computes depends on the values of a tensor: {reason}"
        raise InputError(f"this network cannot be traced ({reason}{_place(error)}), {_NOT_KNOWN}") from error


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards its modules have the attributes that they had.

    Without the tensors without numbers, that is, which a trace leaves in them.
    """
    attributes = [vars(module) for module in model.modules()]
    contents = [each for those in attributes for each in those.values() if isinstance(each, dict | list)]
    before = [(there, copy.copy(there)) for there in (*attributes, *contents)]
    try:
        model.eval()
        yield
    finally:
        for there, those in before:
            if not _holds_the_same(there, those):  # some cannot be changed, such as a configuration of diffusers
                there.clear()
                there.update(those) if isinstance(there, dict) else there.extend(those)


def _holds_the_same(one: dict[Any, Any] | list[Any], other: dict[Any, Any] | list[Any]) -> bool:
    """Whether two hold the same objects in the same order; tensors in them are not compared."""
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))
    return len(one) == len(other) and all(map(operator.is_, one, other))


_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export._trace")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without what torch prints of an error, and of the graph so far, before it raises it."""
    logs = [log for log in map(logging.getLogger, _LOGS) if not log.disabled]
    try:
        for log in logs:
            log.disabled = True
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log in logs:
            log.disabled = False


def check_runs(model: nn.Module, example: Call) -> None:
    """Refuse an example that the network does not run on in evaluation mode, as a copy shows."""
    try:
        copy = evaluating(sharing_copy(model))
    except InputError:
        return
    try:
        with torch.no_grad():
            example.run(copy)
    except Exception as error:  # whatever the model's own code raises
        given = [*example.args, *example.keywords.values()]
        sizes = few([str(tuple(each.shape)) if isinstance(each, Tensor) else type(each).__name__ for each in given])
        raise InputError(
            f"the network does not run on the example inputs (of {sizes or 'nothing'}): {in_a_line(error)}; give one "
            "batch as its forward takes it"
        ) from error


def _place(error: BaseException) -> str:
    """Where in the network's code an error was raised: the last line that is not torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    last = next((frame for frame in reversed(frames) if frame.filename != __file__), None)
    return f", at {Path(last.filename).name}:{last.lineno}" if last else ""


def _check_shape(node: torch.fx.Node) -> None:
    given = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
    if any(not isinstance(size, int) for each in given for size in each.shape):
        raise InputError(
            f"this network cannot be traced (the shape of what {node.target} gives depends on the values of a tensor), "
            f"{_NOT_KNOWN}"
        )


def _found(model: nn.Module, program: ExportedProgram) -> Units:
    """The units that the graph of a network ties."""
    signature, constants = program.graph_signature, _constants(model)
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    atoms, tensors = Atoms(), {**_tensors(model), **constants}
    roots, given = dict[str, Labels](), list[Any]()
    shared, used = dict[int, str](), set[str]()
    for node in program.graph.find_nodes(op="placeholder"):
        name = names.get(node.name)
        if name not in tensors:
            given.append(plain(node.meta.get("val")))
            continue
        first = shared.setdefault(id(tensors[name]), name)  # tied weights are one
        if first not in roots:
            shape, is_constant = tuple(tensors[first].shape), name in constants
            roots[first] = labelled(atoms, shape, is_weight=not is_constant, is_constant=is_constant)
        given.append(roots[first])
        if node.users:
            used.add(first)
    atoms.pin_all(_leaves(_followed(atoms, program.graph_module, given)), "it is an output of the network")
    atoms.pin_all([labels for name, labels in roots.items() if name not in used], "it is not used")
    first_names = {name: shared[id(tensor)] for name, tensor in tensors.items() if id(tensor) in shared}
    roots |= {name: roots[first] for name, first in first_names.items()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    tied = {name: first for name, first in first_names.items() if name != first}
    with collector_paused():
        return _gathered(atoms, roots, shapes, tied)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """What may shrink, and is zero without a unit: parameters; with them, the statistics of normalisation."""
    statistics = {
        f"{prefix}{'.' if prefix else ''}{name}": buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for name, buffer in module.named_buffers(recurse=False)
    }
    return {**dict(model.named_parameters(remove_duplicate=False)), **statistics}


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that may have one value for each unit, such as those of a frozen BatchNorm."""
    buffers = model.named_buffers(remove_duplicate=False)
    statistics = _tensors(model)
    return {
        name: buffer
        for name, buffer in buffers
        if name not in statistics and buffer.is_floating_point() and sum(size > 1 for size in buffer.shape) == 1
    }


def _followed(atoms: Atoms, module: GraphModule, given: Sequence[Any]) -> Any:
    """The labels of what a graph gives for those of what it is given.

    A part that computes in another type, or with gradients where the rest has none, is a graph in the graph.
    """
    values: dict[str, Any] = {}
    places = iter(given)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node.name] = next(places)
        elif node.op == "get_attr":  # a graph inside the graph (autocast, cond)
            values[node.name] = plain(operator.attrgetter(str(node.target))(module))
        elif node.op == "call_function":
            _check_shape(node)
            args, kwargs = _resolved(node.args, values), _resolved(dict(node.kwargs), values)
            if "getitem" in str(node.target):
                values[node.name] = args[0][args[1]] if isinstance(args[0], list) else plain(node.meta.get("val"))
            elif str(node.target) in ("wrap_with_autocast", "wrap_with_set_grad_enabled"):
                inner = next(place for place, each in enumerate(args) if isinstance(each, GraphModule))
                values[node.name] = _followed(atoms, args[inner], args[inner + 1 :])
            else:
                values[node.name] = applied(atoms, node.target, args, kwargs, node.meta.get("val"))
    return _resolved(module.graph.output_node().args[0], values)


def _resolved(thing: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(thing, torch.fx.Node):
        return values[thing.name]
    if isinstance(thing, dict):
        return {key: _resolved(each, values) for key, each in thing.items()}
    if isinstance(thing, list | tuple):
        return [_resolved(each, values) for each in thing]
    return thing


def _leaves(thing: Any) -> Iterator[Labels]:
    if isinstance(thing, Labels):
        yield thing
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from _leaves(each)
    elif isinstance(thing, dict):
        yield from _leaves(list(thing.values()))


def _gathered(
    atoms: Atoms, roots: Mapping[str, Labels], shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
) -> Units:
    """The groups of what may go, and why the rest stays, once everything is tied."""
    components, reasons = atoms.settle()
    produced, filters = _flags(atoms.produced, atoms.count), _flags(atoms.filters, atoms.count)
    found: dict[int, dict[Dimension, list[int]]] = {}
    pinned: dict[Dimension, str] = {}
    producers, of_filters = set[Dimension](), set[Dimension]()
    for name, labels in roots.items():
        for factor in labels.factors:
            place = (name, factor.dims[0])
            if bool(produced[factor.atoms].any()):
                producers.add(place)
            if bool(filters[factor.atoms].any()):
                of_filters.add(place)
            for index, component in enumerate(components[factor.atoms].tolist()):
                if component != STAYS:
                    found.setdefault(component, {}).setdefault(place, []).append(index)
                elif place not in pinned:
                    pinned[place] = reasons.get(int(factor.atoms[index]), TIED)
    grouped: dict[tuple[Dimension, ...], list[Unit]] = {}
    for places in found.values():
        unit = Unit({place: tuple(indices) for place, indices in places.items()})
        grouped.setdefault(tuple(places), []).append(unit)
    groups = tuple(
        UnitGroup(
            members,
            tuple(alike),
            tuple(place for place in members if place in producers),
            tuple(place for place in members if place in of_filters),
        )
        for members, alike in grouped.items()
        if any(name in shapes for name, _ in members)
    )
    return Units(groups, pinned, shapes, tied)


def _flags(found: Sequence[Tensor], count: int) -> Tensor:
    """Which atoms were found."""
    flags = torch.zeros(count, dtype=torch.bool)
    for each in found:
        flags[each] = True
    return flags
