"""The ImageNet recipes against what is known of the authors' code, and trained on twelve small pictures."""

import copy
import csv
import gzip
import math
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from rewound import Pruner
from rewound.experiments.sweeps.sweep import load_sweep
from rewound.foundations.errors import InputError
from rewound.method.flops import profile
from rewound.method.schedule import Segment
from rewound.tasks.datasets import jpegs, packed_images, packing_images
from rewound.tasks.feed import LIMIT
from rewound.tasks.fleets.captured import Program, capturable
from rewound.tasks.fleets.place import Place, Run
from rewound.tasks.fleets.updates import FlatMomentum
from rewound.tasks.normalisation import GroupedBatchNorm2d
from rewound.tasks.recipe import Position
from rewound.tasks.recipes import imagenet
from rewound.tasks.recipes.crops import central_boxes, random_boxes, random_flips, resized
from rewound.tasks.recipes.imagenet import ImageNetResNet34, ImageNetResNet50, ImagenetteResNet50, TinyImageNetResNet50
from rewound.tasks.recipes.resnet import ResNet
from rewound.tasks.training import State, begin, evaluate
from sameness import assert_same
from small_copies import folders, small_sizes, written
from small_fleets import CPU, alone, sparse, stopped

ALL = [ImageNetResNet34, ImageNetResNet50, TinyImageNetResNet50, ImagenetteResNet50]


def small_network(generator: torch.Generator, *, classes: int, small_images: bool, batch_norm_group: int) -> ResNet:
    return ResNet(
        (1, 1),
        (4, 8),
        classes=classes,
        bottleneck=True,
        zero_last=True,
        batch_norm_group=batch_norm_group,
        generator=generator,
    )


@dataclass(frozen=True)
class Small(ImagenetteResNet50):
    """A small network on twelve pictures."""

    network: ClassVar = staticmethod(small_network)

    batch_size: int = 4
    batch_norm_group: int = 2
    precision: str = "float32"
    image_size: int = 8
    smallest_area: float = 0.08


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache with small data sets in it."""
    monkeypatch.setattr(packed_images, "SIZES", small_sizes())
    monkeypatch.setenv("REWOUND_CACHE", str(tmp_path / "cache"))
    packing_images.prepare("imagenette", written(tmp_path / "copy", folders()), tmp_path / "cache")
    for kept in (imagenet._load, imagenet._on_device):
        kept.cache_clear()
    yield
    for kept in (imagenet._load, imagenet._on_device):
        kept.cache_clear()


# The authors' numbers


def test_the_flops_of_resnet50_differ_from_the_published_ones_by_what_the_documentation_says() -> None:
    recipe = ImageNetResNet50()
    model = recipe.model(0)
    counted = profile(model, recipe.example(), recipe.costs)
    assert counted.total() == 4_134_309_352
    early = ["stem.weight", *(f"stage{stage}.block1.conv1.weight" for stage in (2, 3, 4))]
    operations = {name: counted.layers()[name] for name in early}
    elements = sum(each // model.get_parameter(name)[0].numel() for name, each in operations.items())
    fewer, fewer_by_elements = sum(operations.values()) * 3 // 4, (2 + 1) * elements * 3 // 4
    assert (fewer, fewer_by_elements, pool := 2 * 9 * 64 * 56 * 56) == (319_721_472, 3_386_880, 3_612_672)
    assert counted.total() - fewer - fewer_by_elements + pool == 3_814_813_672


@pytest.mark.parametrize(
    ("kind", "prunable", "trained", "steps"),
    [
        (ImageNetResNet34, 21_783_744, 21_801_896, 112_590),
        (ImageNetResNet50, 25_502_912, 25_557_032, 112_590),
        (TinyImageNetResNet50, 23_856_832, 23_910_152, 7_020),
        (ImagenetteResNet50, 23_475_392, 23_528_522, 3_285),
    ],
)
def test_networks_and_training_times(kind: type[ImageNetResNet50], prunable: int, trained: int, steps: int) -> None:
    recipe = kind()
    assert sum(math.prod(shape) for shape in recipe.shapes.values()) == prunable
    assert sum(parameter.numel() for parameter in recipe.skeleton.parameters()) == trained
    assert recipe.schedule.steps == steps
    held_out = packed_images.size(recipe.data).held_out
    assert recipe.test_size == len(imagenet.split_order(held_out, 0)[1])
    norms = [module for module in recipe.skeleton.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(type(norm), norm.group, norm.momentum, norm.eps) for norm in norms} == {
        (GroupedBatchNorm2d, 128, 0.1, 1e-5)
    }


@pytest.mark.parametrize(
    "recipe",
    [
        *(ImageNetResNet50(per_class=count) for count in (1, 2, 5)),
        *(ImagenetteResNet50(per_class=count) for count in (2, 25, 50)),
        *(TinyImageNetResNet50(per_class=5), ImageNetResNet50(batch_size=2**20), ImageNetResNet50()),
    ],
    ids=lambda recipe: f"{recipe.label()}-{recipe.per_class}-{recipe.batch_size}",
)
def test_a_training_ends_at_the_last_rate_however_few_pictures_there_are(recipe: ImageNetResNet50) -> None:
    schedule = recipe.schedule
    assert schedule.at(schedule.steps - 1) == pytest.approx(recipe.learning_rate / 10 ** len(recipe.drops))
    assert schedule.at(round(recipe.warmup_epochs * recipe.steps_per_epoch) + 1) == recipe.learning_rate


def test_copies_of_a_subset_have_its_test_size() -> None:
    subset = ImageNetResNet50(per_class=5)
    assert [each.test_size for each in (subset, copy.copy(subset), pickle.loads(pickle.dumps(subset)))] == 3 * [4000]


def test_layers_that_are_pruned() -> None:
    """Every convolution, projection and the dense layer; ResNet-34 has one projection more than torchvision's."""
    names = list(ImageNetResNet34().shapes)
    assert [name for name in names if "proj" in name] == [f"stage{stage}.block1.proj.weight" for stage in (1, 2, 3, 4)]
    assert (len(names), len(ImageNetResNet50().shapes)) == (1 + 2 * 16 + 4 + 1, 1 + 3 * 16 + 4 + 1)
    assert ImageNetResNet50().shapes["stem.weight"] == (64, 3, 7, 7)
    assert TinyImageNetResNet50().shapes["stem.weight"] == (64, 3, 3, 3)


