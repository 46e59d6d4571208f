"""A run is resumed as if it had never stopped, from a folder that says what it was made for."""

import copy
import errno
import gc
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import AveragedModel

import rewound
import rewound.loops.iteration
from forked import ended
from rewound import Epochs, InputError, Mask
from rewound.loops.checkpoints import _LOCKS
from sameness import assert_same
from training_loops import AT_ONCE, STEPS, Loop, T, network, one_step, redraw

SCRIPT = Path(__file__).parents[1] / "support" / "own_loop.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(rewound.__file__).parents[1]), "PYTHONWARNINGS": "ignore"}


@pytest.fixture(autouse=True)
def _save_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding", "reinitialization"])
def test_a_killed_script_run_again_ends_as_if_nothing_had_happened(technique: str, tmp_path: Path) -> None:
    deaths = (2, 5, 9)  # in the dense run, in the first level, in the second
    runs = [(tmp_path / "whole", technique), *((tmp_path / "killed", technique, die_in) for die_in in deaths)]
    whole, *killed, resumed = ended(str(SCRIPT), [*runs, (tmp_path / "killed", technique)], ENVIRONMENT)
    assert whole.code == 0, whole.err
    assert [each.code for each in killed] == [-9, -9, -9]
    assert resumed.code == 0, resumed.err
    assert resumed.out.splitlines()[-1] == whole.out.splitlines()[-1]
    lines = [line for line in resumed.out.splitlines() if line.startswith("epoch")]
    assert lines[0].startswith("epoch 9,")
    assert lines == [line for line in whole.out.splitlines() if line.startswith("epoch")][9:]


@pytest.mark.parametrize("until", [0, 2, T + 1, None])
def test_a_run_knows_before_its_loop_after_how_many_epochs_it_goes_on(until: int | None, tmp_path: Path) -> None:
    first, second = Loop(), Loop()
    run = first.run(compression=1.3, checkpoint=tmp_path)
    assert run.epochs_done == 0
    for epoch in run:
        assert run.epochs_done == epoch
        first.train(epoch)
        if epoch == until:
            break
    again = second.run(compression=1.3, checkpoint=tmp_path)
    assert again.epochs_done == (len(run) if until is None else until)
    assert list(range(again.epochs_done, len(again))) == [epoch for epoch in again if second.train(epoch) is None]
    assert again.epochs_done == len(again) == 3 * T


@pytest.mark.parametrize("until", [2, T + 1], ids=["in the dense run", "in a level"])
def test_a_generator_of_the_loops_own_draws_on_where_it_was(until: int, tmp_path: Path) -> None:
    def over(folder: Path, until: int | None = None) -> list[int]:
        loop, generator = Loop(), torch.Generator().manual_seed(3)
        run = loop.run(
            compression=1.3, technique="weight-rewinding", retrain_epochs=2, checkpoint=folder, also=[generator]
        )
        drawn = []
        for epoch in run:
            drawn.append(int(torch.randint(10**9, (), generator=generator)))
            loop.train(epoch)
            if epoch == until:
                break
        return drawn

    whole = over(tmp_path / "whole")
    assert len(set(whole)) == len(whole), "weights are rewound, random numbers are not"
    assert over(tmp_path / "left", until) == whole[: until + 1]
    assert over(tmp_path / "left") == whole[until:]


