"""`rewound.epochs` is the algorithm around anybody's loop: what it yields, rewinds and leaves behind."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rewound
from rewound import TECHNIQUES, InputError, Mask, Pruner, levels
from sameness import assert_same
from training_loops import AT_ONCE, STEPS, Loop, T, network, one_step, redraw

# The algorithm


def reference(technique: str, t: int, densities: list[float]) -> tuple[dict[str, Tensor], Mask]:
    """The algorithm written out by hand, with nothing of `rewound.epochs`: keep copies, prune, go back, train again."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    S = [0.1, 0.1, 0.1 * 0.1, 0.1 * 0.1, 0.1 * 0.1 * 0.1]  # MultiStepLR multiplies
    history: list[tuple[dict[str, Tensor], dict[str, object]]] = []
    epoch = 0

    def keep() -> None:
        history.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))

    def train(rate: float) -> None:
        nonlocal epoch
        optimizer.param_groups[0]["lr"] = rate
        for step in range(STEPS):
            one_step(model, optimizer, epoch, step)
        epoch += 1

    for rate in S:
        keep()
        train(rate)
    mask = None
    for level in levels(TECHNIQUES[technique], t, T, densities):
        mask = Pruner()(model, level.density, mask)
        if isinstance(level.weights_from, int):
            weights, slots = history[level.weights_from]
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(slots))
        elif level.weights_from == "fresh":
            model.load_state_dict(history[0][0])
            optimizer.load_state_dict(copy.deepcopy(history[0][1]))
            redraw(model)
        with mask.attached(model, optimizer):
            for g in range(level.schedule_from or 0, (level.schedule_from or 0) + level.length):
                train(S[min(g, T - 1)])
    assert mask is not None
    return model.state_dict(), mask


@pytest.mark.parametrize("one_shot", [False, True], ids=["iterative", "one-shot"])
@pytest.mark.parametrize("t", [2, T])
@pytest.mark.parametrize("technique", AT_ONCE)
def test_every_technique_is_what_it_is_by_hand(technique: str, t: int, one_shot: bool) -> None:
    loop = Loop()
    options = {"compression": 2, "technique": technique, "retrain_epochs": t, "one_shot": one_shot}
    run = loop.over(loop.run(**options, init=redraw))
    torch.manual_seed(0)
    weights, mask = reference(technique, t, [0.5] if one_shot else rewound.densities(2))
    assert run.mask is not None
    assert_same(dict(run.mask), dict(mask))
    assert_same(loop.model.state_dict(), weights)


@pytest.mark.parametrize("technique", AT_ONCE)
def test_epochs_are_counted_on_and_the_rest_is_told(technique: str) -> None:
    loop = Loop()
    run = loop.over(loop.run(compression=1.5, technique=technique, retrain_epochs=2, init=redraw))
    expected = [(0, epoch) for epoch in range(T)]
    for number, level in enumerate(levels(TECHNIQUES[technique], 2, T, rewound.densities(1.5)), start=1):
        expected += [(number, (level.schedule_from or 0) + done) for done in range(level.length)]
    assert loop.seen == [(epoch, *rest) for epoch, rest in enumerate(expected)]
    assert len(run) == len(loop.seen)
    assert [reached.density for reached in run.levels] == [1.0, 0.8, pytest.approx(1 / 1.5)]
    assert loop.said[0].endswith(f"by {technique} to 1.5x (1.33x of the whole network): {len(run)} epochs")


def test_rewinding_repeats_the_dense_rates_and_fine_tuning_holds_the_last() -> None:
    for technique, start in (("lr-rewinding", 2), ("weight-rewinding", 2), ("fine-tuning", 4)):
        loop = Loop()
        loop.over(loop.run(compression=1.5, technique=technique, retrain_epochs=3))
        again = [loop.rates[min(start + done, T - 1)] for done in range(3)]
        assert loop.rates[T:] == 2 * again


@pytest.mark.parametrize("technique", AT_ONCE)
def test_a_level_takes_the_longest_time_that_is_safe(technique: str) -> None:
    loop = Loop()
    run = loop.run(compression=1.25, technique=technique, init=redraw)
    rewinds_weights = technique in ("weight-rewinding", "low-lr-weight-rewinding")
    longest = {"reinitialization": 2 * T}.get(technique, T - 1 if rewinds_weights else T)
    assert len(run) == T + longest


def test_pruned_weights_are_zero_after_every_epoch_and_after_the_loop() -> None:
    loop = Loop()
    run = loop.run(compression=3, retrain_epochs=2)
    for epoch in run:
        for step in range(STEPS):
            one_step(loop.model, loop.optimizer, epoch, step)
            for name, kept in (run.mask or {}).items():
                assert not loop.model.get_parameter(name)[~kept].any()
        loop.scheduler.step()
    assert run.mask is not None
    assert run.mask.kept == Pruner().kept({"a": (16, 6), "b": (3, 16)}, 1 / 3)
    assert all(not loop.model.get_parameter(name)[~kept].any() for name, kept in run.mask.items())