def test_small_images_keep_their_resolution() -> None:
    net, seen = TinyImageNetResNet50().skeleton.eval(), []
    hooks = [net.get_submodule(f"stage{stage}") for stage in (1, 2, 3, 4)]
    for stage in hooks:
        stage.register_forward_hook(lambda module, given, out: seen.append(out.shape[-1]))
    net(torch.zeros(1, 3, 64, 64))
    assert seen == [32, 16, 8, 4]


def test_rates_at_every_boundary() -> None:
    """An epoch is 1281167 / 1024 steps, and a rate changes at the first step that begins in its epoch."""
    at, epoch = ImageNetResNet50().schedule.at, 1_281_167 / 1024
    assert at(0) == 0
    assert at(1000) == pytest.approx(0.4 * 1000 / epoch / 5, rel=1e-8)
    assert at(6255) == pytest.approx(0.4 * 6255 / epoch / 5, rel=1e-8)
    for step, rate in ((6256, 0.4), (37_534, 0.4), (37_535, 0.04), (75_068, 0.04), (75_069, 0.004)):
        assert at(step) == pytest.approx(rate, rel=1e-12)
    for step, rate in ((100_091, 0.004), (100_092, 0.0004), (112_589, 0.0004), (10**6, 0.0004)):
        assert at(step) == pytest.approx(rate, rel=1e-12)


def test_retraining_times_are_the_authors_checkpoints() -> None:
    recipe = ImageNetResNet50()
    starts = [recipe.schedule.steps - recipe.steps_of(t) for t in (90, 81, 45, 9)]
    assert starts == [0, 11_259, 56_295, 101_331]


