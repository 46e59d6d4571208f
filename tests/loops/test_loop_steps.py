"""`rewound.steps`: the same as `rewound.epochs` for a loop that counts steps."""

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.optimizer import Optimizer

import rewound
from forked import ended
from rewound import TECHNIQUES, Diverged, Facts, InputError, Schedule, Technique
from rewound import Steps as StepsRun
from rewound.loops import iteration
from sameness import assert_same
from training_loops import STEPS, T, batch, network, one_step, redraw

N = T * STEPS


def made(model: nn.Module | None = None) -> tuple[nn.Module, Optimizer, lr_scheduler.LRScheduler]:
    """What `Loop` has, with a schedule that moves in every step."""
    model = model or network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=N)


def by_steps(
    things: tuple[nn.Module, Optimizer, lr_scheduler.LRScheduler],
    rates: list[float] | None = None,
    until: int | None = None,
    score: Callable[[StepsRun], float] | None = None,
    **options: object,
) -> StepsRun:
    model, optimizer, scheduler = things
    run = rewound.steps(N, *things, **{"say": lambda line: None, **options})  # type: ignore[arg-type]
    for step in run:
        one_step(model, optimizer, *divmod(step, STEPS))
        if rates is not None:
            rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        if score is not None:
            run.report(score(run))
        if step == until:
            break
    return run


def by_epochs(things: tuple[nn.Module, Optimizer, lr_scheduler.LRScheduler], **options: object) -> rewound.Epochs:
    model, optimizer, scheduler = things
    run = rewound.epochs(T, *things, say=lambda line: None, **options)  # type: ignore[arg-type]
    for epoch in run:
        for step in range(STEPS):
            one_step(model, optimizer, epoch, step)
            scheduler.step()
    return run


@pytest.mark.parametrize("t", [2, T])
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("final", [None, 0.05])
def test_steps_do_what_epochs_of_as_many_do(technique: str, t: int, final: float | None) -> None:
    if final is None and technique in ("fine-tuning", "low-lr-weight-rewinding"):
        final = 0.01  # OneCycle ends at nothing
    options = {"compression": 1.9, "technique": technique, "init": redraw, "final": final}
    one, other = made(), made()
    torch.manual_seed(1)
    epochs = by_epochs(one, retrain_epochs=t, **options)
    torch.manual_seed(1)
    steps = by_steps(other, retrain_steps=t * STEPS, **options)
    assert steps.mask is not None
    assert steps.mask == epochs.mask
    assert_same(other[0].state_dict(), one[0].state_dict())
    assert [reached.done for reached in steps.levels] == [STEPS * reached.done for reached in epochs.levels]


def test_a_level_may_begin_in_the_middle_of_what_would_be_an_epoch() -> None:
    """Weight rewinding to step N - t, written out by hand."""
    t = 7
    rates: list[float] = []
    run = by_steps(things := made(), rates, compression=1.25, technique="weight-rewinding", retrain_steps=t)
    assert rates[N:] == rates[N - t : N]
    model, optimizer, scheduler = made()
    for step in range(N):
        if step == N - t:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        one_step(model, optimizer, *divmod(step, STEPS))
        scheduler.step()
    mask = rewound.Pruner()(model, 0.8)
    assert run.mask == mask
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    with mask.attached(model, optimizer):
        for step in range(N, N + t):
            optimizer.param_groups[0].update(lr=rates[step - t], momentum=MOMENTA[step - t])
            one_step(model, optimizer, *divmod(step, STEPS))
    assert_same(things[0].state_dict(), model.state_dict())


def _momenta() -> list[float]:
    _, optimizer, scheduler = made()
    found = []
    for _ in range(N):
        found.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        scheduler.step()
    return found


MOMENTA = _momenta()


