"""Whether a small network trains as the masked one does: what it puts out in training mode, and its gradients.

Nothing of training mode is traced, and no graph says what a hook or an autograd function of somebody's own does with a
gradient. So one pass of each is compared, without dropout, which would drop other units where there are fewer. Others
follow, since what a pass changes for later ones (a running scale) shows in what these put out.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rewound.foundations.intercepting import Intercepting
from rewound.method.copies import evaluating, to_run
from rewound.method.structure.examples import Call, lengthened, safe_ids, tensors_in
from rewound.method.structure.kept import KeptIndices, cut
from rewound.method.structure.trials import Trial, distance, largest_of, rounding, told


def training_difference(tried: Sequence[Trial], kept: KeptIndices) -> str:
    """What is wrong with the small network in training mode, in words; nothing if it trains as the masked one.

    Seen with drawn weights, if the network trains with them, as no branch is silent then.
    """
    for trial in reversed(tried):
        if (passes := _passes(trial)) is not None:
            difference = passes.difference(kept)
            if difference or passes.has_numbers:
                return difference
    return ""


@dataclass(frozen=True)
class _Passes:
    """A masked and a small network, an example that the masked one trains on, and what it puts out then."""

    trial: Trial
    example: Call
    expected: list[Tensor]

    @property
    def has_numbers(self) -> bool:
        return not any(bool(each.isnan().any()) for each in self.expected)

    def difference(self, kept: KeptIndices) -> str:
        """Of both networks' outputs and, where code decides itself where gradients go, of these."""
        small = _training(self.trial.small)
        try:
            with torch.enable_grad(), _decisions() as decisions:
                outputs = _trained(small, self.example)
        except Exception as error:  # whatever a module's own code raises
            return (
                f"it does not run in training mode ({told(error, small)}): a part that is used only there reads units "
                "that are gone"
            )
        off = distance([each.detach() for each in outputs], self.expected)
        if self._differ(off, lambda seed: _values(self.trial.masked, self.example, seed), self.expected):
            how = "differ" if off < torch.inf else "have other shapes"
            return (
                f"its outputs {how} in training mode: what only training uses or returns, or keeps as a loss or for "
                "later passes, has units that are gone"
            )
        if (decisions or _has_functions(outputs)) and self._gradients_differ(kept):
            return (
                "its gradients differ in training mode: a hook or an autograd function computes them from units that "
                "are gone, or from their number"
            )
        return ""

    def _gradients_differ(self, kept: KeptIndices) -> bool:
        """Those of what is left; they do not count where the masked network's are no numbers, as of a root at zero."""

        def of_masked(seed: int = 0) -> list[Tensor]:
            return _gradients(self.trial.masked, self.example, kept, seed)

        try:
            expected = of_masked()
        except Exception:  # whatever its own code raises
            return False
        if not all(math.isfinite(largest_of(each)) for each in expected if each.numel()):
            return False
        given = _gradients(self.trial.small, self.example, {})
        return self._differ(distance(given, expected), of_masked, expected)

    def _differ(self, off: float, again: Callable[[int], list[Tensor]], expected: Sequence[Tensor]) -> bool:
        """Whether so large a distance is a difference, and not one of rounding, or of draws.

        Draws count if the small network makes others: those of the same shapes are the same, as both begin with one
        seed. Where they matter, outputs of the same shapes cannot be told apart.
        """
        if off <= self.trial.tolerance:
            return False
        masked, small = self.trial.masked, self.trial.small
        if _draws(masked, self.example) != _draws(small, self.example):
            bound = self.trial.tolerance if off < math.inf else sys.float_info.max
            if any(distance(again(seed), expected) > bound for seed in range(1, 6)):
                return False
        return off > rounding(masked, lambda: again(0), expected)


def _passes(trial: Trial) -> _Passes | None:
    """An example that the masked network trains on, of more rows if it must be, and what it puts out; None if none.

    BatchNorm needs more than one value.
    """
    for example in (trial.examples[0], _more_rows(trial.masked, trial.examples[0])):
        with suppress(Exception):  # whatever its own code raises
            return _Passes(trial, example, _values(trial.masked, example))
    return None


def _training(model: nn.Module) -> nn.Module:
    """A copy with the same weights, in training mode."""
    made = to_run(model)
    made.train()
    return made


