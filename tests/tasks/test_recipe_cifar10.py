"""The CIFAR-10 recipes, without their data: counts, schedule, optimizer, what becomes of an image."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rewound import InputError
from rewound.experiments.sweeps.targets import run_of
from rewound.foundations.randomness import integers
from rewound.tasks.recipes.cifar10 import ResNet20, ResNet56, ResNet110
from sameness import assert_same

CPU = torch.device("cpu")
CIFAR = [(ResNet20, 271_152), (ResNet56, 851_760), (ResNet110, 1_722_672)]


@pytest.mark.parametrize(("kind", "prunable"), CIFAR)
def test_cifar_counts(kind: type[ResNet20], prunable: int) -> None:
    recipe = kind()
    assert sum(int(np.prod(shape)) for shape in recipe.shapes.values()) == prunable
    assert (recipe.train_size, recipe.batch_size, recipe.training_epochs) == (50_000, 128, 182)
    assert recipe.steps_per_epoch == 390.625


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (35_546, 0.1), (35_547, 0.01), (53_125, 0.01), (53_126, 0.001), (71_107, 0.001)]
)
def test_the_cifar_schedule_at_its_boundaries(step: int, rate: float) -> None:
    schedule = ResNet56().schedule
    assert schedule.at(step) == rate
    assert (schedule.steps, schedule.final) == (71_108, 0.001)


@pytest.mark.parametrize("fields", [{"epochs": 8.0}, {"batch-size": 256}, {"steps": 10_000}])
def test_epochs_and_steps_of_cifar_belong_together(fields: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"epochs of batches of \d+ are .* steps, not .*; give steps"):
        list(run_of(ResNet20.with_fields(fields), "lr-rewinding", 8, [0.5], iterative=False).targets(1))
    short = ResNet20.with_fields({"epochs": 8, "steps": 3125, "drops": [1563, 2344]})
    assert short.steps_of(8.0) == 3125


def test_the_cifar_optimizer_decays_every_parameter() -> None:
    recipe = ResNet20()
    model = recipe.model(1)
    optimizer = recipe.optimizer(model)
    assert isinstance(optimizer, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}
    settings = {name: group[name] for name in ("momentum", "nesterov", "weight_decay", "dampening", "lr")}
    assert settings == {"momentum": 0.9, "nesterov": False, "weight_decay": 2e-4, "dampening": 0, "lr": 0.1}


def test_the_initial_weights_are_a_function_of_the_seed_alone() -> None:
    recipe = ResNet20()
    torch.manual_seed(1)
    one = recipe.model(7).state_dict()
    torch.manual_seed(2)
    same, other = recipe.model(7).state_dict(), recipe.model(8).state_dict()
    assert_same(one, same)
    assert not torch.equal(one["stem.weight"], other["stem.weight"])


def bytes_like_cifar(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)


# Sums of 3,072 bytes are exact in float32. torch adds the squares in a tree, where each goes through at most 64
# additions that err by 6e-8: 4e-6 of the variance, 2e-6 of the deviation. Centring and the quotient add 1e-6.
ROUNDING = 1e-5


def standardised_by_hand(image: np.ndarray) -> np.ndarray:
    values = image.astype(np.float64)
    return (values - values.mean()) / max(values.std(), 1 / np.sqrt(3072))


@pytest.mark.numeric
def test_cifar_images_are_standardised_one_by_one() -> None:
    images = bytes_like_cifar(5)
    images[1] = 200  # constant
    images[2] = 0
    images[2, 0, 0, 0] = 1  # a deviation below the least one
    expected = np.stack([standardised_by_hand(image) for image in images.numpy()])
    np.testing.assert_allclose(ResNet20().standardised(images).numpy(), expected, rtol=ROUNDING, atol=ROUNDING)
    assert bool((ResNet20().standardised(images)[1] == 0).all())


@pytest.mark.numeric
def test_cifar_images_are_padded_cropped_flipped_and_then_standardised() -> None:
    images, key, counters = bytes_like_cifar(40), 11, torch.arange(1000, 1040)
    down, right = (integers(key, 2 * counters + n, 9).tolist() for n in (0, 1))
    flip = integers(key, -1 - counters, 2).tolist()
    expected = []
    for n, image in enumerate(images.numpy()):
        padded = np.zeros((3, 40, 40), dtype=np.uint8)
        padded[:, 4:36, 4:36] = image
        crop = padded[:, down[n] : down[n] + 32, right[n] : right[n] + 32]
        expected.append(standardised_by_hand(crop[:, :, ::-1] if flip[n] else crop))
    got = ResNet20().augmented(images, key, counters)
    np.testing.assert_allclose(got.numpy(), np.stack(expected), rtol=ROUNDING, atol=ROUNDING)
    assert 8 < sum(flip) < 32
    assert len(set(down)) == len(set(right)) == 9


@pytest.mark.numeric
def test_bfloat16_computes_in_bfloat16_and_its_loss_in_float32() -> None:
    images, labels = ResNet20().standardised(bytes_like_cifar(4)), torch.arange(4)
    recipe, model = ResNet20(precision="bfloat16"), ResNet20().model(1)
    seen: list[torch.dtype] = []
    model.dense.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    losses = [r.loss(model, (images, labels)) for r in (recipe, ResNet20())]
    assert seen == [torch.bfloat16, torch.float32]
    assert losses[0].dtype == torch.float32
    # The last layer's weights begin at 0.01: logits are about 0.1, and bfloat16 errs by a few hundredths of that.
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0.05)
