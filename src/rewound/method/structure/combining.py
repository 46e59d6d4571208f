"""Operations without weights: they move data, combine it element by element, or reduce it.

Operations that move data are run on the atoms themselves: an index goes where its elements go.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rewound.method.structure.atoms import Atoms, Factor, Labels


def flat(things: Sequence[Any]) -> list[Any]:
    out: list[Any] = []
    for each in things:
        out += flat(each) if isinstance(each, list | tuple) else [each]
    return out


def plain(value: Any) -> Any:
    """Labels of what carries no atoms."""
    if isinstance(value, Tensor):
        return Labels(tuple(value.shape))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def shifted(dims: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(d + by for d in dims)


def pointwise(atoms: Atoms, value: Any, given: Sequence[Labels]) -> Labels:
    """Elements at one place are tied; a tensor that has no atoms along a dimension holds the others there."""
    shape, merged = tuple(value.shape), dict[tuple[int, ...], Tensor]()
    aligned = _without_shared(atoms, [_aligned(each, len(shape)) for each in given])
    for each in aligned:
        others = [other for other in aligned if other is not each]
        held = [d for d in range(len(shape)) if any(other.shape[d] > 1 and not other.along(d) for other in others)]
        for factor in atoms.without(each, held, "it is combined with a tensor that cannot shrink"):
            for theirs in (theirs for other in others for theirs in other.factors):
                for d in set(factor.dims) & set(theirs.dims) if theirs.dims != factor.dims else ():
                    atoms.tie(atoms.only(factor, d), atoms.only(theirs, d))
            if any(shape[d] != size for d, size in zip(factor.dims, factor.atoms.shape, strict=True)):
                atoms.pin(factor.atoms, "it is broadcast over")
            elif factor.dims in merged:
                atoms.tie(merged[factor.dims], factor.atoms)
            else:
                merged[factor.dims] = factor.atoms
    return atoms.labels(shape, [Factor(dims, found) for dims, found in merged.items()])


def _without_shared(atoms: Atoms, aligned: Sequence[Labels]) -> list[Labels]:
    """Without what several units share, which stays: the weights of a norm over the size of heads, where heads go.

    Of a buffer this is taken to be so where it is open which dimension shrinks: rotary embeddings are of all heads.
    """
    found = []
    for each in aligned:
        others = [factor for other in aligned if other is not each for factor in other.factors]
        own = list[Factor]()
        for factor in each.factors:
            wider = [other for other in others if set(other.dims) > set(factor.dims)]
            if any(each.is_constant or atoms.goes_without(other, factor.dims) for other in wider):
                atoms.pin(factor.atoms, "several units share it")
            else:
                own.append(factor)
        found.append(replace(each, factors=tuple(own)))
    return found


def inverted(atoms: Atoms, value: Any, *given: Any, **kwargs: Any) -> Labels:
    """What is divided by, or whose logarithm is taken: a parameter would be zero without a unit, and this no number."""
    labelled = [each for each in given if isinstance(each, Labels)]
    if isinstance(given[-1], Labels) and given[-1].is_weight:
        atoms.pin_all(given[-1:], "it is divided by, and would be zero")
    return pointwise(atoms, value, labelled)


def weight_normalised(atoms: Atoms, value: Any, *given: Any) -> Any:
    """A weight that is divided by its norm, which would be zero without a unit."""
    atoms.pin_all([each for each in given if isinstance(each, Labels)], "weight_norm divides by it; remove that first")
    return plain(value)


def _aligned(labels: Labels, rank: int) -> Labels:
    """With dimensions of size 1 before, as broadcasting adds them."""
    by = rank - labels.rank
    factors = tuple(Factor(shifted(factor.dims, by), factor.atoms) for factor in labels.factors)
    return Labels((*[1] * by, *labels.shape), factors, is_constant=labels.is_constant)


def moved(atoms: Atoms, target: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Any:
    """Run on the atoms: an index goes where its elements go."""
    values = value if isinstance(value, list | tuple) else [value]
    factors: list[list[Factor]] = [[] for _ in values]
    source = next(each for each in flat([*args, *kwargs.values()]) if isinstance(each, Labels))
    for factor in source.factors:
        spread = factor.over(source.rank, source.shape).contiguous()

        def put(thing: Any, spread: Tensor = spread) -> Any:
            return spread if isinstance(thing, Labels) else thing

        found = target(*map(put, args), **{key: put(each) for key, each in kwargs.items()})
        for place, each in enumerate(found if isinstance(found, list | tuple) else [found]):
            if each.numel() and bool((each == each.flatten()[0]).all()):  # one of a stack of weights
                atoms.pin(each.flatten()[:1], "it is taken by its index")
            else:
                factors[place].append(Factor(tuple(range(each.ndim)), each))
    out = [
        atoms.labels(tuple(each.shape), found, is_weight=source.is_weight)
        for each, found in zip(values, factors, strict=True)
    ]
    if len({each.shape for each in out}) == 1:  # parts that the code cuts by their number or size stay equal
        for other in out[1:]:
            for one, same in zip(out[0].factors, other.factors, strict=False):
                if one.dims == same.dims:
                    atoms.tie(one.atoms, same.atoms)
    return out if isinstance(value, list | tuple) else out[0]


def shaped_like(atoms: Atoms, value: Any, x: Labels, other: Labels) -> Labels:
    """A view in the shape of another tensor, which goes with it."""
    if value.numel() == torch.Size(x.shape).numel():
        x = moved(atoms, torch.ops.aten.reshape.default, [x, list(value.shape)], {}, value)
    tied = pointwise(atoms, value, [x, other])
    return Labels(tied.shape, tied.factors, x.is_weight)


def spatial(atoms: Atoms, value: Any, x: Labels, count: int) -> Any:
    """So many last dimensions are pooled, and may not shrink; the channels are before them."""
    first, channels = value[0] if isinstance(value, list | tuple) else value, x.rank - count - 1
    labels = atoms.labels(tuple(first.shape), [Factor((channels,), atoms.alone(x, channels, "it is pooled"))])
    return [labels, *plain(value[1:])] if isinstance(value, list | tuple) else labels


def extreme(atoms: Atoms, value: Any, x: Labels, other: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The largest or smallest of two tensors or along a dimension, with its index, or of all."""
    if isinstance(other, Labels):
        return pointwise(atoms, value, [x, other])
    if isinstance(value, list | tuple):
        return [reduction(atoms, value[0], x, other, *args, **kwargs)] * len(value)
    return reduction(atoms, value, x)


