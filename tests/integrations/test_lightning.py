"""Lightning's Trainer, rewound: a small module is pruned level by level."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from lightning_module import (
    BATCHES,
    MARKS,
    Module,
    Rates,
    T,
    assert_sparse,
    every_epoch,
    fit,
    hooks,
    loader,
    pieces,
    rewinding,
    trainer,
)
from rewound import Diverged, InputError, Mask, Pruner, densities
from rewound.integrations.lightning import Rewind

pytestmark = MARKS


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
    assert run.levels[-1].value == pytest.approx(float(mine.callback_metrics["val_loss"]))
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
    assert callback.run.levels[0].value == pytest.approx(validated["val_loss"])
    mine.validate(module, loader(32), verbose=False)  # of the pruned module, afterwards: told to nobody
    assert callback.run.levels[0].value == pytest.approx(validated["val_loss"])


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
    assert [reached.value for reached in run.levels] == pytest.approx([0.9, 0.9, 0.75, 0.6])
    assert len(list(tmp_path.glob("*.ckpt"))) == 4 * T
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.8, abs=0.01)
    assert_sparse(module.state_dict(), run.mask)
    again = rewinding(compression=10, max_drop=0.1, monitor="val_acc")
    other = Losing(again)
    fit(trainer(tmp_path, again), other, tmp_path / f"step={4 * T * BATCHES}.ckpt")
    assert again.run.levels == run.levels
    assert_sparse(other.state_dict(), run.mask)


class Exploding(Losing):
    """Has infinite weights from the end of a level on."""

    def __init__(self, callback: Rewind, level: int) -> None:
        super().__init__(callback)
        self.level = level

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        run = None if self.trainer.sanity_checking else self.callback[0].run
        exploded = run is not None and run.level == self.level
        if exploded:
            torch.nn.init.constant_(self.net[3].weight, torch.inf)
        self.log("val_acc", torch.tensor(torch.nan if exploded else 0.9))


@pytest.mark.parametrize("level", [1, 2])
def test_a_level_that_is_not_finite_ends_the_training(level: int, tmp_path: Path) -> None:
    callback = rewinding(max_drop=0.1, monitor="val_acc")
    module = Exploding(callback, level)
    mine = trainer(tmp_path / "returned", callback)
    fit(mine, module)
    assert mine.current_epoch == T * (level + 1)
    assert [reached.level for reached in callback.run.levels] == list(range(level))
    assert bool(module.net[3].weight.isfinite().all())
    assert (callback.run.mask is None) == (level == 1)
    callback = rewinding()
    with pytest.raises(Diverged, match=f"level {level} of 2 diverged"):
        fit(trainer(tmp_path / "raised", callback), Exploding(callback, level))


def test_an_accuracy_in_percent_is_refused_at_the_first_validation(tmp_path: Path) -> None:
    callback = rewinding(max_drop=0.01, monitor="val_acc")
    module = Losing(callback)
    module.validation_step = lambda batch, batch_idx: module.log("val_acc", torch.tensor(97.28))  # type: ignore[method-assign]
    mine = trainer(tmp_path, callback)
    with pytest.raises(InputError, match=r"val_acc 97\.28 is above 1, so max_drop=0\.01"):
        fit(mine, module)
    assert mine.current_epoch == 0


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
