"""One network trained by several processes: each takes an equal slice of every batch, and all hold the same weights.

The mean of the processes' gradients (torch's DistributedDataParallel) is the gradient of the whole batch, because the
loss of a batch is the mean of the losses of its equal slices (`ResidentRecipe.divisible`) and batch normalisation sees
all slices (`normalisation`). So N processes compute what one does, up to rounding.

Rank 0 decides when a run is looked at, and whether it goes on afterwards. Before a run and at its end all processes
prove that they hold the same; without several processes, everything here is the identity.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from rewound.foundations.errors import InputError
from rewound.tasks import ranks
from rewound.tasks.normalisation import check_normalisation, synchronised
from rewound.tasks.recipe import Batch, Position, Recipe
from rewound.tasks.resident import WHOLE, ResidentRecipe, Share

# torch 2.13 has renamed the option, and warns of the former name.
_FORWARD_SYNC = "forward_sync_buffers"
if _FORWARD_SYNC not in inspect.signature(DistributedDataParallel).parameters:
    _FORWARD_SYNC = "broadcast_buffers"


class Abandoned(Exception):
    """Rank 0 has given up the run; what the other processes have of it is not used."""


def check_divisible(recipe: Recipe, count: int) -> None:
    """An error unless so many processes can train one network of the recipe."""
    if count == 1:
        return
    if not isinstance(recipe, ResidentRecipe) or "share" not in inspect.signature(recipe.batches).parameters:
        raise InputError(
            f"{count} processes cannot train one network of {recipe.label()}, as its batches cannot be asked for in "
            "slices; make it a ResidentRecipe, or give 1 GPU per run"
        )
    if not recipe.divisible:
        raise InputError(
            f"{count} processes cannot train one network of {recipe.label()}, as its loss is not said to be the mean "
            "of the losses of equal slices of the batch; declare divisible = True if it is, or give 1 GPU per run"
        )
    for part in recipe.parts:
        if part.batch_size % count:
            raise InputError(
                f"{count} processes cannot share batches of {part.batch_size} equally, as {recipe.label()} has them; "
                f"give a batch size that is a multiple of {count}, or another number of GPUs per run"
            )
        check_normalisation(recipe.skeleton, part.batch_size, count)


class Together:
    """What differs in `train` when several processes train one network; with None, what a single process needs."""

    def __init__(self, processes: ProcessGroup | None) -> None:
        self._group = processes
        self.share = WHOLE if processes is None else Share(dist.get_rank(processes), dist.get_world_size(processes))
        self._wrapped: DistributedDataParallel | None = None

    @property
    def salt(self) -> list[int]:
        """What a step's random numbers depend on in addition to seed and position: slices draw their own dropout."""
        return [self.share.number] if self.share.number else []

    def check(
        self, recipe: Recipe, tensors: Mapping[str, Tensor], seed: int, position: Position, device: torch.device
    ) -> None:
        """An error unless the processes can train the recipe, and begin with the same tensors and data."""
        if self._group is None:
            return
        check_divisible(recipe, self.share.of)
        ranks.check_same(tensors, "give all processes the same state and mask", self._group)
        self._check_made_with(recipe)
        batches = recipe.batches(seed, recipe.first_batch(position), device)
        first = next(batches)
        del batches  # a feed ends with it
        data = {f"tensor {number} of the first batch": tensor for number, tensor in enumerate(first, 1)}
        ranks.check_same(data, "prepare the same data on all machines", self._group)

    def _check_made_with(self, recipe: Recipe) -> None:
        """An error if what batches hold further on may differ: two files can have the same first batch."""
        made = ranks.gathered(dict(recipe.made_with()), self._group)
        for number, held in enumerate(made):
            for name in sorted({*made[0], *held}):
                first, other = made[0].get(name), held.get(name)
                if first != other:
                    raise InputError(
                        f"process {number} has {name} {other or 'unknown'}, and process 0 has {first or 'unknown'}; "
                        "prepare the same data and install the same packages on all machines"
                    )

    def batches(self, recipe: Recipe, seed: int, position: Position, device: torch.device) -> Iterator[Batch]:
        """The training batches from a position on, or this process's slices of them."""
        if self._group is None:
            return recipe.batches(seed, position, device)
        assert isinstance(recipe, ResidentRecipe)  # as checked before
        return recipe.batches(seed, position, device, self.share)

    def wrap(self, recipe: Recipe, model: nn.Module) -> None:
        """Prepare a model for training by all processes; its parameters and their names stay as they are."""
        if self._group is None:
            return
        synchronised(model, self._group)
        # A convolution of 1x1 has the same layout by other strides where channels come last; nothing is slower.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self._wrapped = DistributedDataParallel(
            _Loss(recipe, model),
            process_group=self._group,
            init_sync=False,  # parameters and buffers are equal, as was checked
            # Otherwise torch puts gradients together in another order after the first step. Sums over more than two
            # processes are then rounded otherwise, and a run that is resumed would not be the same (law 1).
            find_unused_parameters=True,
            **{_FORWARD_SYNC: False},  # type: ignore[arg-type]  # buffers stay equal, as all are computed from the whole batch
        )

    def loss(self, recipe: Recipe, model: nn.Module, batch: Batch) -> Tensor:
        """The recipe's loss; its backward pass averages the gradients of all processes."""
        if self._wrapped is None:
            return recipe.loss(model, batch)
        loss: Tensor = self._wrapped(*batch)
        return loss

    def averaging(self, now: bool) -> AbstractContextManager[object]:
        """Inside, backward passes average gradients now, or leave that to a later one."""
        return nullcontext() if now or self._wrapped is None else self._wrapped.no_sync()

    def decided(self, by_first: bool) -> bool:
        """What rank 0 says, on every rank."""
        if self._group is None:
            return by_first
        # On the CPU, also where a GPU trains: reading it there would wait for all that the GPU has yet to do.
        box = torch.tensor(by_first)
        dist.broadcast(box, group=self._group, group_src=0)
        return bool(box)

    def joined(self, losses: Tensor, waited: float) -> tuple[float, float]:
        """The mean loss over all processes, and the longest that one has waited: the others wait for that one."""
        if self._group is None:
            return losses.item(), waited
        dist.all_reduce(losses, group=self._group)
        mean = losses.item() / self.share.of
        # Where one has died meanwhile, this is an error, and what the others hold is not used.
        return mean, max(ranks.gathered(waited, self._group))

    def prove(self, tensors: Mapping[str, Tensor]) -> None:
        """An error if the processes have come to hold different tensors."""
        if self._group is not None:
            ranks.check_same(
                tensors,
                "let the model change its buffers in the same way in all processes, and use equal GPUs",
                self._group,
            )

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Inside, the run waits; `Abandoned` if rank 0 does not go on with it."""
        try:
            yield
        except GeneratorExit:
            with suppress(RuntimeError, ValueError):  # the others may be gone, and the group with them
                self.decided(False)
            raise
        if not self.decided(True):
            raise Abandoned


class _Loss(nn.Module):
    """A recipe's loss as a module: DistributedDataParallel follows what is called through its forward."""

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        super().__init__()
        self.model, self._recipe = model, recipe

    def forward(self, *batch: Tensor) -> Tensor:
        return self._recipe.loss(self.model, batch)
