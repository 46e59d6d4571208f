"""The network that a command is given: a recipe's own, that of a ticket, or a state of a store.

What a file says is not trusted: of the recipes that tickets and stores name, only those that come with the package are
used. Any other, or what makes the network of a ticket without a recipe, is given by its import path.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rewound.commands.runtimes import in_words
from rewound.foundations.copying import copied
from rewound.foundations.errors import InputError, as_path, few
from rewound.method.costs import MULTIPLY_ADDS, Costs
from rewound.method.pruning.mask import Mask
from rewound.method.structure.kept import expanded, shapes_of
from rewound.method.structure.slimming import Slim, slim
from rewound.method.structure.tracing import units
from rewound.states.storage.artifacts import DEFAULT_STORE, Result
from rewound.states.storage.backend import Location, as_location
from rewound.states.storage.statefile import Kept as Stored
from rewound.states.storage.store import Say, Store, is_store
from rewound.states.tickets.rebuilding import drawn_example, large_network, recipe_of
from rewound.states.tickets.ticket import Ticket, load
from rewound.tasks.recipe import Recipe, changed_fields
from rewound.tasks.recipes import RECIPES, recipe_named
from rewound.tasks.slimmed import kept_by


@dataclass(frozen=True, eq=False)
class NamedNetwork:
    """A network with its weights in the large shapes, its mask if it was pruned, and what it takes."""

    name: str
    model: nn.Module
    mask: Mask | None
    dense: nn.Module
    """A network of the same shapes that was not pruned."""
    example: tuple[Tensor, ...]
    """The inputs of a pass with a batch of one, or the only inputs that it is known to take."""
    costs: Costs
    takes_batches: bool = True
    """Whether the first dimension of its inputs is a batch of any size, and not, for example, the nodes of a graph."""
    trained: bool = True
    """Whether its weights are of a ticket or a store, and not the initial ones of a recipe."""

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        """The inputs of a pass with a batch of that size, where it takes batches."""
        return batched(self.example, batch) if self.takes_batches else self.example


def named_network(
    given: str | Path,
    *,
    recipe: str | None = None,
    fields: Mapping[str, object] = {},
    model: str | None = None,
    store: str | Path = DEFAULT_STORE,
    say: Say = print,
) -> NamedNetwork:
    """What is at a path, or of that name, or under that key.

    `recipe` and `fields`, or `model` (package.module:name), say how to build the network of a file that does not.
    """
    name, file = str(given), as_path("network", given)
    if file.exists():
        return _of_ticket(file, recipe, fields, model)
    if model is not None:
        raise InputError(f"model {model!r} goes with the path of a ticket, and there is no file {name!r}; give one")
    if isinstance(given, str) and re.fullmatch(r"[0-9a-f]{1,32}", given):
        return _of_key(given, recipe, fields, as_location("store", store), say)
    if isinstance(given, str) and (given in RECIPES or ":" in given):
        if recipe is not None:
            raise InputError(f"recipe {recipe!r} goes with a ticket or a key, and {given!r} is a recipe; give one")
        return _of_recipe(name, recipe_named(given).with_fields(fields))
    raise InputError(
        f"{name!r} is no file, no key of a store, and no recipe; give the path of a ticket, the first digits of a key, "
        f"or a recipe: {', '.join(sorted(RECIPES))} or package.module:Class"
    )


def check_is_all(recipe: str | None, fields: Mapping[str, object], model: str | None) -> None:
    """An error if a network was given as a module, and these say how to build another."""
    builders = {"recipe": recipe, "fields": fields, "model": model}
    if given := few([name for name, value in builders.items() if value]):
        raise InputError(f"the network is given as a module, so that {given} would build another; leave out {given}")


def _of_recipe(name: str, task: Recipe, model: nn.Module | None = None, mask: Mask | None = None) -> NamedNetwork:
    dense = task.model(0)
    own, trained = (dense, False) if model is None else (model, True)
    return NamedNetwork(name, own, mask, dense, tuple(task.example()), task.costs, trained=trained)


def ticket_file(path: Path) -> Path:
    """The path itself, or the ticket in it if it is a folder that `rewound prune` wrote."""
    return inside if (inside := path / "ticket.safetensors").is_file() else path


def _of_ticket(file: Path, recipe: str | None, fields: Mapping[str, object], model: str | None) -> NamedNetwork:
    ticket = load(ticket_file(file))
    if model is not None and (recipe is not None or fields):
        raise InputError(
            f"model {model!r} builds the network of {file} without its recipe; leave out model, or recipe and fields"
        )
    if model is not None:
        return _of_model(str(file), ticket, large_network(model, ticket.about))
    task = recipe_of_ticket(ticket, recipe, fields)
    if task is None:
        said = ticket.about.get("recipe")
        which = f"names the recipe {said!r}, which does not come with rewound" if said else "does not name its recipe"
        raise InputError(
            f"{file} {which}; give the recipe that built its network with --recipe (and --field), or what makes the "
            "network with --model"
        )
    network = task.model(0)
    try:
        ticket.into(network)
    except InputError as error:
        raise InputError(
            f"{file} is no network of recipe {task.label()} ({error}); give its own with --recipe"
        ) from error
    return _of_recipe(str(file), task, network, ticket.mask)


def _of_model(name: str, ticket: Ticket, dense: nn.Module) -> NamedNetwork:
    """The network of a ticket of an own loop, which says what kind of example the network takes."""
    inputs, keywords = drawn_example(ticket.about.get("example")) or ((), {})
    if not inputs or keywords or not all(isinstance(each, Tensor) and each.ndim for each in inputs):
        raise InputError(
            f"{name} does not say what its network takes, or more than tensors by position; "
            "give the network itself with example_inputs, in Python"
        )
    model = copied(dense)
    ticket.into(model)
    of_one = tuple(each[:1] for each in inputs)
    if _failure(model, of_one) is None:
        return NamedNetwork(name, model, ticket.mask, dense, of_one, MULTIPLY_ADDS)
    if (failure := _failure(model, inputs)) is not None:
        raise InputError(
            f"the network of {name} does not run on inputs of the types and shapes that the file has for it "
            f"({in_words(failure)}); give the network itself with example_inputs, in Python"
        ) from failure
    return NamedNetwork(name, model, ticket.mask, dense, inputs, MULTIPLY_ADDS, takes_batches=False)


@torch.no_grad()
def _failure(model: nn.Module, inputs: tuple[Tensor, ...]) -> Exception | None:
    """What a network raises on inputs; None where it runs."""
    try:
        copied(model).eval()(*inputs)
    except Exception as error:  # whatever its own code raises for inputs that it does not take
        return error
    return None


def recipe_of_ticket(ticket: Ticket, recipe: str | None, fields: Mapping[str, object]) -> Recipe | None:
    """The recipe that was given, or the one that the ticket names; None if it names none that can be used."""
    return recipe_of(ticket.about, fields) if recipe is None else recipe_named(recipe).with_fields(fields)


def _of_key(prefix: str, recipe: str | None, fields: Mapping[str, object], root: Location, say: Say) -> NamedNetwork:
    if not is_store(root):
        raise InputError(
            f"{prefix!r} may be a key, but there is no store at {root}; give its folder or URL with --store"
        )
    store = Store(root, say)
    key, result = found_result(store, prefix)
    task = recipe_named(recipe).with_fields(fields) if recipe is not None else _recipe_of_result(key, result)
    stored = store.load(key, to_train=False)
    if stored is None:
        raise InputError(
            f"the store at {root} has a result of {key[:12]} but no longer its tensors; "
            "run its sweep again with --keep all, or use a ticket"
        )
    model = task.model(stored.state.seed)
    try:
        model.load_state_dict(_in_large_shapes(task, stored))
    except (InputError, RuntimeError) as error:
        raise InputError(
            f"{key[:12]} is no network of recipe {task.label()} with these fields: names or shapes differ; "
            "give its own with --recipe and --field"
        ) from error
    return _of_recipe(key[:12], task, model, stored.mask)


def _in_large_shapes(task: Recipe, stored: Stored) -> dict[str, Tensor]:
    """The tensors of a state; where it is slim, what it has lost is zeros again."""
    tensors, shapes = stored.state.model, shapes_of(task.skeleton)
    if stored.mask is None or all(tuple(tensors[name].shape) == shape for name, shape in shapes.items()):
        return dict(tensors)
    return expanded(tensors, kept_by(task, stored.mask), shapes)


def found_result(store: Store, prefix: str) -> tuple[str, Result]:
    """The one key that begins with these digits, and its result."""
    keys = [key for key in store.finished() if key.startswith(prefix)]
    if len(keys) != 1:
        found = f"{len(keys)} keys begin" if keys else "no key begins"
        more = "give more of its digits: " if keys else ""
        raise InputError(
            f"{found} with {prefix!r} in {store.name}; {more}rewound report writes the keys into results.csv"
        )
    result = store.result(keys[0])
    if result is None:
        raise InputError(f"the result of {keys[0]} was damaged; run the sweep again to recompute it")
    return keys[0], result


def _recipe_of_result(key: str, result: Result) -> Recipe:
    """The recipe with the fields that the first line of the history has, if they are read without a doubt."""
    label = result["recipe"]
    if label in RECIPES:
        task = recipe_named(label)
        words = result["history"][0].removeprefix(f"start {label} ").split(" ")[:-2]  # without its seed
        try:
            found = task.with_fields(dict(_field(task(), *word.partition("=")[::2]) for word in words))
        except (InputError, ValueError):
            found = None
        if found is not None and changed_fields(found) == words:
            return found
    raise InputError(
        f"{key[:12]} was made by recipe {label}, which cannot be built from what the store says; "
        "give it with --recipe (and --field)"
    )


def _field(task: Recipe, name: str, text: str) -> tuple[str, object]:
    """A field from a word such as `widths=4,8`, as a value of its default's type."""
    default: object = getattr(task, name.replace("-", "_"), None)
    if isinstance(default, tuple):
        return name, [_scalar(default[0] if default else 0, part) for part in text.split(",")]
    return name, _scalar(default, text)


def _scalar(default: object, text: str) -> object:
    if isinstance(default, bool):
        return text == "true"
    return type(default)(text) if isinstance(default, int | float) else text


def slim_network(model: nn.Module, mask: Mask, example: tuple[Tensor, ...]) -> Slim | None:
    """The network without units that the mask removes, or whose producing weights it removes; None if there are none.

    Such a unit goes wholly, with a bias or normalisation that the mask keeps. Single weights that are pruned elsewhere
    stay, as zeros.
    """
    groups = units(model, example)
    gone = groups.gone(groups.whole(mask))
    return slim(model, groups.mask_without(gone), example) if gone else None


def batched(example: tuple[Tensor, ...], batch: int) -> tuple[Tensor, ...]:
    """An example of one as a batch: floating-point zeros, which say nothing, become normal draws of a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    repeated = [tensor.repeat(batch, *[1] * (tensor.ndim - 1)) for tensor in example]
    return tuple(
        torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        if tensor.is_floating_point() and not tensor.any()
        else tensor
        for tensor in repeated
    )
