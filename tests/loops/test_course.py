"""What a run needs is asked for before its first epoch; a network trained elsewhere may be taken over."""

import copy
from contextlib import nullcontext as does_not_raise
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD, lr_scheduler

import rewound
from rewound import InputError, Pruner, Schedule
from sameness import is_same
from training_loops import STEPS, Loop, T, network, one_step, redraw


class Opaque:
    """Has a state that is not plain data."""

    def state_dict(self) -> dict[str, object]:
        return {"path": Path("x")}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compression": 1}, "compression must be above 1, not 1"),
        ({"compression": 0.5}, "compression must be above 1, not 0.5"),
        ({"technique": "rewinding"}, "unknown technique 'rewinding'"),
        ({"retrain_epochs": 9}, "cannot rewind 9 epochs: the original run trains for 5; use at most 5"),
        ({"retrain_epochs": 0}, "retraining time must be above 0, not 0"),
        ({"max_drop": -1}, "max_drop must be at least 0, not -1"),
        ({"technique": "reinitialization"}, "reinitialization needs init=, a function that draws fresh weights"),
        ({"pruner": Pruner(only=("no such",))}, "only 'no such' matches no parameter of the model; it has 0.weight, "),
        ({"pruner": Pruner(only=("*.bias",))}, "no prunable weights"),
        ({"pruner": Pruner(floor=0.5)}, r"floor 0\.5 keeps 72 weights, but density 0\.1 only 15; lower floor"),
        ({"compression": 145}, "leaves less than one of 144 weights; the largest compression is 144"),
        ({"compression": "10"}, "compression must be a number, not '10'; leave out the quotes"),
        ({"technique": None}, "a technique is given by its name, not as None"),
        ({"retrain_epochs": 2.5}, "retrain_epochs must be a whole number, not 2.5"),
        ({"rate": 1.5}, "rate must be between 0 and 1, not 1.5: it is the fraction of the remaining weights"),
        ({"adopt": True, "steps_per_epoch": "3"}, "steps_per_epoch must be a whole number, not '3'"),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0: a scheduler is stepped at least once an epoch"),
        ({"steps_per_epoch": 391}, "steps_per_epoch=391 says how often an adopted network's new scheduler is stepped"),
        ({"final": -1}, "final must be a learning rate, 0 or above, not -1"),
        ({"also": "ema"}, "also must be of type list or tuple, not 'ema'; give a list of objects with a state_dict"),
        ({"also": [Opaque()]}, "the state of Opaque is not plain data"),
        (
            {"also": [object()]},
            "object has no state to be saved; give .* in also torch.Generators and what has a state",
        ),
    ],
)
def test_bad_arguments_are_told_before_the_first_epoch(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Loop().run(**options)


@pytest.mark.parametrize("epochs", ["2", 2.5, True, None])
def test_epochs_are_whole(epochs: object) -> None:
    loop = Loop()
    with pytest.raises(InputError, match=f"training_epochs must be a whole number, not {epochs!r}"):
        rewound.epochs(epochs, loop.model, loop.optimizer)  # type: ignore[arg-type]


def test_model_and_optimizer_swapped_are_told_their_order() -> None:
    loop = Loop()
    order = r"the order is epochs\(training_epochs, model, optimizer, scheduler\)"
    with pytest.raises(InputError, match=f"model must be of type Module, not SGD; {order}"):
        rewound.epochs(T, loop.optimizer, loop.model)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"optimizer must be of type Optimizer, not Sequential; {order}"):
        rewound.epochs(T, loop.model, loop.model)  # type: ignore[arg-type]


@pytest.mark.parametrize("adopt", [False, True])
def test_a_scheduler_of_another_optimizer_is_named(adopt: bool) -> None:
    loop, other = Loop(), Loop()
    with pytest.raises(InputError, match=r"MultiStepLR drives another optimizer \(SGD\) than the one given"):
        rewound.epochs(T, loop.model, loop.optimizer, other.scheduler, adopt=adopt)


def test_a_scheduler_that_has_been_used_is_told_before_the_first_epoch() -> None:
    loop = Loop()
    for epoch in range(T):  # the network is trained already
        one_step(loop.model, loop.optimizer, epoch, 0)
        loop.scheduler.step()
    with pytest.raises(InputError, match=r"MultiStepLR has been stepped before \(5 times\), .* give adopt=True"):
        loop.over(loop.run(compression=2))
    assert loop.seen == []