def test_a_random_score_draws_by_the_seed_of_the_script() -> None:
    def mask(seed: int) -> Mask | None:
        loop = Loop(network(seed))
        run = loop.run(compression=3, retrain_epochs=1, one_shot=True, pruner=Pruner(score="random"))
        return loop.over(run).mask

    assert mask(1) == mask(1) != mask(2)


def test_a_scheduler_that_would_raise_rests_until_the_loop_ends() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=T)
    loop = Loop(model, optimizer, scheduler)
    loop.over(loop.run(compression=2))
    assert loop.rates[T : 2 * T] == loop.rates[:T]
    with pytest.raises(ValueError, match="Tried to step"):
        scheduler.step()


def test_a_rate_set_by_hand_needs_no_scheduler() -> None:
    loop = Loop()
    run = rewound.epochs(T, loop.model, loop.optimizer, compression=1.3, say=loop.said.append)
    used: list[float] = []
    for epoch in run:
        loop.optimizer.param_groups[0]["lr"] = 0.1 * 0.5**epoch  # what a script does, whatever the level
        for step in range(STEPS):
            one_step(loop.model, loop.optimizer, epoch, step)
        used.append(loop.optimizer.param_groups[0]["lr"])
    assert used[T : 2 * T] == used[:T] == [0.1 * 0.5**epoch for epoch in range(T)]


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
def test_what_belongs_to_the_weights_goes_back_with_them(technique: str) -> None:
    loop = Loop(optimizer=(made := Adam((model := network()).parameters(), lr=0.01)), model=model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # makes its state
    run = loop.run(compression=1.2, technique=technique, retrain_epochs=3, also=[ema, scaler])
    kept: dict[int, list[object]] = {}
    for epoch in run:
        slots = made.state[model[0].weight]
        now = [ema.state_dict()["module.0.bias"].clone(), scaler.get_scale()]
        now += [float(slots["step"]) if slots else 0.0, model[1].running_mean.clone()]  # type: ignore[union-attr]
        kept[epoch] = now
        for step in range(STEPS):
            one_step(model, made, epoch, step)
        ema.update_parameters(model)
        loop.scheduler.step()
        scaler.update(scaler.get_scale() * 2)
    source = T - 3 if technique == "weight-rewinding" else None
    for index, value in enumerate(kept[T]):
        went_back = str(value) == str(kept[T - 3][index])
        assert went_back == (source is not None)
    assert run.mask is not None
    shadow = ema.module.get_parameter("0.weight")
    assert not shadow[~run.mask["0.weight"]].any()


def test_tied_weights_are_pruned_once_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    loop = Loop(model)
    run = loop.over(loop.run(compression=2, retrain_epochs=1))
    assert run.mask is not None
    assert list(run.mask) == ["0.weight", "2.weight"]
    assert model[1].weight is model[0].weight


FROZEN = "not trained by this optimizer, and so not pruned unless that changes before the first pruning: 0.weight"


@pytest.mark.filterwarnings("ignore:only 24.6% of the network")
@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("how", ["frozen", "not in the optimizer"])
def test_weights_that_are_not_trained_are_not_pruned_and_not_counted(how: str, adopt: bool, tmp_path: Path) -> None:
    def made() -> Loop:
        model = network()
        if how == "frozen":
            model[0].requires_grad_(False)
        return Loop(model, SGD([*model[0 if how == "frozen" else 1 :].parameters()], lr=0.1))

    loop, again = made(), made()
    before = loop.model.get_parameter("0.weight").detach().clone()
    options = {"compression": 2, "retrain_epochs": 1, "adopt": adopt, "checkpoint": tmp_path}
    loop.over(loop.run(**options), until=T if adopt is False else 1)
    run = again.over(again.run(**options))
    assert FROZEN in loop.said
    assert torch.equal(again.model.get_parameter("0.weight"), before)
    assert run.mask is not None
    assert list(run.mask) == ["3.weight"]
    assert run.mask.kept == Pruner().kept({"3.weight": (3, 16)}, 0.5)


@pytest.mark.filterwarnings("ignore:only 24.6% of the network")
def test_what_is_unfrozen_in_the_dense_run_is_pruned() -> None:
    loop = Loop()
    loop.model[0].requires_grad_(False)  # type: ignore[index]
    run = loop.run(compression=2, retrain_epochs=1)
    for epoch in run:
        loop.model[0].requires_grad_(epoch > 1)  # type: ignore[index]
        loop.train(epoch)
    assert run.mask is not None
    assert list(run.mask) == ["0.weight", "3.weight"]


def test_what_is_frozen_when_the_dense_run_ends_is_named_then() -> None:
    loop = Loop()
    run = loop.run(compression=2, retrain_epochs=1)
    for epoch in run:
        loop.model[0].requires_grad_(True)  # type: ignore[index]
        loop.train(epoch)
        loop.model[0].requires_grad_(False)  # type: ignore[index]  # as a GAN's critic is while its generator steps
    assert run.mask is not None
    assert list(run.mask) == ["3.weight"]
    assert [text for text in loop.said if "frozen" in text] == [
        "frozen when the dense run ended, and so not pruned; unfreeze at the end of an epoch what is to be: 0.weight"
    ]


@pytest.mark.filterwarnings("ignore:only 24.6% of the network")
def test_what_is_skipped_anyway_needs_no_word() -> None:
    loop = Loop()
    loop.model[0].requires_grad_(False)  # type: ignore[index]
    loop.over(loop.run(compression=1.25, pruner=Pruner(skip=("0.*",))))
    assert FROZEN not in loop.said


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["dp", "compile"])
def test_a_wrapped_model_is_the_same_run(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain, wrapped = Loop(), Loop()
    masks = [plain.over(plain.run(compression=1.5, technique="weight-rewinding", retrain_epochs=3)).mask]
    run = rewound.epochs(
        T,
        wrap(wrapped.model),
        wrapped.optimizer,
        wrapped.scheduler,
        compression=1.5,
        technique="weight-rewinding",
        retrain_epochs=3,
        say=wrapped.said.append,
    )
    masks.append(wrapped.over(run).mask)
    assert_same(masks[0], masks[1])
    assert_same(plain.model.state_dict(), wrapped.model.state_dict())


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, when it compiles
def test_a_compiled_optimizer_step_is_the_same_run() -> None:
    plain, compiled = Loop(), Loop()
    plain.over(plain.run(compression=1.5))
    torch._dynamo.utils.counters.clear()
    compiled.optimizer.step = torch.compile(compiled.optimizer.step, backend="eager")  # type: ignore[method-assign]
    compiled.over(compiled.run(compression=1.5))
    assert_same(plain.model.state_dict(), compiled.model.state_dict())
    assert plain.rates == compiled.rates
    # SGD's own: with and without momenta, and a graph for each learning rate. The hooks would add one for every step.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6


class Lookahead(SGD):
    """Pulls the weights back towards slow ones every other step, as optimizers around optimizers do."""

    def __init__(self, optimizer: SGD) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer, self.taken, self.slow = optimizer, 0, dict[nn.Parameter, Tensor]()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.taken += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            slow = self.slow.setdefault(parameter, parameter.data.clone())
            if self.taken % 2 == 0:
                parameter.data.copy_(slow.lerp_(parameter.data, 0.5))


def test_an_optimizer_around_an_optimizer_takes_its_own_steps_under_the_mask() -> None:
    model = network()
    within = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = Loop(model, Lookahead(within), lr_scheduler.MultiStepLR(within, [2, 4]))
    run = loop.over(loop.run(compression=2, retrain_epochs=2))
    assert run.mask is not None
    for parameter, kept in run.mask.pairs(model):
        assert not parameter[~kept].any()
    assert loop.rates[T : T + 2] == loop.rates[3:T]


# Leaving


def hooks(loop: Loop) -> list[object]:
    """Everything that a run hangs on to somebody else's objects."""
    per_parameter = [p._post_accumulate_grad_hooks for p in loop.model.parameters()]
    step_hooks = [loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks]
    resting = type(loop.scheduler) is not getattr(lr_scheduler, type(loop.scheduler).__name__)
    return [hook for hook in (*per_parameter, *step_hooks, _global_optimizer_pre_hooks, resting) if hook]


@pytest.mark.parametrize("at", [1, T + 1], ids=["dense", "pruned"])
@pytest.mark.parametrize("how", ["break", "exception"])
def test_leaving_early_leaves_no_hook(how: str, at: int) -> None:
    loop = Loop()
    run = loop.run(compression=2)
    try:
        for epoch in run:
            loop.train(epoch)
            assert hooks(loop)
            if epoch == at:
                if how == "break":
                    break
                raise KeyError("the user's own")
    except KeyError:
        pass
    assert not hooks(loop)
    copy.deepcopy(loop.model)


def test_a_whole_run_leaves_no_hook_and_no_word() -> None:
    loop = Loop()
    loop.over(loop.run(compression=1.5, retrain_epochs=1))
    assert not hooks(loop)
    assert loop.said[-1].startswith("level 2 of 2")


def test_leaving_early_is_told_with_what_it_leaves(tmp_path: Path) -> None:
    dense, pruned, kept = Loop(), Loop(), Loop()
    dense.over(dense.run(compression=2), until=1)
    assert dense.said[-1] == "left in epoch 2 of 25, in the dense run, which is not finished: nothing has been pruned"
    pruned.over(pruned.run(compression=2), until=T + 6)
    words = "left in epoch 12 of 25, in level 2 of 4, which is not finished: the mask is no longer held"
    assert pruned.said[-1] == words
    kept.over(kept.run(compression=2, checkpoint=tmp_path), until=T + 6)
    assert kept.said[-1] == f"{words}; run the same script again to go on"


def test_a_run_is_iterated_over_once() -> None:
    loop = Loop()
    run = loop.over(loop.run(compression=2), until=1)
    with pytest.raises(InputError, match=r"make a new one with rewound\.epochs"):
        iter(run)