def test_steps_are_counted_on_and_the_schedule_is_told() -> None:
    said: list[str] = []
    model, optimizer, scheduler = made()
    run = rewound.steps(
        N, model, optimizer, scheduler, compression=1.25, technique="weight-rewinding", retrain_steps=4, say=said.append
    )
    seen = []
    for step in run:
        seen.append((step, run.level, run.schedule_step, run.steps_done, run.is_in_last_step))
        one_step(model, optimizer, *divmod(step, STEPS))
        scheduler.step()
    assert [each[0] for each in seen] == list(range(N + 4)) == [each[3] for each in seen]
    assert [each[1:3] for each in seen] == [(0, step) for step in range(N)] + [(1, N - 4 + step) for step in range(4)]
    assert [each[4] for each in seen] == [False] * (N + 3) + [True]
    assert len(run) == N + 4 == run.steps_done
    assert run.ends == (N, N + 4)
    assert repr(run) == f"Steps({N + 4} of {N + 4} steps done, level 1 of 1, density 0.8)"
    assert said == [
        f"rewound: {N} dense steps, then 1 level of 4 steps by weight-rewinding to 1.25x (1.17x of the whole network): "
        f"{N + 4} steps",
        f"dense, step {N} of {N + 4}",
        f"level 1 of 1: 1.25x (density 0.8), 1.17x of the whole network, step {N + 4} of {N + 4}",
    ]


# Resuming


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding", "fine-tuning"])
def test_a_run_that_was_left_goes_on_from_the_step_it_was_in(
    technique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iteration, "SAVE_SECONDS", 0.0)  # so that every step is saved
    options = {"compression": 1.5, "technique": technique, "retrain_steps": 10, "final": 0.01}
    whole, rates = made(), list[float]()
    by_steps(whole, rates, **options)
    things, seen = made(), list[float]()
    for until in (2, 6, N - 1, N + 4, N + 15):
        by_steps(things, seen, until, checkpoint=tmp_path, **options)
        del seen[-1]  # the step that was left is done again
        things = made()
        assert rewound.steps(N, *things, checkpoint=tmp_path, **options).steps_done == until  # type: ignore[arg-type]
    by_steps(things, seen, checkpoint=tmp_path, **options)
    assert seen == rates
    assert_same(things[0].state_dict(), whole[0].state_dict())


