"""Lightning's Trainer, rewound and resumed from its own checkpoints."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_module import BATCHES, MARKS, Module, Rates, T, assert_sparse, every_epoch, fit, rewinding, trainer
from rewound import InputError

pytestmark = MARKS


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding", "gradual"])
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
    # In the dense run and at its end, in each level and at its end.
    for epochs in (1, *range(T, len(callback.run) + 1)):
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
        assert [reached.done for reached in other.run.levels] == [T, 2 * T, 3 * T]
        assert other.run.mask is not None
        assert_sparse(module.state_dict(), other.run.mask)


def test_a_checkpoint_without_the_run_is_refused(tmp_path: Path) -> None:
    fit(trainer(tmp_path, every_epoch(tmp_path)), Module())
    with pytest.raises(InputError, match="this checkpoint has no mask"):
        fit(trainer(tmp_path, rewinding()), Module(), tmp_path / f"step={BATCHES}.ckpt")


def test_a_checkpoint_from_before_the_validation_that_ends_a_level_is_refused_where_it_counts(tmp_path: Path) -> None:
    options = {"compression": 1.5, "retrain_epochs": 1, "monitor": "val_loss", "mode": "min"}
    judged = {**options, "max_drop": 100.0}
    after_steps = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=BATCHES)
    callback = rewinding(**judged)
    fit(trainer(tmp_path, callback, after_steps), Module())
    ends = [end * BATCHES for end in callback.run.ends]
    assert ends[:2] == [T * BATCHES, (T + 1) * BATCHES]
    for end, which in zip(ends, ("the dense run", "level 1"), strict=False):
        checkpoint = tmp_path / f"step={end}.ckpt"
        with pytest.raises(InputError, match=f"saved after the last step of {which} and before the validation"):
            fit(trainer(tmp_path, rewinding(**judged)), Module(), checkpoint)
        fit(trainer(tmp_path, again := rewinding(**options)), Module(), checkpoint)
        assert len(again.run.levels) == len(callback.run.levels), "nothing compares them"
    fit(trainer(tmp_path, again := rewinding(**judged)), Module(), tmp_path / f"step={ends[0] - BATCHES}.ckpt")
    assert again.run.levels == callback.run.levels