@pytest.mark.parametrize("technique", AT_ONCE)
def test_only_what_may_be_needed_is_kept_on_disk(technique: str, tmp_path: Path) -> None:
    loop = Loop()
    run = loop.run(compression=2.5, technique=technique, retrain_epochs=2, checkpoint=tmp_path, init=redraw)
    most = 0
    for epoch in run:
        loop.train(epoch)
        most = max(most, len(list(tmp_path.glob("*.pt"))))
    back = {"weight-rewinding": {"rewind-0003.pt"}, "low-lr-weight-rewinding": {"rewind-0003.pt"}}
    back["reinitialization"] = {"rewind-0000.pt"}
    names = {path.name for path in tmp_path.glob("*.pt")}
    last = len(run.levels) - 1
    assert names == {"level-00.pt", f"level-{last - 1:02d}.pt", f"level-{last:02d}.pt"} | back.get(technique, set())
    assert most <= 5  # and `latest`


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, set[str]()),
        ({"technique": "weight-rewinding"}, {"rewind-0003.pt"}),
        ({"max_drop": 0.1}, {"level-00.pt", "level-01.pt"}),  # the levels in turn; later ones are worse
    ],
)
def test_without_a_folder_only_what_the_run_itself_goes_back_to_is_written(
    options: dict[str, object], most: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loop, seen = Loop(), set[str]()
    run = loop.run(compression=2, retrain_epochs=2, **options)
    for epoch in run:
        now = {path.name for path in tmp_path.rglob("*.pt")}
        assert len(now) <= 1
        seen |= now
        loop.train(epoch)
        run.report(0.9 if run.level < 2 else 0.5)
    assert seen == most
    assert run.mask is not None
    assert run.mask.density == pytest.approx(0.8 if "max_drop" in options else 0.5, abs=0.01)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos")])
def test_a_full_disk_is_one_sentence(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.save

    def save(content: object, file: BinaryIO) -> None:
        if isinstance(file, io.BytesIO):  # memory has room
            return whole(content, file)
        file.write(b"half")
        raise error

    loop = Loop()
    run = iter(loop.run(compression=2, checkpoint=tmp_path))
    next(run)
    for step in range(STEPS):
        one_step(loop.model, loop.optimizer, 0, step)
    loop.scheduler.step()
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(
        InputError, match=r"cannot write .*latest\.pt: (No space left|the file ends too soon).*; make room"
    ):
        next(run)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("resumed", [False, True], ids=["rewound", "resumed"])
def test_a_group_that_joins_on_the_way_is_told_when_it_cannot_be_rewound(resumed: bool, tmp_path: Path) -> None:
    def made() -> tuple[Loop, Epochs]:
        loop = Loop(model := network(), SGD(model[0].parameters(), lr=0.1))
        options = {"technique": "lr-rewinding" if resumed else "weight-rewinding", "retrain_epochs": 3}
        return loop, loop.run(compression=2, checkpoint=tmp_path, **options)

    def over(loop: Loop, run: Epochs, until: int) -> None:
        for epoch in run:
            if epoch == 3:
                loop.optimizer.add_param_group({"params": [*loop.model[3].parameters()]})  # type: ignore[index]
            loop.train(epoch)
            if epoch == until:
                break

    if resumed:
        over(*made(), until=T)
        with pytest.raises(
            InputError, match=r"made with 2 \+ 2 parameters in the optimizer's groups, not 2; give the same"
        ):
            over(*made(), until=T)
    else:
        with pytest.raises(
            InputError, match=r"cannot rewind the optimizer: its groups have 2 \+ 2 parameters and had 2 "
        ):
            over(*made(), until=T)


def test_a_finished_run_yields_nothing_more_and_returns_its_network(tmp_path: Path) -> None:
    first = Loop()
    mask = first.over(first.run(compression=2, checkpoint=tmp_path)).mask
    again = Loop(network(seed=7))
    run = again.over(again.run(compression=2, checkpoint=tmp_path))
    assert again.seen == []
    assert_same(again.model.state_dict(), first.model.state_dict())
    assert_same(run.mask, mask)
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
    assert_same(grown.mask, straight.mask)
    assert_same(second.model.state_dict(), whole.model.state_dict())
    assert second.seen == whole.seen[-len(second.seen) :]
    assert len(second.seen) <= (3 if one_shot else 6)  # nothing before the level they share is trained again


# Two processes


@pytest.mark.slow
def test_a_folder_has_one_process_at_a_time_and_is_free_once_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "lr-rewinding", "wait"]
    loop = Loop()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as first:
        assert first.stdout is not None
        assert "waiting\n" in iter(first.stdout.readline, "")
        words = rf"another process trains in {tmp_path} \(process {first.pid} on .*\); wait for it, or give another"
        with pytest.raises(InputError, match=words):
            loop.over(loop.run(compression=2, checkpoint=tmp_path))
        assert loop.seen == []
        first.kill()
    again = script(tmp_path, "lr-rewinding")
    assert again.returncode == 0, again.stderr


def test_a_copy_of_the_folder_leaves_it_locked(tmp_path: Path) -> None:
    loop = Loop()
    training = iter(loop.run(compression=2, checkpoint=tmp_path / "run"))
    next(training)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # it opens and closes every file, the lock's too
    second = script(tmp_path / "run", "lr-rewinding")
    assert second.returncode == 1
    assert f"another process trains in {tmp_path / 'run'} (process {os.getpid()} on " in second.stderr
    training.close()
    assert next(iter(Loop().run(compression=2, checkpoint=tmp_path / "run"))) == 0, "it ends with the run"


def test_a_cell_that_is_run_again_takes_its_folder_over_and_keeps_the_lock(tmp_path: Path) -> None:
    loop = Loop()
    left = iter(loop.run(compression=2, checkpoint=tmp_path))
    next(left)  # and never closed, as in a notebook whose cell was interrupted
    again = iter(loop.run(compression=2, checkpoint=tmp_path))
    next(again)
    assert any(line.startswith("left in epoch 1 of") for line in loop.said), "hooks and mask of the first are gone"
    with pytest.raises(InputError, match=rf"a later run of this process trains in {tmp_path}, so this one has ended"):
        next(left)
    assert script(tmp_path, "lr-rewinding").returncode == 1, "the first has ended, the second holds the lock"
    again.close()
    loop.over(loop.run(compression=2, checkpoint=tmp_path))
    assert loop.seen[-1][0] == 5 * T - 1


def test_a_trainer_that_is_dropped_in_the_middle_leaves_its_folder(tmp_path: Path) -> None:
    loop = Loop()
    training = iter(loop.run(compression=2, checkpoint=tmp_path))
    next(training)
    loop.model.trainer = training  # type: ignore[assignment]  # what is trained knows who trains it, as in Lightning
    del training, loop
    gc.collect()
    assert tmp_path not in _LOCKS


def test_a_folder_is_not_taken_from_another_thread(tmp_path: Path) -> None:
    loop, trains, may_end = Loop(), threading.Event(), threading.Event()

    def train() -> None:
        for _ in loop.run(compression=2, checkpoint=tmp_path):
            trains.set()
            may_end.wait()
            break

    thread = threading.Thread(target=train, name="the first")
    thread.start()
    try:
        assert trains.wait(30)
        with pytest.raises(InputError, match=rf"another thread of this process trains in {tmp_path} \(the first\)"):
            next(iter(Loop().run(compression=2, checkpoint=tmp_path)))
    finally:
        may_end.set()
        thread.join()
    assert next(iter(Loop().run(compression=2, checkpoint=tmp_path))) == 0


def test_a_file_is_no_folder_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    loop = Loop()
    with pytest.raises(InputError, match=r"cannot keep checkpoints in .*run: File exists; give another folder"):
        loop.over(loop.run(checkpoint=tmp_path / "run"))


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
    assert_same(second.model.state_dict(), whole.model.state_dict())
    other = second.run(compression=2, rate=0.5, resume=False)
    with pytest.raises(InputError, match=f"give the same arguments, or a state from the first {T} epochs, which are"):
        other.load_state_dict(saved[2])


def test_a_state_is_neither_moved_by_its_run_nor_by_one_that_loads_it() -> None:
    loop, states = Loop(), []
    for epoch in (run := loop.run(compression=2, retrain_epochs=1)):
        loop.train(epoch)
        states.append(run.state_dict())
    taken = states[T]
    assert (taken["level"], taken["densities"]) == (1, [0.8])
    for _ in range(2):
        other = Loop()
        resumed = other.run(compression=2, retrain_epochs=1, resume=False)
        resumed.load_state_dict(taken)
        other.over(resumed)
        assert resumed.state_dict()["densities"] == run.state_dict()["densities"]
        assert taken["densities"] == [0.8]


def test_a_run_that_went_on_to_a_larger_compression_is_resumed_where_it_was_left(tmp_path: Path) -> None:
    first, whole = Loop(), Loop()
    whole.over(whole.run(compression=4))
    first.over(first.run(compression=1.5, checkpoint=tmp_path))  # ends with a smaller step than the next run takes
    for began, until in ((2 * T, 2 * T + 1), (2 * T + 1, 2 * T + 3), (2 * T + 3, None)):
        loop = Loop()
        loop.over(loop.run(compression=4, checkpoint=tmp_path), until=until)
        assert loop.seen[0][0] == began
    assert_same(loop.model.state_dict(), whole.model.state_dict())
    with pytest.raises(InputError, match=r"holds a run pruned to 4x, which cannot go on to 1\.5x"):
        loop.over(loop.run(compression=1.5, checkpoint=tmp_path))


def test_a_state_of_the_last_level_does_not_go_on_to_a_larger_compression() -> None:
    loop = Loop()
    run = loop.over(loop.run(compression=2, retrain_epochs=1, resume=False))
    said = (
        r"this state was pruned to densities 0\.8, 0\.64, 0\.512, 0\.5, not 0\.8, 0\.64, 0\.512, 0\.4096; give the "
        rf"same arguments, or a state from the first {T + 3} epochs, which are the same in both$"
    )
    with pytest.raises(InputError, match=said):
        loop.run(compression=3, retrain_epochs=1, resume=False).load_state_dict(run.state_dict())


def test_an_average_travels_through_a_trainers_checkpoint_too(tmp_path: Path) -> None:
    first, second = Loop(), Loop()
    averages = [AveragedModel(loop.model) for loop in (first, second)]
    options = {"compression": 2, "checkpoint": tmp_path, "resume": False}
    run = first.run(**options, also=averages[:1])
    for epoch in run:
        first.train(epoch)
        averages[0].update_parameters(first.model)
        if run.level == 2:
            saved = copy.deepcopy(run.state_dict())
            break
    second.run(**options, also=averages[1:]).load_state_dict(saved)
    assert_same(averages[1].state_dict(), averages[0].state_dict())
    assert run.mask is not None
    assert not any(averages[1].module.get_parameter(name)[~kept].any() for name, kept in run.mask.items())
    with pytest.raises(InputError, match="made with 1 objects in also, not 0; give the same"):
        second.run(**options).load_state_dict(saved)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: pytest -m cuda tests/loops/test_checkpoints.py")
@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["default", "fused", "foreach"])
def test_a_run_on_a_gpu_resumes_there(technique: str, options: dict[str, bool], tmp_path: Path) -> None:
    def loop() -> Loop:
        model = network().cuda()
        return Loop(model, SGD(model.parameters(), lr=0.1, momentum=0.9, **options))

    settings = {"compression": 2, "technique": technique, "retrain_epochs": 3}
    whole, killed, resumed = loop(), loop(), loop()
    mask = whole.over(whole.run(**settings)).mask
    killed.over(killed.run(**settings, checkpoint=tmp_path), until=T + 4)
    again = resumed.over(resumed.run(**settings, checkpoint=tmp_path)).mask
    assert mask is not None
    assert mask == again
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
    assert_same(second.model.state_dict(), whole.model.state_dict())