def test_a_second_run_needs_a_new_scheduler() -> None:
    loop = Loop()
    loop.over(loop.run(compression=1.25))
    with pytest.raises(InputError, match=r"MultiStepLR has been stepped before .* make a new optimizer and scheduler"):
        loop.over(loop.run(compression=1.25))


class Unbound:
    """A scheduler that does not say whose rate it moves."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def test_a_scheduler_need_not_say_what_it_drives() -> None:
    loop = Loop()
    with does_not_raise():
        rewound.epochs(T, loop.model, loop.optimizer, Unbound())


@pytest.mark.parametrize("rate", [None, "auto"])
@pytest.mark.parametrize("adopt", [True, False])
def test_a_group_without_a_learning_rate_is_told_before_the_first_epoch(rate: object, adopt: bool) -> None:
    loop = Loop()
    loop.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    loop.optimizer.param_groups[1]["lr"] = rate  # as optimizers do that find their own
    with pytest.raises(InputError, match=f"parameter group 1 of SGD has lr={rate!r}, .* give each group a number"):
        loop.run(adopt=adopt)


def test_a_schedule_that_ends_for_good_must_be_given() -> None:
    loop = Loop()
    lr_scheduler.OneCycleLR(loop.optimizer, 0.1, total_steps=T * STEPS)
    with pytest.raises(InputError, match=r"OneCycleLR moves this optimizer's rate, .* give it as the scheduler"):
        rewound.epochs(T, loop.model, loop.optimizer)
    schedule = rewound.Schedule.constant(T, 0.1)
    rewound.epochs(T, loop.model, loop.optimizer, schedule, adopt=True)  # whose loop need not step the old one


def test_a_model_without_prunable_weights_is_refused() -> None:
    with pytest.raises(InputError, match="no prunable weights"):
        Loop(nn.BatchNorm1d(4)).run()


def test_another_models_optimizer_is_refused() -> None:
    loop = Loop()
    other = SGD(network().parameters(), lr=0.1)
    with pytest.raises(InputError, match="the optimizer trains none of the model's prunable weights"):
        rewound.epochs(T, loop.model, other)


@pytest.mark.parametrize("only", [("0.*",), ("*",)], ids=["what is selected", "everything"])
def test_frozen_weights_alone_cannot_be_pruned(only: tuple[str, ...]) -> None:
    loop = Loop()
    (loop.model[0] if only == ("0.*",) else loop.model).requires_grad_(False)  # type: ignore[index]
    with pytest.raises(InputError, match=r"trains none of the model's prunable weights: .* unfreeze what is to be"):
        loop.run(pruner=Pruner(only=only))


def test_a_schedule_that_ends_at_zero_cannot_be_fine_tuned_at_until_final_is_declared(tmp_path: Path) -> None:
    def loop() -> Loop:
        model = network()
        optimizer = SGD(model.parameters(), lr=0.1)
        return Loop(model, optimizer, lr_scheduler.LambdaLR(optimizer, lambda epoch: max(0.0, 1 - epoch / (T - 1))))

    options = {"compression": 1.5, "technique": "fine-tuning", "retrain_epochs": 2, "checkpoint": tmp_path}
    said = r"this schedule ends at 0, too low to retrain at .* for example final=0\.001; "
    with pytest.raises(InputError, match=said + r"with checkpoint= the same script goes on after the dense run$"):
        (lost := loop()).over(lost.run(**{**options, "checkpoint": None}))
    with pytest.raises(InputError, match=said + r"the same script with it goes on after the dense run$"):
        (first := loop()).over(first.run(**options))
    second = loop()
    second.over(second.run(**options, final=0.001))
    assert second.seen[0] == (T, 1, T)  # the dense run is still there
    assert {rate for rates in second.rates for rate in rates} == {0.001}


@pytest.mark.parametrize("drops", [False, True], ids=["a line to zero", "a step"])
def test_a_low_rate_is_one_to_fine_tune_at_where_it_was_trained_at(drops: bool) -> None:
    steps = 200
    line, step = (lambda i: 1 - i / steps), (lambda i: 1.0 if i < 0.9 * steps else 0.005)
    loop = Loop()
    each = lr_scheduler.LambdaLR(loop.optimizer, step if drops else line)
    run = rewound.epochs(1, loop.model, loop.optimizer, each, compression=2, technique="fine-tuning", one_shot=True)

    def train() -> None:
        for epoch in run:
            for number in range(steps):
                one_step(loop.model, loop.optimizer, epoch, number)
                each.step()

    if drops:
        train()
    else:
        with pytest.raises(InputError, match=r"this schedule ends at 0\.0005, too low to retrain at \(peak 0\.1\)"):
            train()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_declared_rate_need_not_have_been_trained_at(resumed: bool, tmp_path: Path) -> None:
    schedule = rewound.Schedule.linear(100 * T, 0.1, final=0.0005)
    options = {"compression": 1.5, "technique": "fine-tuning", "retrain_epochs": 1, "adopt": True}

    def over(until: int | None) -> Loop:
        loop = Loop()
        loop.scheduler.step = lambda: None  # type: ignore[method-assign]
        run = rewound.epochs(
            T, loop.model, loop.optimizer, schedule, checkpoint=tmp_path, say=loop.said.append, **options
        )
        loop.over(run, until=until)
        return loop

    if resumed:
        over(until=0)
    assert {rate for rates in over(until=None).rates for rate in rates} == {0.0005}


def test_final_holds_after_the_end_of_a_schedule_that_declares_another() -> None:
    loop = Loop()
    loop.scheduler.step = lambda: None  # type: ignore[method-assign]
    schedule = rewound.Schedule.linear(T, 0.1, final=0.05)
    options = {"compression": 1.5, "technique": "fine-tuning", "retrain_epochs": 3, "adopt": True, "final": 0.01}
    loop.over(rewound.epochs(T, loop.model, loop.optimizer, schedule, say=loop.said.append, **options))
    assert {rate for rates in loop.rates for rate in rates} == {0.01}


def test_a_forgotten_scheduler_step_is_told_after_the_first_epoch() -> None:
    loop = Loop()
    epochs = iter(loop.run(compression=2))
    one_step(loop.model, loop.optimizer, next(epochs), 0)
    with pytest.raises(
        InputError, match=r"MultiStepLR was not stepped in epoch 0: call scheduler.step\(\) in the loop"
    ):
        next(epochs)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch would rather not be told
@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("kind", ["CosineAnnealingWarmRestarts", "LambdaLR"])
def test_a_scheduler_may_be_told_the_epoch(kind: str, by_step: bool) -> None:
    loop = Loop()
    loop.scheduler = {
        "CosineAnnealingWarmRestarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(loop.optimizer, T_0=3),
        "LambdaLR": lambda: lr_scheduler.LambdaLR(loop.optimizer, lambda epoch: 0.5**epoch),
    }[kind]()
    rates: list[list[float]] = []
    for epoch in loop.run(compression=1.5):
        rates.append([])
        for step in range(STEPS):
            one_step(loop.model, loop.optimizer, epoch, step)
            rates[-1].append(loop.optimizer.param_groups[0]["lr"])
            if by_step:
                loop.scheduler.step(epoch + step / STEPS)  # type: ignore[arg-type]  # as torch's own example does
        if not by_step:
            loop.scheduler.step(epoch)
    assert len({rate for each in rates[:T] for rate in each}) > 2
    assert rates == 3 * rates[:T]


def test_a_loop_that_steps_another_optimizer_is_told_after_the_first_epoch() -> None:
    loop = Loop()
    epochs = iter(loop.run(compression=2))
    one_step(loop.model, SGD(loop.model.parameters(), lr=0.1), next(epochs), 0)
    with pytest.raises(InputError, match="no optimizer step was taken in epoch 0"):
        next(epochs)


def test_an_initialization_that_repeats_the_first_one_is_refused() -> None:
    loop = Loop()
    start = copy.deepcopy(loop.model.state_dict())
    run = loop.run(compression=2, technique="reinitialization", init=lambda model: model.load_state_dict(start))
    with pytest.raises(InputError, match="init gave the initial weights of the dense run"):
        loop.over(run)


# Adopting a network that was trained elsewhere


@pytest.mark.parametrize("technique", ["lr-rewinding", "fine-tuning"])
@pytest.mark.parametrize("slots", [True, False])
def test_an_adopted_network_goes_on_as_if_it_had_been_trained_here(technique: str, slots: bool) -> None:
    here, elsewhere, later = Loop(), Loop(), Loop(network(seed=7))
    options = {"compression": 1.5, "technique": technique, "retrain_epochs": 3}
    for epoch in range(T):
        for step in range(STEPS):
            one_step(elsewhere.model, elsewhere.optimizer, epoch, step)
        elsewhere.scheduler.step()
    later.model.load_state_dict(elsewhere.model.state_dict())
    if slots:
        later.optimizer.load_state_dict(elsewhere.optimizer.state_dict())
        for group in later.optimizer.param_groups:
            group["lr"] = 0.1  # a new scheduler starts from the first rate
    run = later.run(**options, adopt=True)
    assert len(run) == 6
    for epoch in run:
        for step in range(STEPS):
            one_step(later.model, later.optimizer, epoch + T, step)
    here.over(here.run(**options))
    assert is_same(later.model.state_dict(), here.model.state_dict()) == slots
    assert ("the optimizer has no state: momentum and its like start empty" in later.said) == (not slots)


def test_an_adopted_network_may_bring_a_schedule_and_its_accuracy() -> None:
    loop = Loop()
    S = Schedule.piecewise(T, [0.1, 0.01], drops=[3])
    run = rewound.epochs(
        T, loop.model, loop.optimizer, S, compression=1.5, adopt=True, max_drop=0.1, say=loop.said.append
    )
    run.report(accuracy=0.9)
    loop.over(run, accuracy=lambda run: 0.85)
    assert [rates[0] for rates in loop.rates] == 2 * [0.1, 0.1, 0.1, 0.01, 0.01]
    assert [reached.value for reached in run.levels] == [0.9, 0.85, 0.85]


@pytest.mark.parametrize("technique", ["weight-rewinding", "low-lr-weight-rewinding"])
def test_weights_that_were_not_kept_cannot_be_rewound(technique: str) -> None:
    with pytest.raises(InputError, match=f"cannot use {technique} on an adopted network: its weights at epoch 2 were"):
        Loop().run(technique=technique, retrain_epochs=3, adopt=True)


def test_an_adopted_network_may_be_reinitialized() -> None:
    loop = Loop()
    run = loop.over(loop.run(compression=1.25, technique="reinitialization", retrain_epochs=1, adopt=True, init=redraw))
    assert len(loop.seen) == len(run) == T + 1


def test_the_schedule_of_an_adopted_network_must_be_known() -> None:
    loop = Loop()
    with pytest.raises(InputError, match="adopt=True needs the schedule"):
        rewound.epochs(T, loop.model, loop.optimizer, adopt=True)
    with pytest.raises(InputError, match="steps_per_epoch=0: a scheduler is stepped at least once an epoch"):
        loop.run(adopt=True, steps_per_epoch=0)
    loop.optimizer.step()
    loop.scheduler.step()
    with pytest.raises(InputError, match="must be new, not at step 1"):
        loop.run(adopt=True)
    with pytest.raises(InputError, match="a Schedule is for adopt=True"):
        rewound.epochs(T, loop.model, loop.optimizer, Schedule.constant(T, 0.1))
    with pytest.raises(InputError, match=r"steps_per_epoch=3 says .*, which a Schedule says itself; leave it"):
        rewound.epochs(T, loop.model, loop.optimizer, Schedule.constant(T, 0.1), adopt=True, steps_per_epoch=3)


class Noting:
    """A scheduler whose state is a list that it appends to."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer, self.noted = optimizer, list[float]()

    def step(self) -> None:
        self.noted.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, object]:
        return {"noted": self.noted}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.noted = state["noted"]  # type: ignore[assignment]


def test_a_scheduler_is_left_as_it_was_when_it_has_been_run_through() -> None:
    model = network()
    scheduler = Noting(optimizer := SGD(model.parameters(), lr=0.1))
    rewound.epochs(T, model, optimizer, scheduler, adopt=True, say=len)  # type: ignore[arg-type]
    assert scheduler.noted == []
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_schedule_that_follows_the_training_cannot_be_adopted() -> None:
    loop = Loop()
    plateau = lr_scheduler.ReduceLROnPlateau(loop.optimizer)
    with pytest.raises(InputError, match=r"ReduceLROnPlateau .* cannot run through it; give .* rewound.Schedule"):
        rewound.epochs(T, loop.model, loop.optimizer, plateau, adopt=True)


def test_a_schedule_by_step_that_was_adopted_by_epoch_is_told_after_the_first_epoch() -> None:
    loop = Loop()
    epochs = iter(loop.run(compression=1.25, adopt=True))
    epoch = next(epochs)
    for step in range(STEPS):
        one_step(loop.model, loop.optimizer, epoch, step)
        loop.scheduler.step()
    with pytest.raises(InputError, match=r"MultiStepLR is stepped with every batch .* give steps_per_epoch=3"):
        next(epochs)
