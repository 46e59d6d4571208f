"""`rewound.epochs` is the algorithm around anybody's loop: what it yields, rewinds, keeps, resumes and refuses."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.optimizer import Optimizer, _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rewound
import rewound.loop
from rewound import TECHNIQUES, Epochs, InputError, Mask, Pruner, Schedule, levels

T, STEPS = 5, 3  # epochs, and optimizer steps in each
SCRIPT = Path(__file__).with_name("own_loop.py")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def redraw(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def batch(epoch: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * epoch + step)
    x = torch.randn(16, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def one_step(model: nn.Module, optimizer: Optimizer, epoch: int, step: int) -> None:
    x, y = batch(epoch, step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@dataclass
class Loop:
    """A user's training script: a model, an optimizer, a scheduler, and what it saw."""

    model: nn.Module = field(default_factory=network)
    optimizer: Optimizer = None  # type: ignore[assignment]
    scheduler: lr_scheduler.LRScheduler = None  # type: ignore[assignment]
    seen: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, level, epoch of the schedule)"""
    rates: list[list[float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = self.optimizer or SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        self.scheduler = self.scheduler or lr_scheduler.MultiStepLR(self.optimizer, [2, 4])

    def run(self, **options: object) -> Epochs:
        objects = (self.model, self.optimizer, self.scheduler)
        return rewound.epochs(T, *objects, say=self.said.append, **options)  # type: ignore[arg-type]

    def over(self, run: Epochs, until: int | None = None, accuracy: Callable[[Epochs], float] | None = None) -> Epochs:
        for epoch in run:
            self.seen.append((epoch, run.level, run.schedule_epoch))
            self.rates.append([])
            for step in range(STEPS):
                one_step(self.model, self.optimizer, epoch, step)
                self.rates[-1].append(self.optimizer.param_groups[0]["lr"])
            self.scheduler.step()
            if accuracy is not None:
                run.report(accuracy=accuracy(run))
            if epoch == until:
                break
        return run


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


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
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_every_technique_is_what_it_is_by_hand(technique: str, t: int, one_shot: bool) -> None:
    loop = Loop()
    options = {"compression": 2, "technique": technique, "retrain_epochs": t, "one_shot": one_shot}
    run = loop.over(loop.run(**options, init=redraw))
    torch.manual_seed(0)
    weights, mask = reference(technique, t, [0.5] if one_shot else rewound.densities(2))
    assert run.mask is not None
    assert same(dict(run.mask), dict(mask))
    assert same(loop.model.state_dict(), weights)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_epochs_are_counted_on_and_the_rest_is_told(technique: str) -> None:
    loop = Loop()
    run = loop.over(loop.run(compression=1.5, technique=technique, retrain_epochs=2, init=redraw))
    expected = [(0, epoch) for epoch in range(T)]
    for number, level in enumerate(levels(TECHNIQUES[technique], 2, T, rewound.densities(1.5)), start=1):
        expected += [(number, (level.schedule_from or 0) + done) for done in range(level.length)]
    assert loop.seen == [(epoch, *rest) for epoch, rest in enumerate(expected)]
    assert len(run) == len(loop.seen)
    assert [reached.density for reached in run.levels] == [1.0, 0.8, pytest.approx(1 / 1.5)]
    assert loop.said[0].endswith(f"by {technique} to 1.5x: {len(run)} epochs")


def test_rewinding_repeats_the_dense_rates_and_fine_tuning_holds_the_last() -> None:
    for technique, start in (("lr-rewinding", 2), ("weight-rewinding", 2), ("fine-tuning", 4)):
        loop = Loop()
        loop.over(loop.run(compression=1.5, technique=technique, retrain_epochs=3))
        again = [loop.rates[min(start + done, T - 1)] for done in range(3)]
        assert loop.rates[T:] == 2 * again


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


def test_tied_and_frozen_weights_are_pruned_once_and_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    loop = Loop(model)
    run = loop.over(loop.run(compression=2, retrain_epochs=1))
    assert run.mask is not None
    assert list(run.mask) == ["0.weight", "2.weight", "3.weight"]
    assert model[1].weight is model[0].weight
    assert not model[2].weight.requires_grad


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
    assert same(dict(masks[0] or {}), dict(masks[1] or {}))
    assert same(plain.model.state_dict(), wrapped.model.state_dict())


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
            for step in range(STEPS):
                one_step(loop.model, loop.optimizer, epoch, step)
            loop.scheduler.step()
            assert hooks(loop)
            if epoch == at:
                if how == "break":
                    break
                raise KeyError("the user's own")
    except KeyError:
        pass
    assert not hooks(loop)
    copy.deepcopy(loop.model)


def test_a_whole_run_leaves_no_hook() -> None:
    loop = Loop()
    loop.over(loop.run(compression=1.5, retrain_epochs=1))
    assert not hooks(loop)


def test_a_run_is_iterated_over_once() -> None:
    loop = Loop()
    run = loop.over(loop.run(compression=2), until=1)
    with pytest.raises(InputError, match=r"make a new one with rewound\.epochs"):
        iter(run)


# Resuming


@pytest.fixture(autouse=True)
def _save_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.loop, "SAVE_SECONDS", 0.0)


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(rewound.__file__).parents[1]), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding", "reinitialization"])
def test_a_killed_script_run_again_ends_as_if_nothing_had_happened(technique: str, tmp_path: Path) -> None:
    whole = script(tmp_path / "whole", technique)
    assert whole.returncode == 0, whole.stderr
    for die_in in (2, 5, 9):  # in the dense run, in the first level, in the second
        assert script(tmp_path / "killed", technique, die_in).returncode == -9
    resumed = script(tmp_path / "killed", technique)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    lines = [line for line in resumed.stdout.splitlines() if line.startswith("epoch")]
    assert lines[0].startswith("epoch 9,")
    assert lines == [line for line in whole.stdout.splitlines() if line.startswith("epoch")][9:]


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_only_what_may_be_needed_is_kept_on_disk(technique: str, tmp_path: Path) -> None:
    loop = Loop()
    run = loop.run(compression=2.5, technique=technique, retrain_epochs=2, checkpoint=tmp_path, init=redraw)
    most = 0
    for epoch in run:
        for step in range(STEPS):
            one_step(loop.model, loop.optimizer, epoch, step)
        loop.scheduler.step()
        most = max(most, len(list(tmp_path.glob("*.pt"))))
    back = {"weight-rewinding": {"rewind-0003.pt"}, "low-lr-weight-rewinding": {"rewind-0003.pt"}}
    back["reinitialization"] = {"rewind-0000.pt"}
    names = {path.name for path in tmp_path.glob("*.pt")}
    last = len(run.levels) - 1
    assert names == {"level-00.pt", f"level-{last - 1:02d}.pt", f"level-{last:02d}.pt"} | back.get(technique, set())
    assert most <= 5  # and `latest`


def test_a_finished_run_yields_nothing_more_and_returns_its_network(tmp_path: Path) -> None:
    first = Loop()
    mask = first.over(first.run(compression=2, checkpoint=tmp_path)).mask
    again = Loop(network(seed=7))
    run = again.over(again.run(compression=2, checkpoint=tmp_path))
    assert again.seen == []
    assert same(again.model.state_dict(), first.model.state_dict())
    assert same(dict(run.mask or {}), dict(mask or {}))
    assert again.said[0].endswith(f"{len(run)} epochs, {len(run)} of them done")


@pytest.mark.parametrize("one_shot", [False, True], ids=["iterative", "one-shot"])
@pytest.mark.parametrize("until", [None, -2], ids=["finished", "in its last level"])
def test_a_larger_compression_goes_on(tmp_path: Path, one_shot: bool, until: int | None) -> None:
    options = {"retrain_epochs": 3, "technique": "weight-rewinding", "one_shot": one_shot}
    first = Loop()
    run = first.run(compression=2, checkpoint=tmp_path, **options)
    first.over(run, until=None if until is None else len(run) + until)
    second, whole = Loop(network(seed=7)), Loop()
    grown = second.over(second.run(compression=2.6, checkpoint=tmp_path, **options))
    straight = whole.over(whole.run(compression=2.6, **options))
    assert same(dict(grown.mask or {}), dict(straight.mask or {}))
    assert same(second.model.state_dict(), whole.model.state_dict())
    assert second.seen == whole.seen[-len(second.seen) :]
    assert len(second.seen) <= (3 if one_shot else 6)  # nothing before the level they share is trained again


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"technique": "fine-tuning"},
            "was made with technique lr-rewinding, not fine-tuning; give the same arguments",
        ),
        ({"retrain_epochs": 2}, "was made with retrain_epochs 5, not 2"),
        ({"rate": 0.5}, "was made with rate|does not lead to"),
        ({"one_shot": True}, "was made with one_shot False, not True|does not lead to"),
        ({"pruner": Pruner(scope="layer")}, "was made with pruner"),
        ({"compression": 1.3}, "was pruned to 2x, which does not lead to 1.3x"),
    ],
)
def test_a_folder_made_with_other_arguments_says_what_differs(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    loop = Loop()
    loop.over(loop.run(compression=2, checkpoint=tmp_path))
    before = copy.deepcopy(loop.model.state_dict())
    with pytest.raises(InputError, match=said):
        loop.over(loop.run(**{"compression": 2, "checkpoint": tmp_path, **changed}))
    assert same(loop.model.state_dict(), before)
    finished = loop.over(loop.run(compression=2, checkpoint=tmp_path))
    assert len(finished.levels) == 5  # the folder is as usable as before


def test_another_network_or_optimizer_is_named(tmp_path: Path) -> None:
    loop = Loop()
    loop.over(loop.run(compression=2, checkpoint=tmp_path), until=2)
    other = Loop(nn.Linear(6, 3))
    with pytest.raises(InputError, match="was made with weights"):
        other.over(other.run(compression=2, checkpoint=tmp_path))
    other = Loop(model := network(), Adam(model.parameters()))
    with pytest.raises(InputError, match="was made with optimizer SGD, not Adam"):
        other.over(other.run(compression=2, checkpoint=tmp_path))


def test_a_folder_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "arguments.json").write_text("[]")
    loop = Loop()
    with pytest.raises(InputError, match="was made by another version of rewound"):
        loop.over(loop.run(checkpoint=tmp_path))
    (tmp_path / "arguments.json").write_text("{nonsense")
    with pytest.raises(InputError, match="is not the folder of a run"):
        loop.over(loop.run(checkpoint=tmp_path))


def test_a_damaged_snapshot_is_named(tmp_path: Path) -> None:
    loop = Loop()
    loop.over(loop.run(compression=2, checkpoint=tmp_path))
    newest = max(tmp_path.glob("level-*.pt"))
    newest.write_bytes(newest.read_bytes()[:-200])
    with pytest.raises(InputError, match=f"cannot read .*{newest.name}"):
        loop.over(loop.run(compression=2, checkpoint=tmp_path))


def test_progress_travels_through_a_trainers_checkpoint(tmp_path: Path) -> None:
    whole, first = Loop(), Loop()
    options = {"compression": 2, "technique": "weight-rewinding", "retrain_epochs": 3}
    whole.over(whole.run(**options))
    run = first.run(**options, checkpoint=tmp_path, resume=False)
    for epoch in run:
        if epoch == T + 4:  # a trainer saves at an epoch's beginning, and dies
            saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), run.state_dict()))
            break
        for step in range(STEPS):
            one_step(first.model, first.optimizer, epoch, step)
        first.scheduler.step()
    second = Loop(network(seed=7))
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    run = second.run(**options, checkpoint=tmp_path, resume=False)
    run.load_state_dict(saved[2])
    second.over(run)
    assert second.seen[0][0] == T + 4
    assert same(second.model.state_dict(), whole.model.state_dict())
    other = second.run(compression=2, rate=0.5, resume=False)
    with pytest.raises(InputError, match="was pruned to densities"):
        other.load_state_dict(saved[2])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: pytest -m cuda tests/test_loop.py")
@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["default", "fused", "foreach"])
def test_a_run_on_a_gpu_resumes_there(technique: str, options: dict[str, bool], tmp_path: Path) -> None:
    def loop() -> Loop:
        model = network().cuda()
        return Loop(model, SGD(model.parameters(), lr=0.1, momentum=0.9, **options))

    def over(run: Epochs, loop: Loop, until: int | None = None) -> Mask | None:
        for epoch in run:
            for step in range(STEPS):
                x, y = (tensor.cuda() for tensor in batch(epoch, step))
                loop.optimizer.zero_grad()
                nn.functional.cross_entropy(loop.model(x), y).backward()
                loop.optimizer.step()
            loop.scheduler.step()
            if epoch == until:
                break
        return run.mask

    settings = {"compression": 2, "technique": technique, "retrain_epochs": 3}
    whole, killed, resumed = loop(), loop(), loop()
    mask = over(whole.run(**settings), whole)
    over(killed.run(**settings, checkpoint=tmp_path), killed, until=T + 4)
    again = over(resumed.run(**settings, checkpoint=tmp_path), resumed)
    assert mask is not None
    assert again is not None
    assert same(dict(mask), dict(again))
    for name, tensor in whole.model.state_dict().items():
        assert torch.allclose(tensor, resumed.model.state_dict()[name], atol=1e-5)


@pytest.mark.parametrize("epoch", [1, 2, T + 1], ids=["dense", "where it goes back to", "pruned"])
def test_a_run_goes_on_in_the_middle_of_an_epoch(epoch: int, tmp_path: Path) -> None:
    options = {"compression": 1.5, "technique": "weight-rewinding", "retrain_epochs": 3, "checkpoint": tmp_path}

    def made() -> Loop:
        optimizer = SGD((model := network()).parameters(), lr=0.1, momentum=0.9)
        return Loop(model, optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=T * STEPS))

    def by_step(
        loop: Loop, run: Epochs, start: int = 0, stop: tuple[int, int] | None = None
    ) -> list[dict[str, object]]:
        for epoch in run:
            for step in range(start, STEPS):
                one_step(loop.model, loop.optimizer, epoch, step)
                loop.rates.append([loop.optimizer.param_groups[0]["lr"]])
                loop.scheduler.step()
                if (epoch, step) == stop:
                    states = [thing.state_dict() for thing in (loop.model, loop.optimizer, loop.scheduler)]
                    return copy.deepcopy([*states, run.state_dict(epoch_ended=False)])
            start = 0
        return []

    whole, first, second = made(), made(), made()
    by_step(whole, whole.run(**options, resume=False))
    saved = by_step(first, first.run(**options, resume=False), stop=(epoch, 1))
    run = second.run(**options, resume=False)
    for thing, state in zip((second.model, second.optimizer, second.scheduler, run), saved, strict=True):
        thing.load_state_dict(state)
    by_step(second, run, start=2)
    assert first.rates + second.rates == whole.rates
    assert same(second.model.state_dict(), whole.model.state_dict())


# Reporting


def scripted(values: dict[int, float]) -> Callable[[Epochs], float]:
    return lambda run: values[run.level]


@pytest.mark.parametrize(
    ("accuracies", "returned", "trained"),
    [
        ({0: 0.9, 1: 0.91, 2: 0.90, 3: 0.9, 4: 0.9}, 4, 4),
        ({0: 0.9, 1: 0.9, 2: 0.8, 3: 0.9, 4: 0.9}, 4, 4),  # one bad level is chance
        ({0: 0.9, 1: 0.9, 2: 0.8, 3: 0.8}, 1, 3),  # two are not
        ({0: 0.9, 1: 0.8, 2: 0.8}, 0, 2),
        ({0: 0.9, 1: 0.9, 2: 0.9, 3: 0.9, 4: 0.8}, 3, 4),
    ],
)
def test_max_drop_waits_one_more_level_and_returns_the_last_good_one(
    accuracies: dict[int, float], returned: int, trained: int
) -> None:
    loop = Loop()
    ends: dict[int, dict[str, Tensor]] = {}

    def accuracy(run: Epochs) -> float:
        ends[run.level] = copy.deepcopy(loop.model.state_dict())
        return accuracies[run.level]

    run = loop.over(loop.run(compression=2, retrain_epochs=1, max_drop=0.02), accuracy=accuracy)
    assert max(level for _, level, _ in loop.seen) == trained
    assert [reached.accuracy for reached in run.levels] == list(accuracies.values())
    assert same(loop.model.state_dict(), ends[returned])
    assert (run.mask is None) == (returned == 0)
    if run.mask is not None:
        assert run.mask.density == pytest.approx(run.levels[returned].density, abs=0.01)


def test_lower_may_be_better() -> None:
    loop = Loop()
    run = loop.run(compression=2, retrain_epochs=1, max_drop=0.5)
    for epoch in run:
        for step in range(STEPS):
            one_step(loop.model, loop.optimizer, epoch, step)
        loop.scheduler.step()
        run.report(accuracy=10.0 + (run.level >= 2), higher_is_better=False)  # a perplexity
    assert len(run.levels) == 4
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.8, abs=0.01)


def test_max_drop_without_a_report_says_what_is_missing() -> None:
    loop = Loop()
    with pytest.raises(InputError, match=r"max_drop needs run.report\(accuracy=...\) in the last epoch of every level"):
        loop.over(loop.run(compression=2, max_drop=0.01))


def test_levels_are_told_as_they_end() -> None:
    loop = Loop()
    loop.over(loop.run(compression=1.25, retrain_epochs=1), accuracy=scripted({0: 0.9, 1: 0.85}))
    assert loop.said == [
        "rewound: 5 dense epochs, then 1 level of 1 epochs by lr-rewinding to 1.25x: 6 epochs",
        "dense, epoch 5 of 6, accuracy 0.9",
        "level 1 of 1: 1.25x (density 0.8), epoch 6 of 6, accuracy 0.85",
    ]


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
    assert same(later.model.state_dict(), here.model.state_dict()) == slots
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
    assert [reached.accuracy for reached in run.levels] == [0.9, 0.85, 0.85]


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
    loop.optimizer.step()
    loop.scheduler.step()
    with pytest.raises(InputError, match="must be new, not at step 1"):
        loop.run(adopt=True)
    with pytest.raises(InputError, match="a Schedule is for adopt=True"):
        rewound.epochs(T, loop.model, loop.optimizer, Schedule.constant(T, 0.1))


# Bad input


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
        ({"max_drop": -1}, "max_drop must not be negative, not -1"),
        ({"technique": "reinitialization"}, "reinitialization needs init=, a function that draws fresh weights"),
        ({"pruner": Pruner(only=("no such",))}, "no prunable weights"),
        ({"also": [Opaque()]}, "the state of Opaque is not plain data"),
        ({"technique": f"{__name__}:RULED"}, "draws its own learning rates, which needs a recipe"),
    ],
)
def test_bad_arguments_are_told_before_the_first_epoch(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Loop().run(**options)


def linear(S: Schedule, T: int, t: int, facts: rewound.Facts) -> Schedule:
    return Schedule.linear(t, S.peak)


RULED = rewound.Technique(weights="final", lr=linear)


def test_a_model_without_prunable_weights_is_refused() -> None:
    with pytest.raises(InputError, match="no prunable weights"):
        Loop(nn.BatchNorm1d(4)).run()


def test_another_models_optimizer_is_refused() -> None:
    loop = Loop()
    other = SGD(network().parameters(), lr=0.1)
    with pytest.raises(InputError, match="the optimizer trains none of the model's prunable weights"):
        rewound.epochs(T, loop.model, other)


def test_a_schedule_that_ends_at_zero_cannot_be_fine_tuned_at_until_final_is_declared(tmp_path: Path) -> None:
    def loop() -> Loop:
        model = network()
        optimizer = SGD(model.parameters(), lr=0.1)
        return Loop(model, optimizer, lr_scheduler.LambdaLR(optimizer, lambda epoch: max(0.0, 1 - epoch / (T - 1))))

    options = {"compression": 1.5, "technique": "fine-tuning", "retrain_epochs": 2, "checkpoint": tmp_path}
    with pytest.raises(InputError, match=r"this schedule ends at 0, too low to retrain at .* for example final=0\.001"):
        (first := loop()).over(first.run(**options))
    second = loop()
    second.over(second.run(**options, final=0.001))
    assert second.seen[0] == (T, 1, T)  # the dense run is still there
    assert {rate for rates in second.rates for rate in rates} == {0.001}


def test_a_forgotten_scheduler_step_is_told_after_the_first_epoch() -> None:
    loop = Loop()
    epochs = iter(loop.run(compression=2))
    one_step(loop.model, loop.optimizer, next(epochs), 0)
    with pytest.raises(
        InputError, match=r"MultiStepLR was not stepped in epoch 0: call scheduler.step\(\) in the loop"
    ):
        next(epochs)


def test_a_loop_that_steps_another_optimizer_is_told_after_the_first_epoch() -> None:
    loop = Loop()
    epochs = iter(loop.run(compression=2))
    one_step(loop.model, SGD(loop.model.parameters(), lr=0.1), next(epochs), 0)
    with pytest.raises(InputError, match="no optimizer step was taken in epoch 0"):
        next(epochs)


def test_a_network_that_diverged_is_not_pruned_and_its_folder_stays(tmp_path: Path) -> None:
    loop = Loop()
    run = loop.run(compression=2, checkpoint=tmp_path)

    def spoiled() -> Iterator[None]:
        for epoch in run:
            for step in range(STEPS):
                one_step(loop.model, loop.optimizer, epoch, step)
            loop.scheduler.step()
            if epoch == T - 1:
                nn.init.constant_(loop.model.get_parameter("0.weight"), float("nan"))
            yield

    with pytest.raises(InputError, match=r"cannot prune 0\.weight: it holds NaN or infinite weights"):
        list(spoiled())
    assert (tmp_path / "level-00.pt").exists()


def test_an_initialization_that_repeats_the_first_one_is_refused() -> None:
    loop = Loop()
    start = copy.deepcopy(loop.model.state_dict())
    run = loop.run(compression=2, technique="reinitialization", init=lambda model: model.load_state_dict(start))
    with pytest.raises(InputError, match="init gave the initial weights of the dense run"):
        loop.over(run)
