"""Lightning's Trainer, rewound: a small module under the real trainer."""

import copy
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from rewound import InputError, Mask, Pruner, densities
from rewound.integrations.lightning import Rewind

T, BATCHES = 3, 4  # epochs, and batches in each

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lightning's advice: more workers for the data loader, a lower logging interval, a loader that can be resumed.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),  # nothing is saved again
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # what Lightning does with torch
]


class Module(LightningModule):
    """A classifier with batch statistics; its schedule moves by step or by epoch."""

    def __init__(self, interval: str = "step", manual: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.interval, self.count, self.automatic_optimization = interval, optimizers, not manual
        self.fake: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> object:
        made = [SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for _ in range(self.count)]
        if self.interval == "step":
            steps = int(self.trainer.estimated_stepping_batches)
            moving: object = lr_scheduler.OneCycleLR(made[0], max_lr=0.2, total_steps=steps)
        else:
            moving = lr_scheduler.MultiStepLR(made[0], [1, 2])
        return made, [{"scheduler": moving, "interval": self.interval}]


class Rates(Callback):
    """Notes the learning rate of every step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


def loader(count: int = 16 * BATCHES) -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16)


def trainer(folder: Path, *callbacks: Callback, **options: object) -> Trainer:
    given: dict[str, object] = {
        "max_epochs": T,
        "default_root_dir": folder,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        "num_sanity_val_steps": 1,
        **options,
    }
    return Trainer(callbacks=list(callbacks), **given)  # type: ignore[arg-type]


def fit(trainer: Trainer, module: LightningModule, checkpoint: Path | None = None) -> None:
    trainer.fit(module, loader(), loader(32), ckpt_path=checkpoint)


def rewinding(**options: object) -> Rewind:
    return Rewind(**{"compression": 1.5, "say": lambda line: None, **options})  # type: ignore[arg-type]


def every_epoch(folder: Path, **options: object) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)  # type: ignore[arg-type]


def pieces(values: list[float], length: int) -> list[list[float]]:
    return [values[start : start + length] for start in range(0, len(values), length)]


def assert_sparse(state: dict[str, Tensor], mask: Mask) -> None:
    for name, kept in mask.items():
        assert not state[name][~kept].any(), name
        assert int(state[name].count_nonzero()) == mask.counts[name]


def hooks(trainer: Trainer, module: LightningModule) -> list[object]:
    held = [hooks for name, hooks in vars(trainer.optimizers[0]).items() if name.endswith("_hooks")]
    parameters = [parameter._post_accumulate_grad_hooks for parameter in module.parameters()]
    return [hook for hook in (*held, *parameters, _global_optimizer_pre_hooks) if hook]


@pytest.mark.parametrize(
    ("interval", "options", "manual"),
    [
        ("step", {}, False),
        ("step", {"accumulate_grad_batches": 3}, False),
        ("step", {"gradient_clip_val": 0.5}, False),
        ("epoch", {}, False),
        ("step", {}, True),
    ],
    ids=["by step", "accumulated", "clipped", "by epoch", "manual"],
)
def test_a_module_is_pruned_level_by_level_along_its_own_schedule(
    interval: str, options: dict[str, object], manual: bool, tmp_path: Path
) -> None:
    module, callback, rates = Module(interval, manual), rewinding(monitor="val_loss", mode="min"), Rates()
    mine = trainer(tmp_path, callback, rates, every_epoch(tmp_path), **options)
    fit(mine, module)
    run = callback.run
    assert [reached.density for reached in run.levels] == [1.0, *densities(1.5)]
    assert run.levels[-1].accuracy == pytest.approx(float(mine.callback_metrics["val_loss"]))
    assert mine.current_epoch == len(run) == 3 * T
    dense, *levels = pieces(rates.seen, len(rates.seen) // 3)
    assert len(set(dense)) > T - 1
    assert levels == [dense, dense]
    assert run.mask is not None
    assert run.mask.kept == Pruner().kept({"a": (16, 6), "b": (3, 16)}, 1 / 1.5)
    assert_sparse(module.state_dict(), run.mask)

    checkpoints = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    assert len(checkpoints) == 3 * T
    for number, checkpoint in enumerate(checkpoints):
        content = torch.load(checkpoint, weights_only=True)
        saved = content["rewound"]["mask"]
        assert (saved is None) == (number < T)
        if saved is not None:
            assert_sparse(content["state_dict"], Mask.unpacked(saved["bits"], saved["shapes"]))


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_trained_module_is_adopted(interval: str, tmp_path: Path) -> None:
    module, before = Module(interval), Rates()
    fit(trainer(tmp_path / "before", before), module)
    lines: list[str] = []
    callback, rates = rewinding(adopt=True, say=lines.append), Rates()
    mine = trainer(tmp_path, callback, rates)
    fit(mine, module)
    assert mine.current_epoch == len(callback.run) == 2 * T
    assert [reached.density for reached in callback.run.levels[1:]] == densities(1.5)
    assert "momentum and its like start empty" in lines[1]
    assert pieces(rates.seen, T * BATCHES) == [pytest.approx(before.seen)] * 2
    assert callback.run.mask is not None
    assert_sparse(module.state_dict(), callback.run.mask)


def test_the_accuracy_of_an_adopted_module_is_validated_before(tmp_path: Path) -> None:
    module = Module()
    fit(trainer(tmp_path / "before"), module)
    given = {"adopt": True, "max_drop": 9.0, "monitor": "val_loss", "mode": "min"}
    with pytest.raises(InputError, match=r"accuracy of the adopted module; call trainer\.validate with this trainer"):
        fit(trainer(tmp_path / "untold", rewinding(**given)), module)
    callback = rewinding(**given)
    mine = trainer(tmp_path / "told", callback)
    (validated,) = mine.validate(module, loader(32), verbose=False)
    fit(mine, module)
    assert [reached.density for reached in callback.run.levels] == [1.0, *densities(1.5)]
    assert callback.run.levels[0].accuracy == pytest.approx(validated["val_loss"])
    mine.validate(module, loader(32), verbose=False)  # of the pruned module, afterwards: told to nobody
    assert callback.run.levels[0].accuracy == pytest.approx(validated["val_loss"])


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """Data that nobody has counted."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(6), torch.tensor(0)


def test_an_adopted_module_needs_epochs_of_known_length(tmp_path: Path) -> None:
    module = Module("epoch")
    module.configure_optimizers = lambda: (  # type: ignore[method-assign]
        [optimizer := SGD(module.parameters(), lr=0.1)],
        [{"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}],
    )
    with pytest.raises(InputError, match="how long an epoch is; give the trainer limit_train_batches"):
        trainer(tmp_path, rewinding(adopt=True)).fit(module, DataLoader(Endless(), batch_size=16))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    module, callback = Module(), rewinding()
    mine = trainer(tmp_path, callback)
    fit(mine, module)
    assert not hooks(mine, module)
    assert callback.run.mask is not None
    assert_sparse(copy.deepcopy(module.net).state_dict(prefix="net."), callback.run.mask)
    assert_sparse(pickle.loads(pickle.dumps(module.net)).state_dict(prefix="net."), callback.run.mask)
    with pytest.raises(InputError, match="make a new one, and a new Trainer"):  # it is not trained dense again
        fit(mine, module)


class Trip(Callback):
    """Stumbles over a batch."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:  # type: ignore[override]
        if trainer.global_step == T * BATCHES + 2:
            raise KeyError("the user's own")


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    module = Module()
    mine = trainer(tmp_path, rewinding(), Trip())
    with pytest.raises(KeyError, match="the user's own"):
        fit(mine, module)
    assert not hooks(mine, module)


# Resuming


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
@pytest.mark.parametrize("when", ["epoch's end", "validation's end", "batch's end"])
def test_a_resumed_run_ends_as_if_it_had_never_stopped(technique: str, when: str, tmp_path: Path) -> None:
    options = {"technique": technique, "retrain_epochs": 2}
    saving = {
        "epoch's end": {"save_on_train_epoch_end": True},
        "validation's end": {"save_on_train_epoch_end": False},
        "batch's end": {"every_n_train_steps": BATCHES},
    }
    module, callback, rates = Module(), rewinding(**options), Rates()
    fit(trainer(tmp_path, callback, rates, every_epoch(tmp_path, **saving[when])), module)
    # In the dense run and at its end, in the first level and at its end, and when all is over.
    for epochs in (1, T, T + 1, T + 2, T + 4):
        again, other, seen = Module(), rewinding(**options), Rates()
        mine = trainer(tmp_path, other, seen)
        fit(mine, again, tmp_path / f"step={epochs * BATCHES}.ckpt")
        assert other.run.levels == callback.run.levels
        assert seen.seen == rates.seen[epochs * BATCHES :]
        for name, value in module.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), (epochs, name)


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    callback, rates = rewinding(), Rates()
    fit(trainer(tmp_path, callback, rates, every_epoch(tmp_path, every_n_train_steps=1)), Module())
    for step in (2, T * BATCHES + 3):
        module, other, seen = Module(), rewinding(), Rates()
        fit(trainer(tmp_path, other, seen), module, tmp_path / f"step={step}.ckpt")
        assert seen.seen == rates.seen[step:]
        assert [reached.epochs for reached in other.run.levels] == [T, 2 * T, 3 * T]
        assert other.run.mask is not None
        assert_sparse(module.state_dict(), other.run.mask)


def test_a_checkpoint_without_the_run_is_refused(tmp_path: Path) -> None:
    fit(trainer(tmp_path, every_epoch(tmp_path)), Module())
    with pytest.raises(InputError, match="this checkpoint knows of no mask"):
        fit(trainer(tmp_path, rewinding()), Module(), tmp_path / f"step={BATCHES}.ckpt")


# How far to go


class Losing(Module):
    """Validates worse and worse from the second level on."""

    def __init__(self, callback: Rewind) -> None:
        super().__init__()
        self.callback = [callback]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        level = 0 if self.trainer.sanity_checking else self.callback[0].run.level
        self.log("val_acc", torch.tensor(0.9 - 0.15 * max(0, level - 1)))


def test_max_drop_ends_the_training_and_returns_the_last_good_level(tmp_path: Path) -> None:
    callback = rewinding(compression=10, max_drop=0.1, monitor="val_acc")
    module = Losing(callback)
    fit(trainer(tmp_path, callback, every_epoch(tmp_path)), module)
    run = callback.run
    assert [reached.accuracy for reached in run.levels] == pytest.approx([0.9, 0.9, 0.75, 0.6])
    assert len(list(tmp_path.glob("*.ckpt"))) == 4 * T
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.8, abs=0.01)
    assert_sparse(module.state_dict(), run.mask)
    again = rewinding(compression=10, max_drop=0.1, monitor="val_acc")
    other = Losing(again)
    fit(trainer(tmp_path, again), other, tmp_path / f"step={4 * T * BATCHES}.ckpt")
    assert again.run.levels == run.levels
    assert_sparse(other.state_dict(), run.mask)


class Stop(Callback):
    """Ends the training in the middle of the last epoch."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:  # type: ignore[override]
        trainer.should_stop = trainer.global_step == 3 * T * BATCHES - 1


def test_a_training_stopped_by_somebody_else_is_left_where_it_is(tmp_path: Path) -> None:
    module, callback = Module(), rewinding()
    mine = trainer(tmp_path, callback, Stop())
    fit(mine, module)
    assert not hooks(mine, module)
    assert len(callback.run.levels) == 2  # the second level is not at its end
    assert callback.run.mask is not None
    assert_sparse(module.state_dict(), callback.run.mask)


class Pair(Module):
    """Trained by hand, with an optimizer for each layer."""

    def __init__(self, told: str = "epoch", by_batch: bool = False) -> None:
        super().__init__(manual=True)
        self.told, self.by_batch = told, by_batch

    def configure_optimizers(self) -> object:
        made = [SGD(self.net[index].parameters(), lr=rate, momentum=0.9) for index, rate in ((0, 0.1), (3, 0.02))]
        return made, [{"scheduler": lr_scheduler.MultiStepLR(each, [1, 2]), "interval": self.told} for each in made]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizers, list)
        assert isinstance(schedulers, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        for optimizer in optimizers:
            optimizer.step()
        if self.by_batch or self.trainer.is_last_batch:
            for scheduler in schedulers:
                scheduler.step()  # type: ignore[call-arg]


def test_two_optimizers_are_both_rewound(tmp_path: Path) -> None:
    module, rates = Pair(), Rates()
    rewind = rewinding()
    fit(trainer(tmp_path, rewind, rates), module)
    dense = 2 * BATCHES * T  # steps of both
    assert rates.seen[:dense] == rates.seen[dense : 2 * dense]
    assert len(set(rates.seen)) == 6
    assert rewind.run.mask is not None
    assert not any(w[~rewind.run.mask[n]].any() for n, w in module.named_parameters() if n in rewind.run.mask)


def test_a_module_trained_by_hand_says_how_its_schedules_are_stepped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"MultiStepLR is stepped with every batch .* or .* 'interval': 'step' beside"):
        fit(trainer(tmp_path / "untold", rewinding(adopt=True)), Pair(by_batch=True))
    rates = Rates()
    fit(trainer(tmp_path / "told", rewinding(adopt=True), rates), Pair("step", by_batch=True))
    assert rates.seen[: 2 * 3] == pytest.approx([0.1, 0.02, 0.01, 0.002, 0.001, 0.0002])


# Bad input


@pytest.mark.parametrize(
    ("options", "mine", "module", "said"),
    [
        ({"max_steps": 7}, {}, {}, "counted in epochs, not in max_steps=7; give max_epochs"),
        ({"max_epochs": -1}, {}, {"interval": "epoch"}, "training takes at least 1 epoch, not max_epochs=-1"),
        ({}, {}, {"optimizers": 2, "manual": True}, "some parameters are in two of the optimizers"),
        ({}, {"monitor": "val_acc"}, {}, "validation logs no 'val_acc'; give monitor= one of val_loss"),
        ({}, {"retrain_epochs": 4}, {}, "cannot rewind 4 epochs: the original run trains for 3"),
    ],
)
def test_what_cannot_be_done_is_told(
    options: dict[str, object], mine: dict[str, object], module: dict[str, object], said: str, tmp_path: Path
) -> None:
    given = trainer(tmp_path, rewinding(**mine), **options)
    with pytest.raises(InputError, match=said):
        fit(given, Module(**module))  # type: ignore[arg-type]


def test_early_stopping_is_refused(tmp_path: Path) -> None:
    given = trainer(tmp_path, rewinding(), EarlyStopping("val_loss"))
    with pytest.raises(InputError, match="EarlyStopping would end the run in the middle of a level; leave it out"):
        fit(given, Module())


@pytest.mark.parametrize("averaging", [WeightAveraging(), EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)])
def test_an_average_over_denser_networks_is_refused(averaging: Callback, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Averaging would end with an average over denser networks; leave it out, and"):
        fit(trainer(tmp_path, averaging, rewinding()), Module("epoch"))


def test_one_callback_prunes_a_module(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two Rewind callbacks would prune one module; give the trainer one"):
        fit(trainer(tmp_path, rewinding(), rewinding(compression=2)), Module())


def test_max_drop_needs_validation(tmp_path: Path) -> None:
    given = trainer(tmp_path, rewinding(max_drop=0.1, monitor="val_loss"))
    with pytest.raises(InputError, match=r"but nothing is validated; give trainer\.fit a validation loader"):
        given.fit(Module(), loader())


@pytest.mark.parametrize(("max_epochs", "retrain_epochs", "missed"), [(3, None, 3), (4, 3, 7)])
def test_max_drop_needs_a_validation_of_every_level(
    max_epochs: int, retrain_epochs: int | None, missed: int, tmp_path: Path
) -> None:
    callback = rewinding(max_drop=0.1, monitor="val_loss", retrain_epochs=retrain_epochs)
    given = trainer(tmp_path, callback, check_val_every_n_epoch=2, max_epochs=max_epochs)
    with pytest.raises(InputError, match=f"check_val_every_n_epoch=2 does not divide {missed}, .*; give 1"):
        fit(given, Module())
    assert given.global_step == 0, "it is told before training"


def test_max_drop_needs_a_metric() -> None:
    with pytest.raises(InputError, match="max_drop needs the accuracy of every level: give monitor="):
        rewinding(max_drop=0.1)
    with pytest.raises(InputError, match="mode is 'max' where more is better, else 'min', not 'maximum'"):
        rewinding(monitor="val_acc", mode="maximum")


def test_there_is_no_run_before_the_fit() -> None:
    with pytest.raises(InputError, match=r"there is no run before trainer\.fit"):
        _ = rewinding().run


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "rewound.integrations.lightning")
    with pytest.raises(ImportError, match=r"^Lightning is missing: pip install 'rewound\[lightning\]'$"):
        importlib.import_module("rewound.integrations.lightning")