def test_everything_decays_but_batch_normalisation() -> None:
    recipe = ImageNetResNet34()
    optimizer = recipe.optimizer(recipe.skeleton)
    names = {parameter: name for name, parameter in recipe.skeleton.named_parameters()}
    decayed, others = ([names[parameter] for parameter in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-4, 0]
    assert set(decayed) == {*recipe.shapes, "dense.bias"}
    assert all(name.endswith(("bn.weight", "bn.bias")) for name in others)
    assert {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups} == {(0.9, True)}
    assert recipe.rate_factors == (1, 1)


@pytest.mark.parametrize("kind", ALL)
def test_plans_need_no_data(kind: type[ImageNetResNet50], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REWOUND_CACHE", str(tmp_path))
    recipe = kind()
    assert recipe.schedule.final < recipe.learning_rate / 900
    with pytest.raises(InputError, match=f"no {recipe.data} in {tmp_path}: get .* then run `rewound data"):
        recipe.check_data()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch-size": 1000}, "batch-size 1000 is not a whole number of groups of 128 images"),
        ({"epochs": 60.0}, "the rate must drop after the 5 epochs of warm-up and before the end at 60"),
        ({"drops": [30.0, 20.0]}, "in growing order, not at 30, 20; give drops and warmup-epochs together with epochs"),
        ({"drops": [], "warmup-epochs": 90.0}, "warmup-epochs must be below epochs, 90, not 90"),
        (
            {"epochs": 80.0001},
            "the last change of the rate, at epoch 80: 80.0001 epochs are 100,080 steps; give",
        ),
        (
            {"epochs": 0.0001, "drops": [], "warmup-epochs": 0.0},
            "^0.0001 epochs are 0 steps, as an epoch has 1,251 steps; give more epochs$",
        ),
        ({"precision": "float16"}, "precision is float32 or bfloat16, not 'float16'"),
        ({"smallest-area": 1.5}, "smallest-area must be above 0 and at most 1, not 1.5"),
        ({"central-share": 0.0}, "central-share must be above 0 and at most 1, not 0"),
        ({"batch-norm-group": 0}, "batch-norm-group must be above 0, not 0"),
        ({"per-class": -1}, "a subset of imagenet has 1 to 732 images of each class, not -1"),
        ({"per-class": 5000}, "a subset of imagenet has 1 to 732 images of each class, not 5000"),
    ],
)
def test_fields_that_make_no_sense(fields: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ImageNetResNet50.with_fields(fields)


def test_the_presets_of_filters_know_the_network() -> None:
    """Grouped normalisation changes nothing for them: 19 filters of the first listed layer go at k = 1."""
    recipe = ImageNetResNet34()
    mask = Pruner(preset="structured-a", k=1)(recipe.skeleton, None)
    assert int((~mask["stage1.block2.conv1.weight"][:, 0, 0, 0]).sum()) == 19


def test_units_are_found_through_grouped_normalisation() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_images, "SIZES", small_sizes())
        recipe = Small()
    groups = {group.name: len(group) for group in recipe.units.groups}
    assert groups["stage1.block1.conv1.weight"] == 4


# Sweeps


@pytest.mark.parametrize(
    ("sweep", "iterative"),
    [
        ("imagenet-resnet50-oneshot", "0"),
        ("imagenet-resnet50-iterative", "1"),
        ("imagenet-resnet34-structured-a", "0"),
        ("imagenet-resnet34-structured-b", "0"),
    ],
)
def test_a_sweep_is_the_grid_that_the_authors_published(sweep: str, iterative: str, paper: Path) -> None:
    targets = [target for target in load_sweep(sweep).targets if target.technique]
    ours = Counter(
        (target.task, target.pruning, target.technique, target.retrain_epochs, target.trial) for target in targets
    )
    with gzip.open(paper / "published-pruned.csv.gz", "rt") as file:
        kind = (targets[0].task, targets[0].pruning, iterative)
        rows = [row for row in csv.DictReader(file) if (row["recipe"], row["pruning"], row["iterative"]) == kind]
    columns = ("recipe", "pruning", "technique")
    theirs = Counter((*(row[c] for c in columns), float(row["retrain_epochs"]), int(row["trial"])) for row in rows)
    assert ours == theirs  # as many densities for each
    if "structured" not in sweep:  # whose densities the authors count otherwise
        assert {round(target.density, 6) for target in targets} == {float(row["density"]) for row in rows}


@pytest.mark.parametrize(("sweep", "largest"), [("imagenet-resnet50", 9.31), ("tinyimagenet-resnet50", 5.96)])
def test_algorithm_1_is_compared_at_fixed_retraining_times(sweep: str, largest: float) -> None:
    targets = load_sweep(f"{sweep}-algorithm1").targets
    epochs = targets[0].recipe.training_epochs
    times = {target.technique: target.retrain_epochs for target in targets if target.technique}
    assert times == {"lr-rewinding": epochs, "fine-tuning": epochs, "weight-rewinding": 0.9 * epochs}
    assert 1 / min(target.density for target in targets) == pytest.approx(largest, abs=0.01)


# Batches


@pytest.mark.usefixtures("packed")
def test_a_batch_is_crops_of_its_pictures() -> None:
    recipe = Small()
    data, counters = recipe.resident(CPU), torch.arange(4, 8)
    order = recipe.order(1, 0, 0, 0, CPU)
    images, labels = next(recipe.batches(1, Position(0, 1), CPU))
    chosen, key = order[4:8], recipe.key(1, 0, 0)
    sizes = data.heights[chosen], data.widths[chosen]
    boxes = random_boxes(*sizes, key, counters, smallest_area=0.08, share=0.875)
    expected = resized(data.pixels, data.starts[chosen], sizes[1], boxes, 8, random_flips(key, counters))
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (imagenet._MEANS, imagenet._DEVIATIONS))
    assert torch.allclose(images, (expected / 255 - mean) / deviation, atol=1e-5)
    assert torch.equal(labels, data.labels[chosen])
    assert sorted(order.tolist()) == list(range(12))


@pytest.mark.usefixtures("packed")
def test_bfloat16_images_are_the_rounded_ones() -> None:
    exact, _ = next(Small().batches(1, Position(0, 0), CPU))
    rounded, _ = next(Small(precision="bfloat16").batches(1, Position(0, 0), CPU))
    assert torch.equal(exact.bfloat16(), rounded)