def softmax(atoms: Atoms, value: Any, x: Labels, dim: int, *args: Any, **kwargs: Any) -> Labels:
    return atoms.labels(tuple(value.shape), atoms.without(x, [dim], "a softmax is taken over it"))


def scanned(atoms: Atoms, value: Any, x: Labels, dim: int, *args: Any, **kwargs: Any) -> Labels:
    return atoms.labels(tuple(value.shape), atoms.without(x, [dim], "it is summed over step by step"))


def added_at(atoms: Atoms, value: Any, x: Labels, dim: int, index: Labels, source: Labels, *args: Any, **_: Any) -> Any:
    """Parts of one tensor are added to another at the places that an index says, as messages to the nodes of a graph.

    An index that was made in the shape of what is added goes with it. One of another origin has no atoms; if its size
    is in the code, a trial finds that.
    """
    reason, sides = "an index says where it is added", [x, source]
    if index.rank == x.rank:
        sides += [index] if index.factors else []
    else:
        atoms.pin_all([index], reason)
    return pointwise(atoms, value, [Labels(each.shape, tuple(atoms.without(each, [dim], reason))) for each in sides])


def spread(
    atoms: Atoms,
    value: Any,
    x: Labels,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Labels:
    """A variance or standard deviation; that of all elements has no dimension, and may say there if it is unbiased."""
    return reduction(atoms, value, x, None if isinstance(dim, bool) else dim, keepdim)


def reduction(atoms: Atoms, value: Any, x: Labels, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Labels:
    given = range(x.rank) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    dims = [d % x.rank for d in given]
    kept = atoms.without(x, dims, "it is reduced over")
    if not keepdim:
        kept = [Factor(tuple(d - sum(e < d for e in dims) for d in f.dims), f.atoms) for f in kept]
    return atoms.labels(tuple(value.shape), kept)


def joined(atoms: Atoms, value: Any, parts: Sequence[Labels], dim: int = 0) -> Labels:
    """A concatenation: one after the other along its dimension, tied along the others."""
    rank = len(value.shape)
    dim %= rank
    kinds = {factor.dims for part in parts for factor in part.along(dim)}
    together = kinds.pop() if len(kinds) == 1 else (dim,)
    pieces = []
    for part in parts:
        found = [f.atoms if f.dims == together else atoms.only(f, dim) for f in part.along(dim)]
        for more in found[1:]:
            atoms.tie(found[0], more)
        empty = torch.zeros([part.shape[d] for d in together], dtype=torch.int64)
        pieces.append(found[0] if found else empty)
    factors = [Factor(together, torch.cat(pieces, together.index(dim)))]
    for d in (d for d in range(rank) if d not in together):
        sides = [[atoms.only(f, d) for f in part.factors if d in f.dims and dim not in f.dims] for part in parts]
        labelled = [side for side in sides if side]
        for side in labelled:
            for each in side:
                atoms.tie(labelled[0][0], each)
        if labelled and len(labelled) < len(parts):
            atoms.pin(labelled[0][0], "it is joined with what cannot shrink")
        elif labelled:
            factors.append(Factor((d,), labelled[0][0]))
    return atoms.labels(tuple(value.shape), factors)


def stacked(atoms: Atoms, value: Any, parts: Sequence[Labels], dim: int = 0) -> Labels:
    rank = len(value.shape)
    dim %= rank
    whole = tuple(size for d, size in enumerate(value.shape) if d != dim)
    tied = pointwise(atoms, torch.empty(whole, device="meta"), list(parts))
    return atoms.labels(value.shape, [Factor(tuple(d + (d >= dim) for d in f.dims), f.atoms) for f in tied.factors])


def padded(atoms: Atoms, value: Any, x: Labels, pads: Sequence[int], *args: Any, **kwargs: Any) -> Labels:
    """What is added at the ends stays; where nothing is labelled, nothing changes."""
    around = {x.rank - 1 - place: (pads[2 * place], pads[2 * place + 1]) for place in range(len(pads) // 2)}
    factors = []
    for factor in x.factors:
        if any(min(around.get(d, (0, 0))) < 0 for d in factor.dims):
            atoms.pin(factor.atoms, "it is cut by a negative padding")
            continue
        ends = [end for d in reversed(factor.dims) for end in around.get(d, (0, 0))]
        factors.append(Factor(factor.dims, torch.nn.functional.pad(factor.atoms, ends)))
    return atoms.labels(tuple(value.shape), factors)


def indexed(atoms: Atoms, value: Any, x: Labels, indices: Sequence[Any]) -> Labels:
    """Looked up by tensors along the first dimensions: those stay, and the others move behind what was found.

    What is found in a stack of matrices, such as those of experts, are weights; rows of a table are not.
    """
    count = len(indices)
    if any(not isinstance(each, Labels) or each.factors for each in indices):
        atoms.pin_all([x, *(each for each in indices if isinstance(each, Labels))], "it is indexed by computed values")
        return Labels(tuple(value.shape))
    kept = atoms.without(x, range(count), "it is looked up by an index")
    by = len(value.shape) - x.rank
    factors = [Factor(shifted(f.dims, by), f.atoms) for f in kept]
    return atoms.labels(tuple(value.shape), factors, is_weight=x.is_weight and x.rank - count > 1)


def selected(atoms: Atoms, value: Any, x: Labels, dim: int, index: Labels) -> Labels:
    """Looked up by one tensor along a dimension, which stays."""
    atoms.pin_all([index], "it is an index")
    kept = atoms.without(x, [dim], "it is looked up by an index")
    return atoms.labels(tuple(value.shape), kept, is_weight=x.is_weight and x.rank > 2)


def gated(atoms: Atoms, value: Any, x: Labels, dim: int = -1) -> Labels:
    """A gated linear unit: the first half of a dimension times a function of the second."""
    return pointwise(atoms, value, moved(atoms, torch.ops.aten.chunk.default, [x, 2, dim], {}, [value, value]))
