"""Prune under Hugging Face's Trainer: `rewind(trainer, compression=10)`, then `trainer.train()` as before.

The epochs asked for in TrainingArguments, or the steps if it has `max_steps`, are the dense run. The trainer gets the
optimizer and the scheduler of those now, as many epochs or steps more as the levels take, and a callback that prunes
and rewinds between them. How far the run has come is kept in `optimizer.pt` of every checkpoint:
`trainer.train(resume_from_checkpoint=...)` goes on under the same mask, from the middle of an epoch too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from rewound.foundations.errors import InputError, check_kind
from rewound.loops.course import Init
from rewound.loops.loop import Epochs, Steps, epochs, steps
from rewound.loops.optimizers import bare_optimizer, with_inner
from rewound.loops.snapshot import StateDict, Stateful
from rewound.method.choices import Chosen, takes_choices

try:
    from transformers import (
        EarlyStoppingCallback,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError("Hugging Face's Trainer is missing: pip install 'rewound[transformers]'") from error


@takes_choices
def rewind(
    trainer: Trainer,
    *,
    retrain_epochs: int | None = None,
    retrain_steps: int | None = None,
    checkpoint: str | Path | None = None,
    also: Sequence[Stateful] = (),
    init: Init | None = None,
    adopt: bool = False,
    example_inputs: object = None,
    example_keywords: Mapping[str, object] | None = None,
    say: Callable[[str], None] = print,
    **chosen: Unpack[Chosen],
) -> Epochs | Steps:
    """Make `trainer.train()` prune its model to `compression`: by default the paper's Algorithm 1.

    The arguments are those of `rewound.epochs`, with T = `num_train_epochs`; if the trainer has `max_steps`, those of
    `rewound.steps`, with T = `max_steps`. `checkpoint` is the folder of what the run goes back to, by default `rewound`
    below the trainer's `output_dir`. A level's accuracy is `metric_for_best_model` as evaluated in its last epoch, or
    after its last step.
    """
    check_kind("trainer", trainer, Trainer, "give the trainer itself; for a loop of your own there is rewound.epochs")
    _check(trainer)
    args, by_steps = trainer.args, trainer.args.max_steps > 0
    if (retrain_epochs if by_steps else retrain_steps) is not None:
        counted, other = ("max_steps", "retrain_steps") if by_steps else ("num_train_epochs", "retrain_epochs")
        raise InputError(f"this trainer counts in {counted}, so a level's time is given as {other}=")
    if chosen.get("max_drop") is not None:
        _check_evaluated(args, by_steps)
    steps_per_unit = 1 if by_steps else _steps_per_epoch(trainer)
    training_time = args.max_steps if by_steps else int(args.num_train_epochs)
    if trainer._created_lr_scheduler:  # by an earlier `train`, whose network is adopted
        trainer.lr_scheduler = None
    model, optimizer = trainer.model, trainer.create_optimizer()
    scheduler = trainer.create_scheduler(num_training_steps=training_time * steps_per_unit)
    assert model is not None
    trainer._created_lr_scheduler = False  # else `train` would make a new one, for all levels together
    new_run = (
        partial(steps, retrain_steps=retrain_steps)
        if by_steps
        else partial(epochs, retrain_epochs=retrain_epochs, steps_per_epoch=steps_per_unit if adopt else 1)
    )
    run: Epochs | Steps = new_run(
        training_time,
        model,
        optimizer,
        scheduler,
        checkpoint=Path(str(args.output_dir), "rewound") if checkpoint is None else checkpoint,
        also=also,
        init=init,
        adopt=adopt,
        example_inputs=example_inputs,
        example_keywords=example_keywords,
        resume=False,
        say=say,
        **chosen,
    )
    if chosen.get("slim"):
        _make_small_before_loading(trainer, run)
    if by_steps:
        _check_ends(args, run.ends, chosen.get("max_drop"))
        args.max_steps = len(run)
    else:
        args.num_train_epochs = len(run)
    trainer.add_callback(_Rewinding(run, _with_save_hooks(bare_optimizer(optimizer)), steps_per_unit))
    return run


def _make_small_before_loading(trainer: Trainer, run: Epochs | Steps) -> None:
    """Let the trainer load the weights of a small network: the model gets their shapes before."""
    load = trainer._load_from_checkpoint

    def loading(path: str, model: nn.Module | None = None) -> None:
        if (file := Path(path, "optimizer.pt")).is_file():
            saved = torch.load(file, map_location="cpu", weights_only=True).get("rewound")
            if isinstance(saved, dict):
                run.load_state_dict(saved)
        load(path, model)

    trainer._load_from_checkpoint = loading  # type: ignore[method-assign, assignment]


def _check(trainer: Trainer) -> None:
    """An error for settings under which the trainer would not train what it has now, or not to the end."""
    args = trainer.args
    if any(isinstance(callback, _Rewinding) for callback in trainer.callback_handler.callbacks):
        raise InputError("this trainer is being rewound already; make a new one for another run")
    if args.max_steps <= 0 and args.num_train_epochs != int(args.num_train_epochs):
        raise InputError(f"num_train_epochs must be a whole number, not {args.num_train_epochs:g}")
    if args.load_best_model_at_end:
        raise InputError(
            "load_best_model_at_end would bring back a denser network; leave it out, and give max_drop= for the "
            "smallest network that is good enough"
        )
    if any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks):
        raise InputError(
            "EarlyStoppingCallback would end the run in the middle of a level; leave it out, and give max_drop= to "
            "stop before accuracy falls"
        )
    if args.auto_find_batch_size:
        raise InputError("auto_find_batch_size may restart the training; give per_device_train_batch_size")
    if getattr(trainer, "model_init", None) is not None:
        raise InputError("a trainer with model_init makes its model only when it trains; give it model=")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise InputError("cannot prune parameters sharded by FSDP or DeepSpeed; use DistributedDataParallel")


def _check_evaluated(args: TrainingArguments, by_steps: bool) -> None:
    """An error if a level would not be evaluated at its end, before the trainer saves it."""
    metric = args.metric_for_best_model
    evaluated, saved = (getattr(strategy, "value", strategy) for strategy in (args.eval_strategy, args.save_strategy))
    if by_steps and (metric is None or evaluated != "steps" or saved == "epoch"):
        raise InputError(
            "max_drop needs the accuracy of every level: give metric_for_best_model=, eval_strategy='steps' and "
            f"save_strategy='steps' or 'no', not {metric!r}, {evaluated!r} and {saved!r}"
        )
    if not by_steps and (metric is None or evaluated != "epoch" or saved == "steps"):
        raise InputError(
            "max_drop needs the accuracy of every level: give metric_for_best_model=, eval_strategy='epoch' and "
            f"save_strategy='epoch' or 'no', not {metric!r}, {evaluated!r} and {saved!r}"
        )


def _check_ends(args: TrainingArguments, ends: Sequence[int], max_drop: float | None) -> None:
    """An error if a level would end after a step without an evaluation."""
    every = args.eval_steps
    if max_drop is not None and (missed := [end for end in ends if every is None or every < 1 or end % every]):
        raise InputError(
            f"max_drop needs an evaluation at the end of every level, but eval_steps={every} has none after step "
            f"{missed[0]:,}, where one ends; give a divisor of {missed[0]:,}"
        )


def _steps_per_epoch(trainer: Trainer) -> int:
    try:
        batches = len(trainer.get_train_dataloader())
    except TypeError as error:
        raise InputError("the training data have no length, so their epochs have no end; give max_steps") from error
    return math.ceil(batches / trainer.args.gradient_accumulation_steps)


def _with_save_hooks(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose hooks are called when the given one is saved: for timm's Lookahead, the one inside it."""
    seen: list[Optimizer] = []
    hooks = [each.register_state_dict_post_hook(lambda each, _: seen.append(each)) for each in with_inner(optimizer)]
    optimizer.state_dict()
    for hook in hooks:
        hook.remove()
    if not seen:
        raise InputError(
            f"{type(optimizer).__name__} saves its state without torch's hooks, so that the trainer's checkpoints "
            "could not hold how far the run has come; give the trainer an optimizer that calls Optimizer.state_dict"
        )
    return optimizer if optimizer in seen else seen[-1]


