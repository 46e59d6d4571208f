"""Prune one network to one compression ratio: by default the paper's Algorithm 1.

Train to completion; prune the 20% of weights with the lowest magnitude, globally; retrain with learning-rate rewinding
for the full original time; repeat until the compression is reached.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, cast

from safetensors.torch import save_file
from torch import nn

from rewound.experiments.executors.local import opened, run
from rewound.experiments.plans.collection import is_no_number, measured_density, parameters_left
from rewound.experiments.plans.options import Options, keeps_all
from rewound.experiments.plans.outlook import outdated
from rewound.experiments.plans.planning import Plan, plan
from rewound.experiments.plans.realisation import Realised, in_large_shapes, network_of, recomputing, stored_state
from rewound.experiments.sweeps.targets import Target, dense, run_of
from rewound.foundations.errors import Diverged, Failed, InputError, as_number, as_whole, few, warn
from rewound.foundations.wholefiles import replacing, writable, write_whole
from rewound.method.algorithm import has_dropped, longest_time, returned
from rewound.method.choices import Choices, Chosen, takes_choices
from rewound.method.pruner import Pruner
from rewound.method.pruning.counts import Counts, counts_of, parameter_count
from rewound.method.pruning.mask import Mask
from rewound.method.technique import technique_label
from rewound.states.storage.artifacts import DEFAULT_STORE, digest, failure_in_words
from rewound.states.storage.backend import as_location
from rewound.states.storage.statefile import Kept, separate
from rewound.states.storage.store import Store
from rewound.states.tickets.kept_levels import KeptLevel, KeptLevels, place_of
from rewound.states.tickets.ticket import save as write_ticket
from rewound.tasks.recipe import Recipe, check_recipe, selected_counts
from rewound.tasks.recipes import recipe_named
from rewound.tasks.training import loaded


@dataclass(frozen=True)
class LevelReport:
    """What one level reached, and what it cost so far."""

    level: int
    density: float
    """What is left of the weights that may be pruned: of layers, also where units go with their biases."""
    compression: float
    val: float
    test: float
    flops: int
    search_epochs: float
    key: str
    network_compression: float
    """Of all parameters of the network, where `compression` is of those that may be pruned."""
    parameters: int = 0
    """How many the network still has; a slim one stores four bytes for each, a masked one its zeros, too."""


@dataclass(frozen=True, eq=False, repr=False)
class PrunedNetwork:
    """A pruned network, and what each level on the way to it reached; `levels[0]` is the dense network."""

    model: nn.Module
    """With `slim` the smaller network, else one whose pruned weights are exactly zero."""
    mask: Mask
    """What is gone, in the shapes of the network that was pruned."""
    large: nn.Module
    """With `slim` the same network with zeros where units are gone, else the model itself; tickets hold this one."""
    levels: tuple[LevelReport, ...]
    chosen: int
    settings: Mapping[str, object]
    """What was asked for, by name; all of it is in `summary.json`."""
    network_of: Callable[[int], tuple[nn.Module, Mask, nn.Module] | None] = lambda level: None
    """The network of a level (`model`, `mask` and `large`), as long as the store keeps it."""

    def __repr__(self) -> str:
        last, level = len(self.levels) - 1, self.levels[self.chosen]
        ratios = f"{level.compression:.2f}x, {level.network_compression:.2f}x of the whole network"
        return f"PrunedNetwork({ratios}, level {self.chosen} of {last}, test {level.test:.4g})"

    def save(self, folder: str | Path) -> Path:
        """Write `model.safetensors` (the model's own keys, pruned weights exactly zero; with `slim` the smaller
        tensors), `mask.safetensors` (bit-packed, with the large network's shapes in its metadata), `ticket.safetensors`
        (both in one small file), `summary.json`, and in `levels/` a ticket of every level with a table, `levels.csv`,
        to choose from."""
        folder = writable(folder, "folder")
        with replacing(folder / "model.safetensors") as temporary:
            save_file(separate(self.model.state_dict()), temporary, {"format": "pt"})
        shapes = json.dumps({name: list(mask.shape) for name, mask in self.mask.items()})
        with replacing(folder / "mask.safetensors") as temporary:
            save_file(self.mask.packed(), temporary, {"shapes": shapes})
        about = self._about(self.chosen) | self.counts_of(self.large, self.mask).facts(self.mask)
        write_ticket(self.large, self.mask, folder / "ticket.safetensors", about)
        self._save_levels(folder / "levels")
        summary = {**self.settings, "chosen": self.chosen, "levels": [vars(level) for level in self.levels]}
        write_whole(folder / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
        return folder

    def counts_of(self, large: nn.Module, mask: Mask) -> Counts:
        """The counts of the network of a level, by what its pruner selects."""
        pruner = Pruner(**cast(dict[str, Any], self.settings.get("pruner", {})))
        return counts_of(large, mask, pruner.counted(mask, large))

    def _about(self, level: int) -> dict[str, object]:
        """What a ticket of that level says."""
        names = ("recipe", "fields", "technique", "retrain_epochs")
        about = {name: value for name in names if (value := self.settings[name]) != {}}
        return {**about, "lineage": self.levels[level].key}

    def _save_levels(self, folder: Path) -> None:
        """Write every level as a ticket, and their table; what the folder has of this search is kept."""
        tickets = KeptLevels(folder, digest({"dense": self.levels[0].key, **searched(self.settings)}))
        tickets.read(lambda mask: self.counts_of(self.large, mask), warn)
        gone: list[str] = []
        for level in self.levels:
            if place_of(level.level, level.density) in tickets.kept:
                continue
            own = (self.model, self.mask, self.large)
            found = own if level.level == self.chosen else self.network_of(level.level)
            if found is None:
                gone.append(str(level.level))
                continue
            _, mask, large = found
            kept = KeptLevel(
                level=level.level,
                density=level.density,
                counts=self.counts_of(large, mask),
                flops=level.flops,
                metric=f"{self.settings.get('metric', 'metric')} (validation)",
                value=level.val,
            )
            tickets.add(kept, large.state_dict(), mask, self._about(level.level))
        if gone:
            warn(f"there are no tickets of levels {few(gone)} in {folder}: the store no longer has their tensors")
        chosen = self.levels[self.chosen]
        tickets.write_table(place_of(chosen.level, chosen.density))


@takes_choices
def search_of(
    recipe: Recipe, *, retrain_epochs: float | None = None, seed: int = 1, **chosen: Unpack[Chosen]
) -> dict[str, object]:
    """What distinguishes one search from another: all arguments of `prune` except how far to go."""
    choices = Choices(**chosen)
    return searched(_settings(recipe, choices, _epochs(recipe, choices, retrain_epochs), seed))


def _settings(recipe: Recipe, choices: Choices, epochs: float, seed: int) -> dict[str, object]:
    """What a network was asked for, as plain data."""
    asked = {name: getattr(choices, name) for name in ("compression", "one_shot", "rate", "max_drop")}
    others = {"final": choices.final, "slim": choices.slim or None}
    return {
        "recipe": recipe.label(),
        "fields": recipe.identity()["fields"],
        "technique": technique_label(choices.technique),
        "retrain_epochs": epochs,
        "asked": {**asked, **{name: value for name, value in others.items() if value is not None}, "seed": seed},
        "pruner": choices.the_pruner.settings,
    }


def searched(settings: Mapping[str, object]) -> dict[str, object]:
    """What distinguishes the search of a pruned network, from its settings as they are in `summary.json`."""
    asked = cast(Mapping[str, object], settings.get("asked", {}))
    names = ("recipe", "fields", "technique", "retrain_epochs", "pruner")
    steps = ["one_shot", "seed", *([] if asked.get("one_shot") else ["rate"])]
    steps += [name for name in ("final", "slim") if name in asked]
    found = {name: settings.get(name) for name in names} | {name: asked.get(name) for name in steps}
    plain: dict[str, object] = json.loads(json.dumps(found))
    return plain


def _epochs(recipe: Recipe, choices: Choices, retrain_epochs: float | None) -> float:
    """How long a level is retrained."""
    longest = longest_time(choices.the_technique, recipe.training_epochs)
    return longest if retrain_epochs is None else as_number("retrain_epochs", retrain_epochs)


@takes_choices
def prune(
    recipe: str | Recipe,
    *,
    retrain_epochs: float | None = None,
    seed: int = 1,
    device: str = "cpu",
    store: str | Path = DEFAULT_STORE,
    keep: str = "needed",
    say: Callable[[str], None] = print,
    progress: Callable[[float, float], None] = lambda steps, total: None,
    **chosen: Unpack[Chosen],
) -> PrunedNetwork:
    """Train a recipe's network and prune it to `compression`, level by level.

    `retrain_epochs` is the time of each level (default: the full original training time, and 0.9 of it where weights
    are rewound); `rate` the fraction of the remaining weights that a level prunes; `one_shot` prunes all at once. With
    `max_drop` (absolute, in the metric's unit) it stops when two levels in a row validate worse than the dense network
    by more than that, or when one diverges, and returns the last level that does not; without it, `Diverged` is raised.
    Everything done is in `store`: the same call continues an interrupted one, and one with a larger compression goes on
    from where it ended. For that the dense run and the last two levels are kept with the optimizer's state, and of the
    other levels the networks alone; with `keep="all"` everything is kept.

    `say` takes a line for each level, `progress` how many steps are done, and of how many.
    """
    task = recipe_named(recipe)() if isinstance(recipe, str) else recipe
    check_recipe(task)
    choices = Choices(**chosen)
    max_drop = choices.max_drop
    if max_drop is not None and max_drop > 1 and task.metric.unit == "fraction":
        raise InputError(
            f"max_drop is in fractions, as {task.metric.name} is; for {max_drop:g} points give {max_drop / 100:g}, "
            "or declare another unit in the recipe's metric"
        )
    all_kept = keeps_all(keep)
    epochs, seed, pruner = _epochs(task, choices, retrain_epochs), as_whole("seed", seed), choices.the_pruner
    levels_asked = run_of(
        task,
        choices.technique,
        epochs,
        choices.densities,
        pruner,
        iterative=choices.iterative,
        slim=choices.slim,
        final=choices.final,
    ).targets(seed)
    targets = [dense(task, seed), *levels_asked]
    selected_counts(task, pruner).warn_of_small_part()
    options = Options(device=device)
    search = _Search(task, targets, opened(as_location("store", store), [task], options, say), device, say, progress)
    for line in outdated(search.plan, search.store, options):
        say(line)
    present = search.present()
    levels = search.levels(max_drop, with_flops=pruner.of == "flops")
    scores = [level.val for level in levels]
    best = returned(scores, max_drop, higher_is_better=task.metric.higher_is_better)
    model, mask, large = search.network(best)
    if not all_kept:
        search.tidy(len(levels), but=present)
    settings: dict[str, object] = {
        **_settings(task, choices, epochs, seed),
        "compression": levels[best].compression,
        "network_compression": levels[best].network_compression,
        "metric": task.metric.name,
        "unit": task.metric.unit,
        "direction": task.metric.direction,
    }
    return PrunedNetwork(model, mask, large, tuple(levels), best, settings, search.kept_network)


class _NoNumber(Failed):
    """A level was trained, and its metric is no number."""


@dataclass(frozen=True)
class _Search:
    """The levels of one network, `targets[0]` the dense one, and the store in which they are reached."""

    recipe: Recipe
    targets: Sequence[Target]
    store: Store
    device: str
    say: Callable[[str], None]
    progress: Callable[[float, float], None]

    @cached_property
    def plan(self) -> Plan:
        return plan(self.targets)

    def present(self) -> set[str]:
        """The keys of the tensors that are there."""
        return {node.key for node in self.plan.nodes if self.store.has_state(node.key)}

    def levels(self, max_drop: float | None, *, with_flops: bool) -> list[LevelReport]:
        """All levels, or those up to where the metric has dropped or a level failed; says a line about each."""
        metric, levels = self.recipe.metric, list[LevelReport]()
        for number in range(len(self.targets)):
            try:
                level = self.reach(number)
                metric.check((level.val, level.test), self.recipe.label())
            except (Diverged, _NoNumber) as failure:
                if max_drop is None or not levels:
                    raise
                self.say(f"{failure}; the levels before it remain")
                break
            levels.append(level)
            whole = f"{level.network_compression:.2f}x of the whole network"
            if with_flops:
                whole += f", {levels[0].flops / level.flops:.2f}x of the FLOPs"
            self.say(f"level {number}: {level.compression:.2f}x, {whole}, val {level.val:.4f}, test {level.test:.4f}")
            scores = [level.val for level in levels]
            if has_dropped(scores, max_drop, higher_is_better=metric.higher_is_better):
                break
        return levels

    def reach(self, number: int) -> LevelReport:
        """Train and prune up to a level, as far as that is still to do."""
        whole, target = self.plan, self.targets[number]
        # A larger compression may read any level, so each is kept with the optimizer's state.
        readers = {**{each.state.key: () for each in self.targets}, **whole.readers}
        part = Plan(whole.targets, tuple(n for n in whole.nodes if n.state.prunings <= number), readers)
        total = whole.steps
        options = Options(device=self.device, keep_all=True)
        run(part, self.store, options, say=self.say, tick=lambda done: self.progress(done.steps, total))
        result = self.store.result(target.state.key)
        if result is None or "failed" in result:
            raise self._failure(part, f"level {number} (density {target.density:.4g})")
        if is_no_number(result):
            raise _NoNumber(
                f"level {number} was evaluated to val {result['val']:g}, test {result['test']:g}; evaluate of recipe "
                f"{self.recipe.label()} must return finite numbers"
            )
        scores = (result["val"], result["test"], result["flops"])
        network = parameter_count(self.recipe.skeleton)
        pruned = sum(layer["total"] - layer["kept"] for layer in result["layers"].values())
        left = parameters_left(result) or network - pruned
        density, cost, key = measured_density(target, result), target.search_epochs, target.state.key
        return LevelReport(number, density, 1 / density, *scores, cost, key, network / left, left)

    def _failure(self, part: Plan, level: str) -> Diverged | Failed:
        """Why a level was not reached: it diverged, or something on the way to it did."""
        for node in part.nodes:
            if (result := self.store.result(node.key)) is not None and "failed" in result:
                failure = result["failed"]
                if "deaths" in failure:
                    return Failed(f"{level}: {failure_in_words(failure)}")
                return Diverged(failure["step"], float(failure["loss"]), f"{level}: ")
        return Failed(f"{level} has no result; run the same command again")

    def network(self, number: int) -> tuple[nn.Module, Mask, nn.Module]:
        """The network of a level that has been reached."""
        key = self.targets[number].state.key
        if (stored := self._stored(number)) is None:  # measured before, by a run that kept no tensors
            self.say(recomputing(key))
            self.store.forget(key)
            self.reach(number)
            stored = self._stored(number)
        if stored is None:
            raise Failed(f"the tensors of {key[:12]} are gone from the store; run the same command again")
        return self._network(number, stored)

    def kept_network(self, number: int) -> tuple[nn.Module, Mask, nn.Module] | None:
        """The network of a level, if the store has its tensors."""
        return None if (stored := self._stored(number)) is None else self._network(number, stored)

    def _network(self, number: int, stored: Kept) -> tuple[nn.Module, Mask, nn.Module]:
        past = self.targets[number].state
        trained = network_of(past, stored.mask).recipe
        model = loaded(trained, stored.state)
        large = model
        if trained is not self.recipe:
            large = loaded(self.recipe, in_large_shapes(past, Realised(stored.state, stored.mask)))
        return model, Mask.full(self.recipe.prunable(model)) if stored.mask is None else stored.mask, large

    def _stored(self, number: int) -> Kept | None:
        return stored_state(self.targets[number].state, self.store, to_train=False)

    def tidy(self, reached: int, but: Collection[str]) -> None:
        """Keep what a larger compression goes on from: the dense run, and the last two levels, since the last may have
        been a smaller step than it takes. Of the other levels the networks stay, to choose from; all else goes."""
        ends = [target.state.key for target in self.targets[:reached]]
        for node in self.plan.nodes:
            if node.key in but or not node.state.prunings or node.key in ends[-2:]:
                continue
            if node.key not in ends:
                self.store.drop(node.key, even_if_for_good=True)
            elif (stored := stored_state(node.state, self.store)) is not None:
                self.store.save(node.key, stored.state, stored.mask, slots=False, for_good=True)