def _trained(model: nn.Module, example: Call, seed: int = 0) -> list[Tensor]:
    """What a network puts out in training mode and holds as a loss; in later passes, too, if the first changed it."""
    before = _held(model)
    found = _with_losses(model, example, seed)
    if not _same(before, _held(model)):
        with suppress(Exception):  # whatever its own code raises where it runs but once
            found += tensors_in(example.run(model, seed))
            found += tensors_in(example.run(evaluating(model), seed))
    return found


def _held(model: nn.Module) -> list[tuple[Any, int]]:
    """What the modules of a network hold, but for torch's own normalisation, which is known; tensors with a version."""
    modules = [module for module in model.modules() if not isinstance(module, nn.modules.batchnorm._NormBase)]
    leaves = [leaf for module in modules for leaf in tree_leaves(vars(module))]
    return [(leaf, leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0) for leaf in leaves]


def _same(one: Sequence[tuple[Any, int]], other: Sequence[tuple[Any, int]]) -> bool:
    if len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(v == w and (a is b or (type(a) in (int, float, str) and a == b)) for (a, v), (b, w) in pairs)


def _with_losses(model: nn.Module, example: Call, seed: int) -> list[Tensor]:
    """What a network puts out, and the numbers with gradients that its modules keep: auxiliary losses."""
    outputs = tensors_in(example.run(model, seed))
    held = [leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor)]
    return outputs + [each for each in held if each.ndim == 0 and each.grad_fn is not None]


def _values(model: nn.Module, example: Call, seed: int = 0) -> list[Tensor]:
    """The same with gradients, as in training, but without its graph."""
    with torch.enable_grad():
        return [each.detach() for each in _trained(_training(model), example, seed)]


def _gradients(model: nn.Module, example: Call, kept: KeptIndices, seed: int = 0) -> list[Tensor]:
    """The gradients of the sum of its squared outputs, of what is kept of each parameter."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.enable_grad():
        found = _with_losses(_training(model), example, seed)
        outputs = [each.abs().square().sum() for each in found if each.requires_grad]
        if not outputs or not parameters:
            return []
        given = torch.autograd.grad(torch.stack(outputs).sum(), list(parameters.values()), allow_unused=True)
    gradients = []
    for (name, parameter), gradient in zip(parameters.items(), given, strict=True):
        whole = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()  # of sparse embeddings
        gradients.append(cut(whole, kept.get(name, {})))
    return gradients


_DECIDES = ("detach", "detach_", "_set_grad_enabled", "register_hook", "requires_grad_")


@contextmanager
def _decisions() -> Iterator[list[object]]:
    """The functions by which code inside decides itself where gradients go."""
    found: list[object] = []

    def noting(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The second is of tensor.data.
        if getattr(func, "__name__", "") in _DECIDES or func == Tensor.data.__get__:  # type: ignore[attr-defined]
            found.append(func)
        return func(*args, **kwargs)

    with Intercepting(noting):
        yield found


def _has_functions(outputs: Sequence[Tensor]) -> bool:
    """Whether outputs come of autograd functions of somebody's own.

    Without these, hooks and parts without gradients, networks that put out the same have the same gradients, and those
    of a large one need not be computed.
    """
    nodes: list[Any] = [each.grad_fn for each in outputs]
    seen = set[Any]()
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def _draws(model: nn.Module, example: Call) -> list[list[torch.Size]]:
    """The shapes of what a network draws in training mode, one after the other, as the states of generators tell."""
    shapes: list[list[torch.Size]] = []

    def noting(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _generators()
        result = func(*args, **kwargs)
        if not all(map(torch.equal, before, _generators())):
            shapes.append([each.shape for each in tree_leaves(result) if isinstance(each, Tensor)])
        return result

    with Intercepting(noting):
        _trained(_training(model), example)
    return shapes


def _more_rows(model: nn.Module, given: Call) -> Call:
    """The example with several rows in place of each, in all tensors that have as many rows as the first."""
    most, found = safe_ids(model), [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.ndim]
    rows = found[0].shape[0] if found else 0

    def more(tensor: Tensor) -> Tensor:
        return lengthened(tensor, most, 0) if tensor.ndim and tensor.shape[0] == rows else tensor

    longer: Call = tree_map_only(Tensor, more, given)
    return longer


def _generators() -> list[Tensor]:
    """The states of torch's generators."""
    return [each.get_state() for each in (torch.default_generator, *torch.cuda.default_generators)]
