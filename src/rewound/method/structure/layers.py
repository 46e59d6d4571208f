"""Operations with weights: what each ties of its inputs, its weights and what it puts out."""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from rewound.method.structure.atoms import Atoms, Factor, Labels
from rewound.method.structure.combining import pointwise, shifted
from rewound.method.structure.groups import KERNEL


def convolution(
    atoms: Atoms, value: Any, x: Labels, weight: Labels, bias: Labels | None = None, *args: Any, **kwargs: Any
) -> Labels:
    groups, channels = _groups(args, kwargs), _channels(x, weight)
    inputs = atoms.alone(x, channels, "it is a dimension that a convolution runs over")
    atoms.put_out(weight, 0, filters=True)
    outputs, reads = atoms.along(weight, 0), atoms.along(weight, 1)
    _pin_kernel(atoms, weight)
    if groups == 1:
        atoms.read(inputs, reads)
    else:
        in_groups, out_groups = inputs.reshape(groups, -1), outputs.reshape(groups, -1)
        if in_groups.shape[1] == 1:  # depthwise: whole groups go
            atoms.pin(reads, "a depthwise convolution reads one channel")
            atoms.tie(out_groups, in_groups)
        else:  # every group loses the same places
            atoms.read(in_groups, reads[None])
            atoms.tie(out_groups, out_groups[:1])
    return _put_out(atoms, value, outputs, bias, channels)


def transposed_convolution(
    atoms: Atoms, value: Any, x: Labels, weight: Labels, bias: Labels | None = None, *args: Any, **kwargs: Any
) -> Labels:
    groups, channels = _groups(args, kwargs), _channels(x, weight)
    inputs = atoms.alone(x, channels, "it is a dimension that a convolution runs over")
    atoms.read(inputs, atoms.along(weight, 0))
    atoms.put_out(weight, 1, filters=True)
    outputs = atoms.along(weight, 1)
    _pin_kernel(atoms, weight)
    if groups > 1:
        atoms.pin_all([x, weight], "a transposed convolution has groups")
        outputs = outputs.repeat(groups)
    return _put_out(atoms, value, outputs, bias, channels)


def _channels(x: Labels, weight: Labels) -> int:
    """The dimension of the channels: the first where there is no batch."""
    return 1 if x.rank == weight.rank else 0