@pytest.mark.usefixtures("packed")
def test_streamed_pictures_give_the_same_run_and_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Small()
    run = Run(begin(recipe, 1), sparse(recipe), [Segment(0.05, 5)], [2])
    resident = alone(recipe, run)
    scores = evaluate(recipe, resident[-1])
    assert recipe.source(CPU) is None
    monkeypatch.setenv(LIMIT, "0")
    assert recipe.source(CPU) is not None
    assert_same(alone(recipe, run), resident)
    assert evaluate(recipe, resident[-1]) == scores


@pytest.mark.usefixtures("packed")
def test_the_held_out_pictures_are_split_once() -> None:
    recipe, seen = Small(), []
    for chosen in imagenet.split_order(6, 0):
        batches = list(recipe._held_out(chosen, CPU))
        seen += [int(number) for _, which in batches for number in which]
    assert sorted(seen) == list(range(6))


@pytest.mark.usefixtures("packed")
def test_accuracy_is_that_of_the_central_crops() -> None:
    recipe = Small()
    net = recipe.model(3).eval()
    data = imagenet._on_device("imagenette", 0, "held_out", CPU)
    boxes = central_boxes(data.heights, data.widths, 0.875)
    with torch.no_grad():
        guesses = net(recipe.standardised(resized(data.pixels, data.starts, data.widths, boxes, 8))).argmax(1)
        scores = recipe.evaluate(net)
    correct = guesses == data.labels
    assert scores == tuple(correct[part].double().mean().item() for part in imagenet.split_order(6, 0))


@pytest.mark.usefixtures("packed")
def test_the_decoder_and_the_data_are_kept_with_results() -> None:
    made = Small().made_with()
    assert made.keys() == set(Small.data_identity) == {"decoder", "data"}
    assert made["decoder"].startswith(jpegs.decoders()[0])
    assert made["data"] == packed_images.load("imagenette").digest
    assert Small(per_class=2).made_with().keys() == {"decoder"}  # which was not prepared


# Steps


@pytest.mark.usefixtures("packed", "one_thread")
def test_the_captured_step_is_a_step_of_train() -> None:
    """Two decays in one flat buffer, groups in the normalisation, crops in the batch."""
    recipe = Small()
    assert capturable(recipe, CPU)
    place = Place(Program(recipe, CPU, None))
    assert isinstance(place.update, FlatMomentum)
    run = Run(begin(recipe, 1), sparse(recipe), [Segment(0.05, 4), Segment(0.005, 3)])
    place.start(run)
    end = stopped(place).outcome
    assert isinstance(end, State)
    (expected,) = alone(recipe, run)
    for name, tensor in expected.model.items():
        # Seven steps in single precision, whose rounding differs between a flat and a separate update.
        assert torch.allclose(end.model[name].float(), tensor.float(), rtol=1e-3, atol=1e-4), name
    assert end.slots.keys() == expected.slots.keys()


@pytest.mark.usefixtures("packed")
def test_a_subset_is_trained_on_only_if_the_field_says_so(tmp_path: Path) -> None:
    packing_images.prepare("imagenette", tmp_path / "copy", tmp_path / "cache", per_class=2)
    subset = Small(per_class=2, batch_size=2)
    subset.check_data()
    assert (subset.train_size, len(subset.resident(CPU).labels)) == (6, 6)
    assert subset.identity()["fields"]["per_class"] == 2
    assert subset.test_size == len(imagenet.split_order(6, 0)[1])
    assert begin(subset, 1).model.keys() == begin(Small(), 1).model.keys()


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda tests/tasks/test_recipe_imagenet.py` there"
)
@pytest.mark.filterwarnings("ignore")  # compilation warns of what is not ours
@pytest.mark.usefixtures("packed")
def test_a_gpu_crops_as_a_cpu_does_and_its_captured_step_is_a_step_of_train() -> None:
    recipe, gpu = Small(), torch.device("cuda")
    ours, theirs = (next(recipe.batches(1, Position(0, 0), device)) for device in (CPU, gpu))
    assert torch.equal(ours[1], theirs[1].cpu())
    assert torch.allclose(ours[0], theirs[0].cpu(), atol=1e-4)
    run = Run(begin(recipe, 1), sparse(recipe), [Segment(0.05, 4), Segment(0.005, 3)])
    place = Place(Program(recipe, gpu, "inductor"))
    place.start(run)
    end = stopped(place).outcome
    assert isinstance(end, State)
    (expected,) = alone(recipe, run, gpu)
    for name, tensor in expected.model.items():
        # Seven steps in single precision, in another order of sums.
        assert torch.allclose(end.model[name].float(), tensor.float(), rtol=1e-2, atol=1e-3), name
