"""What each operation of a traced network ties: a rule for those that compute, none for those that only move data.

Operations that move data (view, permute, split, roll, ...) are run on the atoms themselves. Pointwise operations are
known by torch's own tag. What is in no table pins all that it touches: nothing is removed that was not understood.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rewound.method.structure.atoms import Atoms, Factor, Labels

Rule = Callable[..., Any]

_MOVES = """
    _unsafe_view channel_shuffle chunk expand expand_as flatten flip movedim narrow numpy_T permute pixel_shuffle
    pixel_unshuffle repeat reshape roll select slice split split_with_sizes squeeze t tile transpose unbind
    unflatten unfold unsqueeze view view_as
"""
MOVES = frozenset(_MOVES.split())
_KEEPS = """
    _to_copy alias alpha_dropout celu clone contiguous detach dropout dropout_ elu_ empty_like feature_dropout float
    full_like hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ leaky_relu_ lift_fresh_copy
    masked_fill masked_fill_ mish native_dropout ones_like prelu rand_like relu6 relu_ silu_ softplus to type_as
    where zeros_like
"""
KEEPS = frozenset(_KEEPS.split())
_SPATIAL = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d avg_pool1d avg_pool2d avg_pool3d
    max_pool1d max_pool2d max_pool2d_with_indices max_pool3d reflection_pad2d replication_pad2d upsample_bicubic2d
    upsample_bilinear2d upsample_nearest1d upsample_nearest2d
"""
SPATIAL = frozenset(_SPATIAL.split())


def name_of(target: Any) -> str:
    """An operation's plain name: "conv2d" of aten.conv2d.default."""
    return str(target).removeprefix("aten.").split(".")[0]