def _groups(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The groups of a convolution: of what follows its bias, the only whole number that is in no list."""
    whole = [each for each in args if isinstance(each, int) and not isinstance(each, bool)]
    return int(kwargs.get("groups", whole[-1] if whole else 1))


def _pin_kernel(atoms: Atoms, weight: Labels) -> None:
    for factor in weight.factors:
        if not {0, 1} & set(factor.dims):
            atoms.pin(factor.atoms, KERNEL)


def _put_out(atoms: Atoms, value: Any, outputs: Tensor, bias: Labels | None, dim: int) -> Labels:
    if isinstance(bias, Labels):
        atoms.tie(outputs, atoms.along(bias, 0))
    return atoms.labels(tuple(value.shape), [Factor((dim,), outputs)])


def linear(atoms: Atoms, value: Any, x: Labels, weight: Labels, bias: Labels | None = None) -> Labels:
    _read(atoms, x, weight)
    kept = [factor for factor in x.factors if x.rank - 1 not in factor.dims]
    atoms.put_out(weight, 0)
    outputs = atoms.along(weight, 0)
    if isinstance(bias, Labels):
        atoms.tie(outputs, atoms.along(bias, 0))
    return atoms.labels(tuple(value.shape), [*kept, Factor((len(value.shape) - 1,), outputs)])


def _read(atoms: Atoms, x: Labels, weight: Labels) -> None:
    """The columns of a weight go with the last dimension of what it reads."""
    last = x.rank - 1
    for factor in x.along(last):
        atoms.read(atoms.only(factor, last), atoms.along(weight, 1))
    if not x.along(last):
        atoms.pin(atoms.along(weight, 1), "it reads what cannot shrink")


def product(atoms: Atoms, value: Any, x: Labels, y: Labels) -> Labels:
    """A matrix product: the dimension that is summed over is tied, or stays where both sides are computed."""
    if x.rank == 1 or y.rank == 1:
        atoms.pin_all([x, y], "it is multiplied by a vector")
        return Labels(tuple(value.shape))
    rank = len(value.shape)
    if not (x.is_weight or y.is_weight):
        reason = "it is summed over in a product of two computed tensors, whose scale may depend on its size"
        x = Labels(x.shape, tuple(atoms.without(x, [-1], reason)))
        y = Labels(y.shape, tuple(atoms.without(y, [-2], reason)))
    else:
        _tie_summed(atoms, x, x.rank - 1, y, y.rank - 2)
        for side, dim in ((x, x.rank - 2), (y, y.rank - 1)):
            if side.is_weight:
                atoms.put_out(side, dim)
    left = [Factor(shifted(f.dims, rank - x.rank), f.atoms) for f in x.factors if x.rank - 1 not in f.dims]
    right = [Factor(shifted(f.dims, rank - y.rank), f.atoms) for f in y.factors if y.rank - 2 not in f.dims]
    return _batched(atoms, value, left, right, x, y)


def _batched(atoms: Atoms, value: Any, left: list[Factor], right: list[Factor], x: Labels, y: Labels) -> Labels:
    """Along the batch dimensions of a product both sides go together."""
    rank = len(value.shape)
    for d in range(rank - 2):
        on_left = [f for f in left if d in f.dims]
        on_right = [f for f in right if d in f.dims]
        sizes = [side.shape[d - rank + side.rank] if d - rank + side.rank >= 0 else 1 for side in (x, y)]
        for one in on_left:
            if not on_right and sizes[1] > 1:
                atoms.pin(one.atoms, "it is a batch of a product with what cannot shrink")
            for other in on_right:
                atoms.tie(atoms.only(one, d), atoms.only(other, d))
        for other in on_right:
            if not on_left and sizes[0] > 1:
                atoms.pin(other.atoms, "it is a batch of a product with what cannot shrink")
    merged: dict[tuple[int, ...], Tensor] = {}
    for factor in [*left, *right]:
        merged.setdefault(factor.dims, factor.atoms)
    return atoms.labels(tuple(value.shape), [Factor(dims, found) for dims, found in merged.items()])


def _tie_summed(atoms: Atoms, x: Labels, dx: int, y: Labels, dy: int) -> None:
    of_x, of_y = x.along(dx), y.along(dy)
    for one in of_x:
        for other in of_y:
            atoms.read(atoms.only(one, dx), atoms.only(other, dy))
    for side, others in ((of_x, of_y), (of_y, of_x)):
        if not others:
            for factor in side:
                atoms.pin(factor.atoms, "it reads what cannot shrink")


def grouped_product(atoms: Atoms, value: Any, x: Labels, y: Labels, *args: Any, **kwargs: Any) -> Labels:
    """Each row times one of a stack of matrices, such as those of experts."""
    if (x.rank, y.rank) != (2, 3):
        atoms.pin_all([x, y], "it is in a product of groups of rows or columns")
        return Labels(tuple(value.shape))
    kept = atoms.without(y, [0], "rows choose from it")
    matrix = Labels(y.shape[1:], tuple(Factor(shifted(f.dims, -1), f.atoms) for f in kept), y.is_weight)
    return product(atoms, value, x, matrix)


def added_product(atoms: Atoms, value: Any, bias: Labels, x: Labels, y: Labels, **kwargs: Any) -> Labels:
    return pointwise(atoms, value, [product(atoms, value, x, y), bias])


def einsum(atoms: Atoms, value: Any, equation: str, operands: Sequence[Labels], **kwargs: Any) -> Labels:
    """Letters are dimensions; what is summed over is tied, or stays where no side is a weight."""
    terms, output = _letters(equation, operands)
    if "->" not in equation or any(len(set(term)) < len(term) for term in terms):
        atoms.pin_all(operands, "an einsum reads it that does not say what it gives, or takes a diagonal")
        return Labels(tuple(value.shape))
    known: dict[str, Tensor] = {}
    weights = any(each.is_weight for each in operands)
    for letter in dict.fromkeys("".join(terms)):
        sides = [(x, term.index(letter)) for x, term in zip(operands, terms, strict=True) if letter in term]
        found = [[atoms.only(factor, d) for factor in x.along(d)] for x, d in sides]
        labelled = [each for each in found if each]
        for side in labelled:
            for each in side:
                atoms.tie(labelled[0][0], each)
        if labelled and (len(labelled) < len(sides) or (letter not in output and not weights)):
            atoms.pin(labelled[0][0], "an einsum reads it beside what cannot shrink")
        elif labelled:
            known[letter] = labelled[0][0]
            if letter not in output:
                atoms.read(labelled[0][0], labelled[-1][0])
    for x, term in zip(operands, terms, strict=True):
        for letter in term if x.is_weight else "":
            if letter in output:
                atoms.put_out(x, term.index(letter))
    found_out = [Factor((output.index(letter),), each) for letter, each in known.items() if letter in output]
    return atoms.labels(tuple(value.shape), found_out)


def _letters(equation: str, operands: Sequence[Labels]) -> tuple[list[str], str]:
    """The letters of each side of an einsum, and of what it gives, with others in place of an ellipsis."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms, spare = inputs.split(","), "".join(letter for letter in ascii_letters if letter not in equation)
    hidden = [x.rank - len(term.replace("...", "")) for x, term in zip(operands, terms, strict=True)]
    most = max(hidden)
    terms = [term.replace("...", spare[most - count : most]) for term, count in zip(terms, hidden, strict=True)]
    return terms, output.replace("...", spare[:most])


def embedding(atoms: Atoms, value: Any, weight: Labels, indices: Labels, *args: Any, **kwargs: Any) -> Labels:
    for factor in weight.along(0):
        atoms.pin(factor.atoms, "it is looked up by an index")
    atoms.put_out(weight, 1)
    columns = atoms.along(weight, 1)
    return atoms.labels(tuple(value.shape), [Factor((len(value.shape) - 1,), columns)])


def prelu(atoms: Atoms, value: Any, x: Labels, weight: Labels) -> Labels:
    """One slope for all, or one for each channel: of the second dimension, not of the last."""
    slopes = Labels((*weight.shape, *[1] * max(x.rank - 2, 0)), weight.factors)
    return pointwise(atoms, value, [x, slopes])


def batch_norm(atoms: Atoms, value: Any, x: Labels, *others: Any, **kwargs: Any) -> Labels:
    channels = [atoms.only(factor, 1) for factor in x.along(1)]
    for each in others[:4]:
        if isinstance(each, Labels) and channels:
            atoms.tie(channels[0], atoms.along(each, 0))
        elif isinstance(each, Labels):
            atoms.pin_all([each], "it normalises what cannot shrink")
    elsewhere = [d for d in range(x.rank) if d != 1]
    return atoms.labels(tuple(value.shape), atoms.without(x, elsewhere, "it is normalised over"))


def group_norm(
    atoms: Atoms, value: Any, x: Labels, groups: int, weight: Labels | None = None, bias: Labels | None = None, *_: Any
) -> Labels:
    for factor in x.along(1):
        rows = atoms.only(factor, 1).reshape(groups, -1)
        atoms.tie(rows, rows[:, :1])  # whole groups: statistics are those of a group
        for each in (weight, bias):
            if isinstance(each, Labels):
                atoms.tie(rows.reshape(-1), atoms.along(each, 0))
    if not x.along(1):
        atoms.pin_all([each for each in (weight, bias) if each], "it normalises what cannot shrink")
    kept = atoms.without(x, range(2, x.rank), "it is normalised over")
    return atoms.labels(tuple(value.shape), kept)


def layer_norm(atoms: Atoms, value: Any, x: Labels, shape: Sequence[int], *others: Any, **kwargs: Any) -> Labels:
    reason = "it is normalised over: without some of it the statistics change"
    kept = atoms.without(x, range(x.rank - len(shape), x.rank), reason)
    atoms.pin_all([each for each in others if isinstance(each, Labels)], reason)
    return atoms.labels(tuple(value.shape), kept)


def attention(
    atoms: Atoms, value: Any, q: Labels, k: Labels, v: Labels, mask: Labels | None = None, *args: Any, **kwargs: Any
) -> Labels:
    """Whole heads go: the size of a head is in the scale; query heads go with the key and value head they share."""
    reason, head = "it is the size of an attention head, or a sequence", q.rank - 3
    heads = []
    for side in (q, k, v):
        kept = Labels(side.shape, tuple(atoms.without(side, [-1, -2], reason)))
        heads.append(atoms.alone(kept, head, "it is a batch of an attention"))
    for other in heads[1:]:
        shared = heads[0].numel() // other.numel()
        atoms.tie(heads[0], other.repeat_interleave(shared) if shared > 1 else other)
    if isinstance(mask := kwargs.get("attn_mask", mask), Labels):
        scores = torch.empty((*q.shape[:-1], k.shape[-2]), device="meta")
        pointwise(atoms, scores, [Labels(tuple(scores.shape), (Factor((head,), heads[0]),)), mask])
    return atoms.labels(tuple(value.shape), [Factor((head,), heads[0])])


def recurrent(atoms: Atoms, value: Sequence[Any], x: Labels, *args: Any) -> list[Labels]:
    """An nn.LSTM, nn.GRU or nn.RNN: all its layers and directions have one size, and lose the same hidden units."""
    place = next(i for i, each in enumerate(args) if isinstance(each, bool))  # whether there are biases
    states, weights, has_biases, layers, directions = *args[place - 2 : place + 2], 1 + args[place + 4]
    count = len(weights) // (layers * directions)
    inputs, first = x, None
    for layer in range(layers):
        for start in range(layer * directions, (layer + 1) * directions):
            found = _cell(atoms, inputs, weights[start * count : (start + 1) * count], has_biases)
            first = first or found
            for one, other in zip(first, found, strict=True):
                atoms.tie(one, other)
        assert first is not None
        shape = (*value[0].shape[:-1], len(first[1]) * directions)
        inputs = atoms.labels(shape, [Factor((len(shape) - 1,), first[1].repeat(directions))])
    assert first is not None
    return [inputs, *_states(atoms, states, value[1:], *first)]


def recurrent_cell(atoms: Atoms, value: Any, x: Labels, states: Any, *weights: Labels) -> Any:
    found = _cell(atoms, x, weights, has_biases=len(weights) > 2)
    results = _states(atoms, states, value if isinstance(value, list | tuple) else [value], *found)
    return results if isinstance(value, list | tuple) else results[0]


def _cell(atoms: Atoms, x: Labels, weights: Sequence[Labels], has_biases: bool) -> tuple[Tensor, Tensor]:
    """The hidden units of a cell, and what is read of it: the same, or a projection of them.

    Without a unit's rows in each gate its state is zero, if it was zero at the beginning.
    """
    by_input, by_state = weights[:2]
    projection = weights[-1] if len(weights) in (3, 5) else None
    size = by_state.shape[1] if projection is None else projection.shape[1]
    hidden = atoms.along(by_input, 0)[:size]
    for each in weights[: 4 if has_biases else 2]:
        atoms.tie(atoms.along(each, 0).reshape(-1, size), hidden[None])
    read = hidden if projection is None else atoms.along(projection, 0)
    if projection is not None:
        atoms.read(hidden, atoms.along(projection, 1))
    atoms.read(read, atoms.along(by_state, 1))
    _read(atoms, x, by_input)
    for each in (by_input, by_state, *([] if projection is None else [projection])):
        atoms.put_out(each, 0)
    return hidden, read


def _states(atoms: Atoms, states: Any, values: Sequence[Any], hidden: Tensor, read: Tensor) -> list[Labels]:
    """The last states, of the first of which the outputs consist; initial ones go with them, or hold them."""
    found = []
    for state, value, units in zip(
        states if isinstance(states, list) else [states], values, (read, hidden), strict=False
    ):
        last = state.rank - 1
        if state.along(last):
            atoms.tie(units, atoms.alone(state, last, "it is a layer or a batch of a recurrent state"))
        else:
            atoms.pin(units, "its initial state is given and cannot shrink")
        found.append(atoms.labels(tuple(value.shape), [Factor((len(value.shape) - 1,), units)]))
    return found
