"""Which indices of a network's tensors live or die together: atoms, and operations that tie them.

Every index of every dimension of a parameter or buffer is an atom. An operation ties atoms: what a convolution puts out
is what the next one reads. Atoms that are tied to what cannot go (the network's inputs and outputs, a dimension that is
normalised over) are pinned, with a reason.

A tensor on the way through the network carries atoms as factors: a factor says, for each index of some of its
dimensions, which atom it goes with; 0 is the atom of what stays. Most factors have one dimension. A view that splits
one dimension into two makes a factor of two; it stays so until an operation decides which of them can shrink (heads,
not their size), or until the end (`Atoms.settle`), when the choice that leaves most units is taken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

STAYS = 0


@dataclass(frozen=True)
class Factor:
    """Atoms over some dimensions of a tensor: `atoms` has these dimensions, in their order."""

    dims: tuple[int, ...]
    atoms: Tensor

    def over(self, rank: int, shape: Sequence[int]) -> Tensor:
        """The atoms over all dimensions of a tensor of that shape."""
        spread = [self.atoms.shape[self.dims.index(d)] if d in self.dims else 1 for d in range(rank)]
        return self.atoms.reshape(spread).expand(tuple(shape))


@dataclass(frozen=True)
class Labels:
    """The factors of a tensor, and where it comes from."""

    shape: tuple[int, ...]
    factors: tuple[Factor, ...] = ()
    is_weight: bool = False
    """Whether it is a parameter or a rearrangement of one."""
    is_constant: bool = False
    """Whether it is a buffer, or computed of buffers: it shrinks beside units, and no mask makes it zero."""

    @property
    def rank(self) -> int:
        return len(self.shape)

    def along(self, dim: int) -> list[Factor]:
        """The factors that involve a dimension."""
        return [factor for factor in self.factors if dim % self.rank in factor.dims]


@dataclass
class Atoms:
    """Atoms, and what was found about them: ties and pins are noted, and resolved all at once by `settle`."""

    count: int = 1
    ties: list[Tensor] = field(default_factory=list)
    """Pairs of atoms, in tensors of two rows."""
    pins: list[tuple[Tensor, str]] = field(default_factory=list)
    """Atoms that must stay, and why."""
    produced: list[Tensor] = field(default_factory=list)
    """Atoms of weights that put something out, by operation."""
    filters: list[Tensor] = field(default_factory=list)
    """Those of them that are filters of convolutions."""
    reads: list[Tensor] = field(default_factory=list)
    """Atoms that a layer sums over: what is tied to none of them has no effect on what the example gives."""
    joint: list[Factor] = field(default_factory=list)
    """Factors of several dimensions, all of which must be boxes once units are gone."""
    _roots: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """The components of atoms by the first `_joined` ties."""
    _joined: int = 0

    def fresh(self, count: int) -> Tensor:
        """New atoms, tied to nothing."""
        self.count += count
        return torch.arange(self.count - count, self.count)

    def tie(self, one: Tensor, other: Tensor) -> None:
        """What goes with one goes with the other; tensors of one shape, or that expand to one."""
        shape = torch.add(one, other).shape
        self.ties.append(torch.stack([each.expand(shape).reshape(-1) for each in (one, other)]))

    def read(self, one: Tensor, other: Tensor) -> None:
        """Tie what a layer sums over: what it is given and its weights."""
        self.tie(one, other)
        self.reads.append(one.reshape(-1))

    def pin(self, atoms: Tensor, reason: str) -> None:
        """What must stay."""
        self.pins.append((atoms.reshape(-1), reason))

    def pin_all(self, labels: Iterable[Labels], reason: str) -> None:
        for each in labels:
            for factor in each.factors:
                self.pin(factor.atoms, reason)

    def only(self, factor: Factor, dim: int) -> Tensor:
        """The atoms along one dimension of a factor, which the others may not change: they are tied over those."""
        place = factor.dims.index(dim)
        rows = factor.atoms.movedim(place, 0).reshape(factor.atoms.shape[place], -1)
        if rows.shape[1] > 1:
            self.tie(rows, rows[:, :1].contiguous())
        return rows[:, 0].contiguous()

    def along(self, x: Labels, dim: int) -> Tensor:
        """The atoms of one dimension of a tensor."""
        found = [self.only(factor, dim) for factor in x.along(dim)]
        if not found:
            return torch.zeros(x.shape[dim], dtype=torch.int64)
        for other in found[1:]:
            self.tie(found[0], other)
        return found[0]

    def alone(self, x: Labels, dim: int, reason: str) -> Tensor:
        """The same; factors that do not have the dimension are pinned."""
        for factor in x.factors:
            if dim not in factor.dims:
                self.pin(factor.atoms, reason)
        return self.along(x, dim)

    def put_out(self, weight: Labels, dim: int, *, filters: bool = False) -> None:
        """Note the dimension of a weight along which it puts something out, and whether by filters of a convolution."""
        found = [factor.atoms.reshape(-1) for factor in weight.along(dim)]
        self.produced += found
        self.filters += found if filters else []

    def without(self, x: Labels, dims: Sequence[int], reason: str) -> list[Factor]:
        """The factors without these dimensions, which are pinned where they are labelled."""
        dims = [d % x.rank for d in dims]
        kept = []
        for factor in x.factors:
            touched = [d for d in factor.dims if d in dims]
            if touched and len(touched) == len(factor.dims):
                self.pin(factor.atoms, reason)
            else:
                kept.append(self.tied(factor, [d for d in factor.dims if d not in dims]) if touched else factor)
        return kept

    def tied(self, factor: Factor, rest: Sequence[int]) -> Factor:
        """The factor over some of its dimensions; over the others it is tied."""
        places = [factor.dims.index(d) for d in rest]
        order = [*places, *[p for p in range(len(factor.dims)) if p not in places]]
        rows = factor.atoms.permute(order).flatten(len(rest))
        self.tie(rows, rows[..., :1].contiguous())
        return Factor(tuple(rest), rows[..., 0].contiguous())

    def goes_without(self, factor: Factor, dims: Iterable[int]) -> bool:
        """Whether what goes of a factor is decided already, and not by these dimensions, over which it is tied."""
        new = torch.arange(len(self._roots), self.count)
        edges = torch.cat([torch.zeros(2, 0, dtype=torch.int64), *self.ties[self._joined :]], 1)
        self._roots, self._joined = _joined(torch.cat([self._roots, new]), edges), len(self.ties)
        atoms = self._roots[factor.atoms]
        tied = {d for d, place in zip(factor.dims, range(atoms.ndim), strict=True) if _constant_along(atoms, place)}
        return tied >= set(dims) and tied < set(factor.dims)

    def labels(self, shape: Sequence[int], factors: Iterable[Factor], *, is_weight: bool = False) -> Labels:
        """Labels with factors as small as they can be; those of several dimensions are remembered.

        An error for a factor of another shape: a rule has taken the operation for something else.
        """
        found = []
        for factor in factors:
            if tuple(factor.atoms.shape) != (sizes := tuple(shape[d] for d in factor.dims)):
                raise ValueError(f"the dimensions {factor.dims} have {sizes} elements and {factor.atoms.shape} atoms")
            small = _reduced(factor)
            if small is not None:
                found.append(small)
                if len(small.dims) > 1:
                    self.joint.append(small)
        return Labels(tuple(shape), tuple(found), is_weight)

    def settle(self) -> tuple[Tensor, dict[int, str]]:
        """The component of each atom (STAYS for those that are pinned), and why atoms are pinned, by atom.

        What is left of factors with several dimensions is tied first, each so that most units remain. What no layer
        reads on the example stays: a longer input may read it, as it does the rest of a table of positions.
        """
        pinned = torch.cat([torch.zeros(0, dtype=torch.int64), *[atoms for atoms, _ in self.pins]])
        edges = torch.cat([torch.stack([pinned, torch.zeros_like(pinned)]), *self.ties], 1)
        roots = _joined(torch.arange(self.count), edges)
        for factor in self.joint:
            atoms = roots[factor.atoms]
            free = [d for d in factor.dims if not _constant_along(atoms, factor.dims.index(d))]
            if len(free) > 1:

                def units_left(dim: int, atoms: Tensor = atoms, factor: Factor = factor) -> int:
                    rows = atoms.movedim(factor.dims.index(dim), 0).flatten(1)
                    return len({tuple(sorted(set(row))) for row in rows.tolist() if STAYS not in row})

                self.only(factor, max(free, key=units_left))
                roots = _joined(roots, self.ties[-1])
        read = torch.cat([torch.zeros(1, dtype=torch.int64), *self.reads])
        unread = ~torch.isin(roots, roots[read])
        self.pin(unread.nonzero(), "the example does not read it")
        return roots.masked_fill(unread, STAYS), self._reasons()

    def _reasons(self) -> dict[int, str]:
        """The first reason for each atom that is tied to one that was pinned."""
        ties = torch.cat([torch.zeros(2, 0, dtype=torch.int64), *self.ties], 1)
        roots = _joined(torch.arange(self.count), ties[:, (ties != STAYS).all(0)])
        of_root: dict[int, str] = {}
        for atoms, reason in self.pins:
            for root in set(roots[atoms].tolist()):
                of_root.setdefault(root, reason)
        return {atom: of_root[root] for atom, root in enumerate(roots.tolist()) if root in of_root}


def labelled(atoms: Atoms, shape: tuple[int, ...], *, is_weight: bool = False, is_constant: bool = False) -> Labels:
    """Labels of a tensor whose every index may go by itself."""
    factors = [Factor((dim,), atoms.fresh(size)) for dim, size in enumerate(shape) if size > 1]
    return Labels(shape, tuple(factors), is_weight, is_constant)


def _joined(roots: Tensor, edges: Tensor) -> Tensor:
    """The components once these edges are added, each named by its smallest atom: so what is tied to STAYS stays.

    Every root takes the smallest of its neighbours, and all atoms follow; that halves the components that are still to
    be joined.
    """
    roots = roots.clone()
    while True:
        ends = roots[edges]
        differ = ends[0] != ends[1]
        if not bool(differ.any()):
            return roots
        edges = edges[:, differ]
        low, high = ends[:, differ].sort(0).values
        roots.scatter_reduce_(0, high, low, "amin")
        while not torch.equal(further := roots[roots], roots):
            roots = further


def _constant_along(atoms: Tensor, place: int) -> bool:
    return bool((atoms == atoms.narrow(place, 0, 1)).all())


def _reduced(factor: Factor) -> Factor | None:
    """The factor without dimensions along which nothing changes; None if nothing is labelled."""
    if not bool(factor.atoms.any()):
        return None
    dims, atoms = list(factor.dims), factor.atoms
    for dim in factor.dims:
        place = dims.index(dim)
        if atoms.shape[place] == 1 or (len(dims) > 1 and _constant_along(atoms, place)):
            if len(dims) == 1:
                break
            atoms = atoms.select(place, 0)
            dims.pop(place)
    return Factor(tuple(dims), atoms.contiguous())