def applied(atoms: Atoms, target: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Any:
    """The labels of what an operation gives; `args` have labels where tensors were, `value` is the traced result."""
    name, given = name_of(target), [each for each in _flat([*args, *kwargs.values()]) if isinstance(each, Labels)]
    if value is None or not any(each.factors for each in given):
        return _plain(value)  # an assertion, or nothing that could go
    if name in RULES:
        return RULES[name](atoms, value, *args, **kwargs)
    if name in KEEPS or torch.Tag.pointwise in getattr(target, "tags", ()):
        return pointwise(atoms, value, given)
    if name in MOVES and len(given) == 1:
        return moved(atoms, target, args, kwargs, value)
    if name in SPATIAL:
        return spatial(atoms, value, given[0])
    atoms.pin_all(given, f"the operation {name} is not known")
    return _plain(value)


def _flat(things: Sequence[Any]) -> list[Any]:
    out: list[Any] = []
    for each in things:
        out += _flat(each) if isinstance(each, list | tuple) else [each]
    return out


def _plain(value: Any) -> Any:
    """Labels of what carries no atoms."""
    if isinstance(value, Tensor):
        return Labels(tuple(value.shape))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def pointwise(atoms: Atoms, value: Any, given: Sequence[Labels]) -> Labels:
    """Elements at one place are tied; a tensor that has no atoms along a dimension holds the others there."""
    shape, merged = tuple(value.shape), dict[tuple[int, ...], Tensor]()
    aligned = [_aligned(each, len(shape)) for each in given]
    for each in aligned:
        others = [other for other in aligned if other is not each]
        held = [d for d in range(len(shape)) if any(other.shape[d] > 1 and not other.along(d) for other in others)]
        for factor in _others(atoms, each, held, "it is combined with a tensor that cannot shrink"):
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


def _aligned(labels: Labels, rank: int) -> Labels:
    """With dimensions of size 1 before, as broadcasting adds them."""
    by = rank - labels.rank
    factors = tuple(Factor(_shift(factor.dims, by), factor.atoms) for factor in labels.factors)
    return Labels((*[1] * by, *labels.shape), factors)


def moved(atoms: Atoms, target: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Any:
    """Run on the atoms: an index goes where its elements go."""
    values = value if isinstance(value, list | tuple) else [value]
    factors: list[list[Factor]] = [[] for _ in values]
    source = next(each for each in _flat([*args, *kwargs.values()]) if isinstance(each, Labels))
    for factor in source.factors:
        spread = factor.over(source.rank, source.shape).contiguous()

        def put(thing: Any, spread: Tensor = spread) -> Any:
            return spread if isinstance(thing, Labels) else thing

        found = target(*map(put, args), **{key: put(each) for key, each in kwargs.items()})
        for place, each in enumerate(found if isinstance(found, list | tuple) else [found]):
            factors[place].append(Factor(tuple(range(each.ndim)), each))
    out = [
        atoms.labels(tuple(each.shape), found, is_weight=source.is_weight)
        for each, found in zip(values, factors, strict=True)
    ]
    return out if isinstance(value, list | tuple) else out[0]


def spatial(atoms: Atoms, value: Any, x: Labels) -> Any:
    """Batch and channels stay apart; the rest may not shrink."""
    first = value[0] if isinstance(value, list | tuple) else value
    labels = atoms.labels(tuple(first.shape), [Factor((1,), _along(atoms, x, 1, "it is pooled"))])
    return [labels, *_plain(value[1:])] if isinstance(value, list | tuple) else labels


def _atoms_of(atoms: Atoms, x: Labels, dim: int) -> Tensor:
    """The atoms of one dimension."""
    found = [atoms.only(factor, dim) for factor in x.along(dim)]
    if not found:
        return torch.zeros(x.shape[dim], dtype=torch.int64)
    for other in found[1:]:
        atoms.tie(found[0], other)
    return found[0]


def _along(atoms: Atoms, x: Labels, dim: int, reason: str) -> Tensor:
    """The same; factors that do not have the dimension are pinned."""
    for factor in x.factors:
        if dim not in factor.dims:
            atoms.pin(factor.atoms, reason)
    return _atoms_of(atoms, x, dim)


def _others(atoms: Atoms, x: Labels, dims: Sequence[int], reason: str) -> list[Factor]:
    """The factors without these dimensions, which are pinned where they are labelled."""
    dims = [d % x.rank for d in dims]
    kept = []
    for factor in x.factors:
        touched = [d for d in factor.dims if d in dims]
        if touched and len(touched) == len(factor.dims):
            atoms.pin(factor.atoms, reason)
        else:
            kept.append(_tied(atoms, factor, [d for d in factor.dims if d not in dims]) if touched else factor)
    return kept


def _tied(atoms: Atoms, factor: Factor, rest: Sequence[int]) -> Factor:
    """The factor over some of its dimensions; over the others it is tied."""
    places = [factor.dims.index(d) for d in rest]
    order = [*places, *[p for p in range(len(factor.dims)) if p not in places]]
    rows = factor.atoms.permute(order).flatten(len(rest))
    atoms.tie(rows, rows[..., :1].contiguous())
    return Factor(tuple(rest), rows[..., 0].contiguous())


# Rules: (atoms, traced value, the operation's own arguments)


def convolution(
    atoms: Atoms, value: Any, x: Labels, weight: Labels, bias: Labels | None = None, *args: Any, **kwargs: Any
) -> Labels:
    groups = _groups(args, kwargs)
    inputs = _along(atoms, x, 1 if x.rank == weight.rank else 0, "it is a dimension that a convolution runs over")
    outputs, reads = _atoms_of(atoms, weight, 0), _atoms_of(atoms, weight, 1)
    _pin_kernel(atoms, weight)
    if groups == 1:
        atoms.tie(inputs, reads)
    else:
        in_groups, out_groups = inputs.reshape(groups, -1), outputs.reshape(groups, -1)
        if in_groups.shape[1] == 1:  # depthwise: whole groups go
            atoms.pin(reads, "a depthwise convolution reads one channel")
            atoms.tie(out_groups, in_groups)
        else:  # every group loses the same places
            atoms.tie(in_groups, reads[None])
            atoms.tie(out_groups, out_groups[:1])
    return _put_out(atoms, value, outputs, bias, 1 if x.rank == weight.rank else 0)


def transposed_convolution(
    atoms: Atoms, value: Any, x: Labels, weight: Labels, bias: Labels | None = None, *args: Any, **kwargs: Any
) -> Labels:
    groups = _groups(args, kwargs)
    inputs = _along(atoms, x, 1, "it is a dimension that a convolution runs over")
    atoms.tie(inputs, _atoms_of(atoms, weight, 0))
    outputs = _atoms_of(atoms, weight, 1)
    _pin_kernel(atoms, weight)
    if groups > 1:
        atoms.pin_all([x, weight], "a transposed convolution has groups")
        outputs = outputs.repeat(groups)
    return _put_out(atoms, value, outputs, bias, 1)


def _groups(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The groups of a convolution: of what follows its bias, the only whole number that is in no list."""
    whole = [each for each in args if isinstance(each, int) and not isinstance(each, bool)]
    return int(kwargs.get("groups", whole[-1] if whole else 1))


def _pin_kernel(atoms: Atoms, weight: Labels) -> None:
    for factor in weight.factors:
        if not {0, 1} & set(factor.dims):
            atoms.pin(factor.atoms, "it is a dimension of a kernel")


def _put_out(atoms: Atoms, value: Any, outputs: Tensor, bias: Labels | None, dim: int) -> Labels:
    if isinstance(bias, Labels):
        atoms.tie(outputs, _atoms_of(atoms, bias, 0))
    return atoms.labels(tuple(value.shape), [Factor((dim,), outputs)])


def linear(atoms: Atoms, value: Any, x: Labels, weight: Labels, bias: Labels | None = None) -> Labels:
    last = x.rank - 1
    for factor in x.along(last):
        atoms.tie(atoms.only(factor, last), _atoms_of(atoms, weight, 1))
    if not x.along(last):
        atoms.pin(_atoms_of(atoms, weight, 1), "it reads what cannot shrink")
    kept = [factor for factor in x.factors if last not in factor.dims]
    outputs = _atoms_of(atoms, weight, 0)
    if isinstance(bias, Labels):
        atoms.tie(outputs, _atoms_of(atoms, bias, 0))
    return atoms.labels(tuple(value.shape), [*kept, Factor((len(value.shape) - 1,), outputs)])


def product(atoms: Atoms, value: Any, x: Labels, y: Labels) -> Labels:
    """A matrix product: the dimension that is summed over is tied, or stays where both sides are computed."""
    if x.rank == 1 or y.rank == 1:
        atoms.pin_all([x, y], "it is multiplied by a vector")
        return Labels(tuple(value.shape))
    rank = len(value.shape)
    if not (x.is_weight or y.is_weight):
        reason = "it is summed over in a product of two computed tensors, whose scale may depend on its size"
        x = Labels(x.shape, tuple(_others(atoms, x, [-1], reason)))
        y = Labels(y.shape, tuple(_others(atoms, y, [-2], reason)))
    else:
        _tie_summed(atoms, x, x.rank - 1, y, y.rank - 2)
    left = [Factor(_shift(f.dims, rank - x.rank), f.atoms) for f in x.factors if x.rank - 1 not in f.dims]
    right = [Factor(_shift(f.dims, rank - y.rank), f.atoms) for f in y.factors if y.rank - 2 not in f.dims]
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


def _shift(dims: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(d + by for d in dims)


def _tie_summed(atoms: Atoms, x: Labels, dx: int, y: Labels, dy: int) -> None:
    of_x, of_y = x.along(dx), y.along(dy)
    for one in of_x:
        for other in of_y:
            atoms.tie(atoms.only(one, dx), atoms.only(other, dy))
    for side, others in ((of_x, of_y), (of_y, of_x)):
        if not others:
            for factor in side:
                atoms.pin(factor.atoms, "it reads what cannot shrink")


def added_product(atoms: Atoms, value: Any, bias: Labels, x: Labels, y: Labels, **kwargs: Any) -> Labels:
    return pointwise(atoms, value, [product(atoms, value, x, y), bias])


def embedding(atoms: Atoms, value: Any, weight: Labels, indices: Labels, *args: Any, **kwargs: Any) -> Labels:
    for factor in weight.along(0):
        atoms.pin(factor.atoms, "it is looked up by an index")
    columns = _atoms_of(atoms, weight, 1)
    return atoms.labels(tuple(value.shape), [Factor((len(value.shape) - 1,), columns)])


def batch_norm(atoms: Atoms, value: Any, x: Labels, *others: Any, **kwargs: Any) -> Labels:
    channels = [atoms.only(factor, 1) for factor in x.along(1)]
    for each in others[:4]:
        if isinstance(each, Labels) and channels:
            atoms.tie(channels[0], _atoms_of(atoms, each, 0))
        elif isinstance(each, Labels):
            atoms.pin_all([each], "it normalises what cannot shrink")
    return atoms.labels(tuple(value.shape), x.factors)


def group_norm(
    atoms: Atoms, value: Any, x: Labels, groups: int, weight: Labels | None = None, bias: Labels | None = None, *_: Any
) -> Labels:
    for factor in x.along(1):
        rows = atoms.only(factor, 1).reshape(groups, -1)
        atoms.tie(rows, rows[:, :1])  # whole groups: statistics are those of a group
        for each in (weight, bias):
            if isinstance(each, Labels):
                atoms.tie(rows.reshape(-1), _atoms_of(atoms, each, 0))
    if not x.along(1):
        atoms.pin_all([each for each in (weight, bias) if each], "it normalises what cannot shrink")
    kept = _others(atoms, x, range(2, x.rank), "it is normalised over")
    return atoms.labels(tuple(value.shape), kept)


def layer_norm(atoms: Atoms, value: Any, x: Labels, shape: Sequence[int], *others: Any, **kwargs: Any) -> Labels:
    reason = "it is normalised over: without some of it the statistics change"
    kept = _others(atoms, x, range(x.rank - len(shape), x.rank), reason)
    atoms.pin_all([each for each in others if isinstance(each, Labels)], reason)
    return atoms.labels(tuple(value.shape), kept)


def softmax(atoms: Atoms, value: Any, x: Labels, dim: int, *args: Any, **kwargs: Any) -> Labels:
    return atoms.labels(tuple(value.shape), _others(atoms, x, [dim], "a softmax is taken over it"))


def reduction(atoms: Atoms, value: Any, x: Labels, dim: Any = None, keepdim: Any = False, **kwargs: Any) -> Any:
    if isinstance(value, list | tuple) or kwargs.get("correction") or not isinstance(keepdim, bool):
        atoms.pin_all([x], "it is reduced over")
        return _plain(value)
    given = range(x.rank) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    dims = [d % x.rank for d in given]
    kept = _others(atoms, x, dims, "it is reduced over")
    if not keepdim:
        kept = [Factor(tuple(d - sum(e < d for e in dims) for d in f.dims), f.atoms) for f in kept]
    return atoms.labels(tuple(value.shape), kept)


def attention(
    atoms: Atoms, value: Any, q: Labels, k: Labels, v: Labels, mask: Labels | None = None, *args: Any, **kwargs: Any
) -> Labels:
    """Whole heads go: the size of a head is in the scale; query heads go with the key and value head they share."""
    reason, head = "it is the size of an attention head, or a sequence", q.rank - 3
    heads = []
    for side in (q, k, v):
        kept = Labels(side.shape, tuple(_others(atoms, side, [-1, -2], reason)))
        heads.append(_along(atoms, kept, head, "it is a batch of an attention"))
    for other in heads[1:]:
        shared = heads[0].numel() // other.numel()
        atoms.tie(heads[0], other.repeat_interleave(shared) if shared > 1 else other)
    if isinstance(mask := kwargs.get("attn_mask", mask), Labels):
        scores = torch.empty((*q.shape[:-1], k.shape[-2]), device="meta")
        pointwise(atoms, scores, [Labels(tuple(scores.shape), (Factor((head,), heads[0]),)), mask])
    return atoms.labels(tuple(value.shape), [Factor((head,), heads[0])])


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
    """Looked up by tensors along the first dimensions: those stay, and the others move behind what was found."""
    count = len(indices)
    if any(not isinstance(each, Labels) or each.factors for each in indices):
        atoms.pin_all([x, *(each for each in indices if isinstance(each, Labels))], "it is indexed by computed values")
        return Labels(tuple(value.shape))
    kept = _others(atoms, x, range(count), "it is looked up by an index")
    by = len(value.shape) - x.rank
    return atoms.labels(tuple(value.shape), [Factor(_shift(f.dims, by), f.atoms) for f in kept])


def stacked(atoms: Atoms, value: Any, parts: Sequence[Labels], dim: int = 0) -> Labels:
    rank = len(value.shape)
    dim %= rank
    whole = tuple(size for d, size in enumerate(value.shape) if d != dim)
    tied = pointwise(atoms, torch.empty(whole, device="meta"), list(parts))
    return atoms.labels(value.shape, [Factor(tuple(d + (d >= dim) for d in f.dims), f.atoms) for f in tied.factors])


def einsum(atoms: Atoms, value: Any, equation: str, operands: Sequence[Labels], **kwargs: Any) -> Labels:
    """Letters are dimensions; what is summed over is tied, or stays where no side is a weight."""
    if "." in equation or "->" not in equation:
        atoms.pin_all(operands, "an einsum with an ellipsis reads it")
        return Labels(tuple(value.shape))
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
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
    found_out = [Factor((output.index(letter),), each) for letter, each in known.items() if letter in output]
    return atoms.labels(tuple(value.shape), found_out)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution),
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), product),
    **dict.fromkeys(("addmm", "baddbmm"), added_product),
    "embedding": embedding,
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), softmax),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std"), reduction),
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("cat", "concat", "concatenate"), joined),
    "stack": stacked,
    **dict.fromkeys(("constant_pad_nd", "pad"), padded),
    "index": indexed,
    "einsum": einsum,
}