SCRIPT = """
import hashlib, os, signal, sys
import torch
from torch import nn
import rewound
import rewound.loops.iteration
rewound.loops.iteration.SAVE_SECONDS = 0.0
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12, eta_min=1e-3)
how = dict(compression=1.5, technique="weight-rewinding", retrain_steps=9, checkpoint=sys.argv[1])
for step in rewound.steps(12, model, optimizer, scheduler, say=lambda line: None, **how):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    scheduler.step()
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_a_killed_script_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    killed = [(tmp_path / "killed", die_at) for die_at in (5, 11, 14, 25)]
    runs = [(tmp_path / "whole", -1), *killed, (tmp_path / "killed", -1)]
    whole, *deaths, resumed = ended(str(script), runs)
    assert len(whole.out.strip()) == 2 * hashlib.sha256().digest_size, whole.err
    assert [each.code for each in deaths] == [-9, -9, -9, -9]
    assert resumed.out == whole.out


def test_what_a_damaged_folder_holds_is_told_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "SAVE_SECONDS", 0.0)
    options = {"compression": 1.25, "technique": "weight-rewinding", "retrain_steps": 5, "checkpoint": tmp_path}
    by_steps(made(), until=N + 2, **options)
    (latest := tmp_path / "latest.pt").write_bytes(latest.read_bytes()[:-200])
    said = list[str]()
    by_steps(made(), until=N, say=said.append, **options)
    assert said[0].endswith(f"; going on from step {N}")
    (tmp_path / f"rewind-{N - 5:04d}.pt").unlink()
    with pytest.raises(InputError, match=f"holds no weights of step {N - 5} to rewind to; train anew in another fold"):
        by_steps(made(), **options)


def test_a_folder_of_steps_is_none_of_epochs(tmp_path: Path) -> None:
    by_steps(made(), compression=1.25, checkpoint=tmp_path)
    with pytest.raises(InputError, match="was made without training_epochs; give the same"):
        by_epochs(made(), compression=1.25, checkpoint=tmp_path)


# How often an optimizer steps


def accumulated(run: StepsRun, model: nn.Module, optimizer: Optimizer, every: int, until: int | None = None) -> None:
    for step in run:
        x, y = batch(0, step)
        nn.functional.cross_entropy(model(x), y).backward()
        if step % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
        if step == until:
            break


def test_gradients_may_be_accumulated_over_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "SAVE_SECONDS", 0.0)

    def begun(folder: Path | None) -> tuple[StepsRun, nn.Module, Optimizer]:
        model = network()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return (
            rewound.steps(16, model, optimizer, compression=1.5, checkpoint=folder, say=lambda line: None),
            model,
            optimizer,
        )

    accumulated(*(whole := begun(None)), every=4)
    for until in (5, 10, 22):  # each in the middle of what is accumulated: it goes on after the last step
        accumulated(*begun(tmp_path), every=4, until=until)
    accumulated(*(again := begun(tmp_path)), every=4)
    assert_same(again[1].state_dict(), whole[1].state_dict())


def test_two_optimizers_may_step_in_each_and_one_more_often() -> None:
    def train(by: str) -> dict[str, Tensor]:
        model = network()
        pair = [SGD(model[:2].parameters(), lr=0.1), Adam(model[3:].parameters(), lr=0.01)]
        schedulers = [lr_scheduler.ExponentialLR(each, 0.9) for each in pair]
        run = (
            rewound.epochs(T, model, pair, schedulers, compression=1.5, say=lambda line: None)
            if by == "epochs"
            else rewound.steps(N, model, pair, schedulers, compression=1.5, say=lambda line: None)
        )
        for unit in run:
            for step in range(STEPS) if by == "epochs" else [0]:
                x, y = batch(unit, step) if by == "epochs" else batch(*divmod(unit, STEPS))
                for optimizer, scheduler, times in zip(pair, schedulers, (1, 2), strict=True):
                    for _ in range(times):
                        optimizer.zero_grad()
                        nn.functional.cross_entropy(model(x), y).backward()
                        optimizer.step()
                    scheduler.step()
        return model.state_dict()

    assert_same(train("steps"), train("epochs"))


def test_a_step_that_is_skipped_has_its_place() -> None:
    """As by a GradScaler: the rates of later steps do not move up."""
    model, optimizer, scheduler = made()
    run = rewound.steps(N, model, optimizer, scheduler, compression=1.25, say=lambda line: None)
    rates: dict[int, float] = {}
    for step in run:
        if step not in (1, 4):  # of the dense run; in the level all are taken
            one_step(model, optimizer, *divmod(step, STEPS))
            rates[step] = optimizer.param_groups[0]["lr"]
        scheduler.step()
    assert [rates[N + step] for step in range(5, N)] == [rates[step] for step in range(5, N)]


def test_a_loop_that_steps_another_optimizer_is_told_after_a_hundred_steps() -> None:
    model = network()
    optimizer, other = (SGD(model.parameters(), lr=0.1) for _ in range(2))
    run = rewound.steps(1000, model, optimizer, compression=2, say=lambda line: None)
    with pytest.raises(  # noqa: PT012
        InputError, match=r"no optimizer step was taken in steps 0 to 99: give rewound\.steps the optimizer"
    ):
        for step in run:
            one_step(model, other, 0, step)
    assert run.steps_done == 99


def test_a_scheduler_that_is_never_stepped_is_told() -> None:
    model, optimizer, scheduler = made()
    run = rewound.steps(N, model, optimizer, scheduler, compression=2, say=lambda line: None)
    with pytest.raises(InputError, match=rf"OneCycleLR was not stepped in {N} steps: call scheduler\.step"):  # noqa: PT012
        for step in run:
            one_step(model, optimizer, 0, step)


# The rest of what epochs take


def test_max_drop_ends_it_and_returns_the_last_good_level() -> None:
    things = made()
    ends: dict[int, dict[str, Tensor]] = {}

    def score(run: StepsRun) -> float:
        ends[run.level] = copy.deepcopy(things[0].state_dict())
        return [0.9, 0.9, 0.7, 0.7][run.level]

    run = by_steps(things, compression=4, retrain_steps=3, max_drop=0.1, score=score)
    assert [reached.value for reached in run.levels] == [0.9, 0.9, 0.7, 0.7]
    assert_same(things[0].state_dict(), ends[1])


def test_a_level_that_diverges_is_told_by_its_step() -> None:
    model, optimizer, scheduler = made()
    run = rewound.steps(N, model, optimizer, scheduler, compression=1.25, say=lambda line: None)
    with pytest.raises(Diverged, match=rf"level 1 of 1 diverged: by step {2 * N} 0\.weight"):  # noqa: PT012
        for step in run:
            one_step(model, optimizer, *divmod(step, STEPS))
            scheduler.step()
            if run.is_in_last_step:
                nn.init.constant_(model.get_parameter("0.weight"), torch.nan)


@pytest.mark.parametrize("given", ["scheduler", "schedule"])
def test_a_network_that_was_trained_elsewhere_is_adopted(given: str) -> None:
    rates: list[float] = []
    by_steps(made(), rates, compression=1.25)
    model, optimizer, scheduler = made()
    S = Schedule.piecewise(N, [0.1, 0.01], drops=[N - 2])
    run = rewound.steps(
        N,
        model,
        optimizer,
        scheduler if given == "scheduler" else S,
        compression=1.5,
        retrain_steps=6,
        adopt=True,
        say=lambda line: None,
    )
    seen = []
    for step in run:
        one_step(model, optimizer, *divmod(step, STEPS))
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert seen == 2 * (rates[N - 6 : N] if given == "scheduler" else [0.1] * 4 + [0.01] * 2)


def test_a_scheduler_stepped_now_and_then_cannot_be_rehearsed_in_steps() -> None:
    model, optimizer, _ = made()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    run = rewound.steps(N, model, optimizer, scheduler, compression=1.5, adopt=True, say=lambda line: None)
    with pytest.raises(InputError, match=r"StepLR was stepped 5 times in 15 steps, .* give the rates as a"):  # noqa: PT012
        for step in run:
            one_step(model, optimizer, *divmod(step, STEPS))
            if step % STEPS == STEPS - 1:
                scheduler.step()


def halved(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.constant(t, 0.5 * S.peak)


HALVED = Technique(weights="final", lr=halved)


def test_a_rule_draws_as_many_rates_as_there_are_steps() -> None:
    rates: list[float] = []
    by_steps(made(), rates, compression=1.5, technique="test_loop_steps:HALVED", retrain_steps=7)
    assert rates[N:] == pytest.approx([max(rates[:N]) / 2] * 14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrain_steps": N + 1}, f"cannot rewind {N + 1} steps: the original run trains for {N}"),
        ({"retrain_steps": 1.5}, r"retrain_steps must be a whole number, not 1\.5"),
        ({"adopt": True, "technique": "weight-rewinding"}, "its weights at step 2 were not kept"),
    ],
)
def test_what_cannot_be_done_is_told_in_steps(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rewound.steps(N, *made(), compression=2, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^steps has no sparsity; for 75% sparsity give compression=4"):
        rewound.steps(N, *made(), sparsity=0.75)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"the order is steps\(training_steps, model, optimizer, scheduler\)"):
        rewound.steps(made()[0], N, *made()[1:])  # type: ignore[arg-type]


def test_what_is_recorded_does_not_grow_with_the_steps() -> None:
    layer = nn.Linear(2, 2)
    optimizer = SGD(layer.parameters(), lr=0.1)
    run = rewound.steps(5000, layer, optimizer, compression=2, say=lambda line: None)
    layer.weight.grad, layer.bias.grad = torch.zeros(2, 2), torch.zeros(2)
    for step in run:
        optimizer.step()
        if step == 4000:
            break
    (group,) = run._run.progress.recording.groups
    assert sum(len(runs) for track in group.values() for runs in track) == len(group)


def test_a_run_looks_at_the_clock_less_often_than_it_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    save = iteration._Iteration._save_if_due
    monkeypatch.setattr(iteration._Iteration, "_save_if_due", lambda self: (looks.append(0), save(self)))
    layer = nn.Linear(2, 2)
    optimizer = SGD(layer.parameters(), lr=0.1)
    layer.weight.grad, layer.bias.grad = torch.zeros(2, 2), torch.zeros(2)
    run = rewound.steps(4000, layer, optimizer, compression=1.5, checkpoint=tmp_path, say=lambda line: None)
    for _ in run:
        optimizer.step()
    assert len(looks) < 60
