"""Slim levels under Hugging Face's and Lightning's trainers, resumed from their own checkpoints."""

from pathlib import Path

import pytest
import torch
from test_transformers import BATCHES, bert, gpt2, rewound_by, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from lightning_module import BATCHES as LIGHTNING_BATCHES
from lightning_module import MARKS, Module, every_epoch, fit, rewinding
from lightning_module import T as LIGHTNING_T
from lightning_module import trainer as lightning_trainer
from rewound import InputError, Pruner
from sameness import assert_same

pytestmark = MARKS
UNITS = Pruner(pattern="unit")


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
def test_hugging_faces_trainer_trains_small_models_and_resumes(technique: str, tmp_path: Path) -> None:
    options = {"pruner": UNITS, "technique": technique, "retrain_epochs": 1}
    masked = trainer(tmp_path / "masked", without_dropout(bert()))
    expected = rewound_by(masked, **options)
    masked.train()
    whole = trainer(tmp_path / "run", without_dropout(bert()), save_strategy="epoch")
    run = rewound_by(whole, slim=True, **options)
    whole.train()
    layer = whole.model.bert.encoder.layer[0]
    assert layer.intermediate.dense.out_features == layer.intermediate.dense.weight.shape[0] < 32
    assert run.mask == expected.mask
    words = torch.arange(1, 9).reshape(1, 8)
    given, wanted = (each.model.eval()(input_ids=words).logits for each in (whole, masked))
    assert torch.allclose(given, wanted, atol=1e-4)
    for epochs in range(1, len(run) + 1):
        again = trainer(tmp_path / "run", without_dropout(bert()))
        other = rewound_by(again, slim=True, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{epochs * BATCHES}"))
        assert other.levels == run.levels
        assert_same(again.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("slim", [False, True])
def test_units_are_found_under_mixed_precision_as_without(slim: bool, tmp_path: Path) -> None:
    runs = []
    for bf16 in (False, True):
        one = trainer(tmp_path / str(bf16), bert(), bf16=bf16)
        runs.append(rewound_by(one, pruner=UNITS, slim=slim, retrain_epochs=1, one_shot=True))
        one.train()
        assert one.model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.dtype == torch.float32
        assert hasattr(one.model, "_original_forward") == bf16, "as Accelerate makes it, before and after"
    assert runs[0].mask.keys() == runs[1].mask.keys()


def test_a_language_model_loses_units_in_steps(tmp_path: Path) -> None:
    one = trainer(tmp_path, gpt2(), max_steps=6)
    run = rewound_by(one, pruner=UNITS, slim=True, retrain_steps=3, one_shot=True)
    one.train()
    assert run.mask.kept < run.mask.total
    assert sum(p.numel() for p in one.model.parameters()) < sum(p.numel() for p in gpt2().parameters())


class ConvNet(Module):
    """A small ConvNet, traced by its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
def test_lightnings_trainer_trains_small_modules_and_resumes(technique: str, tmp_path: Path) -> None:
    options = {"pruner": UNITS, "technique": technique, "retrain_epochs": 1, "slim": True}
    module, callback = ConvNet(), rewinding(**options)
    fit(lightning_trainer(tmp_path, callback, every_epoch(tmp_path, save_on_train_epoch_end=True)), module)
    assert module.net[1].out_channels == module.net[1].weight.shape[0] == int(callback.run.mask["net.1.bias"].sum()) < 8
    for epochs in range(LIGHTNING_T, len(callback.run) + 1):
        again, other = ConvNet(), rewinding(**options)
        fit(lightning_trainer(tmp_path, other), again, tmp_path / f"step={epochs * LIGHTNING_BATCHES}.ckpt")
        assert other.run.levels == callback.run.levels
        assert_same(again.state_dict(), module.state_dict())
        assert "on_load_checkpoint" not in vars(again)


def test_a_module_says_by_its_example_input_array_what_it_takes(tmp_path: Path) -> None:
    class Parts(ConvNet):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    with pytest.raises(InputError, match=r"has not called the model itself; call that .* or give example_inputs="):
        fit(lightning_trainer(tmp_path, rewinding(pruner=UNITS)), Parts())
    module = Parts()
    module.example_input_array = torch.zeros(2, 6)
    callback = rewinding(pruner=UNITS, retrain_epochs=1)
    fit(lightning_trainer(tmp_path, callback), module)
    assert callback.run.mask["net.1.bias"].sum() < 8


class Averaged(ConvNet):
    """A module that keeps an average of its network."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, use_buffers=True).requires_grad_(False)

    def on_train_batch_end(self, *_: object) -> None:
        self.average.update_parameters(self.net)


def test_an_average_inside_a_module_becomes_small_with_it(tmp_path: Path) -> None:
    options = {"pruner": UNITS, "retrain_epochs": 1, "slim": True, "one_shot": True}
    module = Averaged()
    callback = rewinding(also=[module.average], **options)
    fit(lightning_trainer(tmp_path, callback, every_epoch(tmp_path, save_on_train_epoch_end=True)), module)
    assert module.average.module[1].out_channels == module.net[1].out_channels < 8
    again = Averaged()
    other = rewinding(also=[again.average], **options)
    fit(lightning_trainer(tmp_path, other), again, tmp_path / f"step={len(callback.run) * LIGHTNING_BATCHES}.ckpt")
    assert_same(again.state_dict(), module.state_dict())
