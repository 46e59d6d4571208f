"""Prune under Lightning's Trainer: `Trainer(max_epochs=90, callbacks=[Rewind(compression=10)])`.

The trainer's epochs are the dense run, and what `configure_optimizers` returns is its schedule. The callback asks the
trainer for as many epochs more as the levels take, and prunes and rewinds between them. How far the run has come is
kept in every checkpoint, under "rewound": `trainer.fit(..., ckpt_path=...)` goes on under the same mask.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

from rewound.foundations.errors import InputError
from rewound.loops.course import Init
from rewound.loops.example import given_example
from rewound.loops.loop import Epochs, epochs
from rewound.loops.snapshot import Stateful
from rewound.loops.structure import Structure, made_small
from rewound.method.choices import Choices, Chosen, takes_choices
from rewound.tasks import ranks

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
except ImportError as error:
    raise ImportError("Lightning is missing: pip install 'rewound[lightning]'") from error


class Rewind(Callback):
    """Prunes the module that is fitted to `compression`: by default the paper's Algorithm 1.

    The arguments are those of `rewound.epochs`, with T = `max_epochs`. `checkpoint` is the folder of what the run goes
    back to, by default `rewound` below the trainer's `default_root_dir`. A level's accuracy is the metric `monitor` as
    validated in its last epoch; `mode="min"` if less is better. With `adopt` the module was trained before, along the
    schedule that `configure_optimizers` returns: its pruning begins at once, and for `max_drop` its accuracy is what
    `trainer.validate` finds before. The run itself is `callback.run`.
    """

    @takes_choices
    def __init__(
        self,
        *,
        retrain_epochs: int | None = None,
        checkpoint: str | Path | None = None,
        also: Sequence[Stateful] = (),
        init: Init | None = None,
        adopt: bool = False,
        example_inputs: object = None,
        example_keywords: Mapping[str, object] | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        say: Callable[[str], None] = print,
        **chosen: Unpack[Chosen],
    ) -> None:
        if chosen.get("max_drop") is not None and monitor is None:
            raise InputError("max_drop needs the accuracy of every level: give monitor=, a metric that validation logs")
        if mode not in ("max", "min"):
            raise InputError(f"mode is 'max' where more is better, else 'min', not {mode!r}")
        self._new_run = partial(
            epochs,
            retrain_epochs=retrain_epochs,
            also=also,
            init=init,
            adopt=adopt,
            resume=False,
            say=say,
            **chosen,
        )
        self._folder, self._adopts, self._max_drop = checkpoint, adopt, chosen.get("max_drop")
        self._monitor, self._more_is_better = monitor, mode == "max"
        self._also, self._choices = also, Choices(**chosen)
        self._example = example_inputs, example_keywords
        self._saved: dict[str, object] | None = None
        self._small: Structure | None = None  # the module as small as its checkpoint, until the run is made
        self._validated: float | None = None  # the accuracy of an adopted module, from before the fit
        self._run: Epochs | None = None
        self._in_epoch = False
        self._judged = False  # whether the present epoch has been validated

    @property
    def run(self) -> Epochs:
        """The run of the present `fit`, or of the last one."""
        if self._run is None:
            raise InputError("there is no run before trainer.fit")
        return self._run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._choices.slim:
            self._make_small_before_loading(trainer, pl_module)

    def _make_small_before_loading(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the trainer load the weights of a small network: the module gets their shapes before."""
        load = pl_module.on_load_checkpoint

        def loading(checkpoint: dict[str, object]) -> None:
            del pl_module.on_load_checkpoint  # the module's own is below this one
            if isinstance(saved := checkpoint.get("rewound"), dict):
                example = given_example(*self._example_of(pl_module))
                pruner, folder = self._choices.the_pruner, self._run_folder(trainer)
                self._small = made_small(pl_module, self._also, pruner, example, folder, saved)
            load(checkpoint)

        pl_module.on_load_checkpoint = loading  # type: ignore[method-assign]

    def _run_folder(self, trainer: Trainer) -> str | Path:
        return Path(trainer.default_root_dir, "rewound") if self._folder is None else self._folder

    def _example_of(self, pl_module: LightningModule) -> tuple[object, Mapping[str, object] | None]:
        """What was given, or the module's `example_input_array`, where the pruner needs it."""
        if self._example != (None, None) or not self._choices.the_pruner.by_units:
            return self._example
        found = pl_module.example_input_array
        return (None, found) if isinstance(found, Mapping) else (found, None)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        if trainer.state.fn == "fit":
            saved = checkpoint.get("rewound")
            if not isinstance(saved, dict):
                raise InputError(
                    "this checkpoint has no mask: it was saved without the Rewind callback; resume another one, and "
                    "search for a learning rate or a batch size with a Trainer without Rewind"
                )
            self._saved = saved

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        if self._run is not None:
            checkpoint["rewound"] = {**self._run.state_dict(epoch_ended=trainer.is_last_batch), "judged": self._judged}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            raise InputError("this Rewind callback was used in a fit before; make a new one, and a new Trainer")
        training_epochs = _training_epochs(trainer, self._max_drop)
        if self._small is not None:
            self._small.fit(None)  # the run makes it small again
        vars(pl_module).pop("on_load_checkpoint", None)
        inputs, keywords = self._example_of(pl_module)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        steps = _scheduler_steps(trainer, training_epochs) if self._adopts else 1
        run = self._new_run(
            training_epochs,
            pl_module,
            trainer.optimizers,
            schedulers,
            checkpoint=self._run_folder(trainer),
            steps_per_epoch=steps,
            example_inputs=inputs,
            example_keywords=keywords,
        )
        if self._saved is not None:
            run.load_state_dict(self._saved)
            self._take_judged(run, self._saved)
        elif self._adopts and self._validated is not None:
            self._report(run, self._validated)
        if self._max_drop is not None:
            _check_validations(trainer, run.ends)
            if self._adopts and self._saved is None and self._validated is None:
                raise InputError(
                    "max_drop needs the accuracy of the adopted module; call trainer.validate with this trainer "
                    "before trainer.fit"
                )
        trainer.fit_loop.max_epochs = len(run)  # now that `configure_optimizers` has seen T
        self._run, self._epochs = run, iter(run)

    def _take_judged(self, run: Epochs, saved: Mapping[str, object]) -> None:
        """Take over whether the last epoch was validated; an error where it ended a level and was not: Lightning does
        not validate it any more."""
        self._judged = bool(saved.get("judged", True))  # earlier versions did not write it
        if self._max_drop is not None and run.epochs_done == run.ends[run.level] and not self._judged:
            which = f"level {run.level}" if run.level else "the dense run"
            raise InputError(
                f"this checkpoint was saved after the last step of {which} and before the validation that max_drop "
                "needs; resume an earlier one, or one that ModelCheckpoint saves at the end of an epoch "
                "(save_on_train_epoch_end=True)"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        level_is_done = self.run.epochs_done == self.run.ends[self.run.level]
        if self._saved is not None and level_is_done and self.run.is_in_last_epoch:
            trainer.should_stop = True  # a run that max_drop had ended

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        next(self._epochs)
        self._in_epoch, self._judged = True, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._in_epoch:  # Lightning calls no on_train_epoch_start when it resumes in the middle of an epoch
            self.on_train_epoch_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        before = self._adopts and self._run is None
        if self._monitor is None or trainer.sanity_checking or not (before or trainer.state.fn == "fit"):
            return
        metrics = trainer.callback_metrics
        if self._monitor not in metrics:
            raise InputError(f"validation logs no {self._monitor!r}; give monitor= one of {', '.join(metrics)}")
        value = ranks.from_first(float(metrics[self._monitor]))  # without sync_dist each rank has its own
        if before:
            self._validated = value
        else:
            self._report(self.run, value)
            self._judged = True

    def _report(self, run: Epochs, value: float) -> None:
        run.report(value, higher_is_better=self._more_is_better, metric=self._monitor)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # When Lightning resumes from a checkpoint that validation saved, it ends that epoch again before the next.
        if self._in_epoch and trainer.is_last_batch and self.run.is_in_last_epoch:
            trainer.should_stop = True
        self._in_epoch = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_last_batch and self.run.is_in_last_epoch:
            next(self._epochs, None)
        self._epochs.close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_end(trainer, pl_module)  # Lightning does not call it where no epoch was left to train

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._run is not None:
            self._epochs.close()


def _check_validations(trainer: Trainer, ends: Sequence[int]) -> None:
    """An error if a level would end without a validation."""
    every = trainer.check_val_every_n_epoch or 1
    if missed := [end for end in ends if end % every]:
        raise InputError(
            f"max_drop needs a validation at the end of every level, but check_val_every_n_epoch={every} has "
            f"none after epoch {missed[0]}, where one ends; give 1"
        )


_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")  # by name: older versions of Lightning have one of them


def _scheduler_steps(trainer: Trainer, training_epochs: int) -> int:
    """How often the trainer steps its scheduler in an epoch, for a network that was trained before."""
    if all(config.interval == "epoch" for config in trainer.lr_scheduler_configs):
        return 1
    if not 0 < (steps := trainer.estimated_stepping_batches) < math.inf:
        raise InputError("adopt=True needs to know how long an epoch is; give the trainer limit_train_batches")
    return math.ceil(steps / training_epochs)


def _training_epochs(trainer: Trainer, max_drop: float | None) -> int:
    """T of a trainer; an error if it does not train one network for a number of epochs."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning does not declare it
    if sum(isinstance(callback, Rewind) for callback in callbacks) > 1:
        raise InputError("two Rewind callbacks would prune one module; give the trainer one")
    if trainer.early_stopping_callbacks:
        raise InputError(
            "EarlyStopping would end the run in the middle of a level; leave it out, and give max_drop= to stop before "
            "accuracy falls"
        )
    for callback in callbacks:
        if any(base.__name__ in _AVERAGES for base in type(callback).__mro__):
            raise InputError(
                f"{type(callback).__name__} would average denser networks into the pruned one; leave it out, keep the "
                "average in the module, and name it in Rewind(also=[...])"
            )
    if max_drop is not None and not trainer.enable_validation:
        raise InputError(
            "max_drop needs the accuracy of every level, but nothing is validated; give trainer.fit a validation "
            "loader, and the module a validation_step"
        )
    if trainer.max_steps != -1:
        raise InputError(f"a run is counted in epochs, not in max_steps={trainer.max_steps}; give max_epochs")
    if trainer.max_epochs is None or trainer.max_epochs < 1:
        raise InputError(f"training takes at least 1 epoch, not max_epochs={trainer.max_epochs}")
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        raise InputError(f"cannot prune parameters sharded by {type(trainer.strategy).__name__}; use strategy='ddp'")
    return trainer.max_epochs