def test_a_folder_that_an_earlier_version_wrote_is_read_on(tmp_path: Path) -> None:
    """Written by the code before own loops were merged into eleven modules, in epoch 8 of 9, in the second level."""
    with zipfile.ZipFile(Path(__file__).with_name("checkpoint-written-before.zip")) as archive:
        archive.extractall(tmp_path)
    written = torch.load(tmp_path / "latest.pt", weights_only=True)
    options = {"compression": 1.5, "technique": "weight-rewinding", "retrain_epochs": 2, "checkpoint": tmp_path}
    loop = Loop()
    run = loop.run(**options)
    assert run.epochs_done == 8
    epochs = iter(run)
    assert next(epochs) == 8
    assert_same(loop.model.state_dict(), written["model"])
    slots = {number: state["momentum_buffer"] for number, state in loop.optimizer.state_dict()["state"].items()}
    assert_same(slots, {number: state["momentum_buffer"] for number, state in written["optimizer"]["state"].items()})
    mask = written["progress"]["mask"]
    assert_same(run.mask, Mask.unpacked(mask["bits"], mask["shapes"]))
    assert [reached[2:4] for reached in run.levels] == [(5, 0.5), (7, 0.51)]
    loop.train(8)
    run.report(accuracy=0.52)
    assert list(epochs) == []
    assert [(reached.density, reached.value) for reached in run.levels] == [(1.0, 0.5), (0.8, 0.51), (1 / 1.5, 0.52)]
    assert sorted(path.name for path in (tmp_path / "levels").glob("*x.safetensors")) == [
        "1.00x.safetensors",
        "1.25x.safetensors",
        "1.50x.safetensors",
    ]
