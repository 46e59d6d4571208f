"""What cannot be rewound under Lightning's Trainer is told in one sentence."""

import importlib
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner

from lightning_module import MARKS, Module, fit, loader, rewinding, trainer
from rewound import InputError
from rewound.integrations.lightning import Rewind

pytestmark = MARKS


def test_a_sparsity_is_answered_with_the_compression() -> None:
    with pytest.raises(InputError, match=r"^Rewind has no sparsity; for 90% sparsity give compression=10$"):
        Rewind(sparsity=0.9)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "mine", "module", "said"),
    [
        ({"max_steps": 7}, {}, {}, "counted in epochs, not in max_steps=7; give max_epochs"),
        ({"max_epochs": -1}, {}, {"interval": "epoch"}, "training takes at least 1 epoch, not max_epochs=-1"),
        ({}, {}, {"optimizers": 2, "manual": True}, "two optimizers share parameters"),
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
    with pytest.raises(InputError, match="Averaging would average denser networks into the pruned one; leave it out"):
        fit(trainer(tmp_path, averaging, rewinding()), Module("epoch"))


def test_a_search_for_a_rate_needs_a_trainer_of_its_own(tmp_path: Path) -> None:
    module, given = Module(), trainer(tmp_path, rewinding(), enable_progress_bar=False)
    module.lr = 0.1  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"has no mask: .*; resume another one, and search for a learning rate or"):
        Tuner(given).lr_find(module, loader(), num_training=4, update_attr=False)


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
    with pytest.raises(InputError, match=f"check_val_every_n_epoch=2 has none after epoch {missed}, .*; give 1"):
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