class _Rewinding(TrainerCallback):
    """Advances a run with a trainer, by epochs or by steps: its units, which have so many steps each."""

    def __init__(self, run: Epochs | Steps, optimizer: Optimizer, steps_per_unit: int) -> None:
        self.run, self.optimizer, self.steps_per_unit = run, optimizer, steps_per_unit
        self.loaded = self.has_trained = False
        # The trainer does not say from where it resumes, but it restores its optimizer before anything else.
        self.hook = optimizer.register_load_state_dict_pre_hook(self.load)

    def load(self, optimizer: Optimizer, state: StateDict) -> None:
        if isinstance(saved := state.get("rewound"), dict):
            self.run.load_state_dict(saved)
            self.loaded = True

    def save(self, optimizer: Optimizer, state: StateDict) -> StateDict:
        if isinstance(self.run, Steps):
            return {**state, "rewound": self.run.state_dict()}
        return {**state, "rewound": self.run.state_dict(epoch_ended=self.is_between_units(self.state))}

    def is_between_units(self, state: TrainerState) -> bool:
        return state.global_step % self.steps_per_unit == 0

    def is_at_end(self, state: TrainerState) -> bool:
        run = self.run
        return self.is_between_units(state) and (
            run.is_in_last_step if isinstance(run, Steps) else run.is_in_last_epoch
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.hook.remove()
        if self.has_trained:
            raise InputError("this trainer has trained its run; for another, make a new one and call rewind(trainer)")
        if state.global_step and not self.loaded:
            raise InputError(
                "this checkpoint has no mask: it was saved without its optimizer (save_only_model) or before "
                "rewind(trainer); resume another, or train on its model with adopt=True"
            )
        self.state, self.has_trained = state, True
        self.hook = self.optimizer.register_state_dict_post_hook(self.save)
        self.units = iter(self.run)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if isinstance(self.run, Epochs):
            self.advance(state)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if isinstance(self.run, Steps):
            self.advance(state)

    def advance(self, state: TrainerState) -> None:
        number, here = next(self.units, None), state.global_step // self.steps_per_unit
        if number is None:
            ended = "had come to its end" if here >= len(self.run) else "max_drop had ended"
            raise InputError(f"this checkpoint is of a run that {ended}: there is nothing left to train")
        if number != here:
            self.units.close()  # which removes its hooks
            if isinstance(self.run, Steps):
                raise InputError(
                    f"this checkpoint was saved after step {number}, but its trainer counts {here}; resume another"
                )
            raise InputError(
                f"this checkpoint was saved in epoch {number}, but at {self.steps_per_unit} steps per epoch its "
                f"{state.global_step} steps end in epoch {here}; give the same data and batch size"
            )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        metrics = cast(Mapping[str, float], kwargs["metrics"])
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        if (value := metrics.get(f"eval_{metric}")) is not None:
            higher = args.greater_is_better
            if higher is None:  # the metric was named after the arguments were made, which else decide it so
                higher = not metric.endswith("loss")
            self.run.report(value, higher_is_better=higher, metric=metric)
        if self.is_at_end(state):
            control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.is_at_end(state):
            next(self.units, None)
        self.units.close()
        self.hook.remove()
