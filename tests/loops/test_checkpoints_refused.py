"""A folder that was made for another run, or is damaged, says so; nothing in it is written over."""

import copy
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel

import rewound
import rewound.loops.iteration
from rewound import InputError, Pruner
from sameness import assert_same
from training_loops import Loop, T, network


@pytest.fixture(autouse=True)
def _save_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"technique": "fine-tuning"},
            "was made with technique lr-rewinding, not fine-tuning; give the same arguments",
        ),
        ({"retrain_epochs": 2}, "was made with retrain_epochs 5, not 2"),
        ({"rate": 0.5}, "was made with rate|cannot go on to"),
        ({"one_shot": True}, "was made with one_shot False, not True|cannot go on to"),
        ({"pruner": Pruner(scope="layer")}, "was made with pruner"),
        ({"compression": 1.3}, "holds a run pruned to 2x, which cannot go on to 1.3x"),
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
    assert_same(loop.model.state_dict(), before)
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


def other_things(what: str) -> Loop:
    """A script like that of `Loop`, but for one thing."""
    if what == "a bias less":
        return Loop(nn.Sequential(nn.Linear(6, 16, bias=False), *network()[1:]))
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]
    return Loop(model, SGD(groups if what == "two groups" else model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "a bias less",
            r"made with another model: names or shapes differ for 0\.bias; give the same, or another folder",
        ),
        ("two groups", r"made with 6 parameters in the optimizer's groups, not 2 \+ 4; give the same"),
        ("no scheduler", "made with 1 schedulers, not 0; give the same"),
        ("an average", "made with 0 objects in also, not 1; give the same"),
        ("a generator", "made with 0 generators in also, not 1; give the same"),
    ],
)
def test_what_else_differs_is_named(what: str, said: str, tmp_path: Path) -> None:
    first, other = Loop(), other_things(what)
    first.over(first.run(compression=2, checkpoint=tmp_path), until=T)
    run = rewound.epochs(
        T,
        other.model,
        other.optimizer,
        None if what == "no scheduler" else other.scheduler,
        compression=2,
        checkpoint=tmp_path,
        also={"an average": [AveragedModel(other.model)], "a generator": [torch.Generator()]}.get(what, []),
    )
    with pytest.raises(InputError, match=said):
        next(iter(run))


def test_a_folder_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "arguments.json").write_text("[]")
    loop = Loop()
    with pytest.raises(InputError, match="was made by another version of rewound"):
        loop.over(loop.run(checkpoint=tmp_path))
    for damaged in ("", "{nonsense"):
        (tmp_path / "arguments.json").write_text(damaged)
        with pytest.raises(InputError, match=r"cannot read .*arguments\.json: it is damaged; give another folder"):
            loop.over(loop.run(checkpoint=tmp_path))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize("until", [None, T + 6], ids=["the last level", "the latest epoch"])
def test_a_damaged_snapshot_is_named_and_the_run_goes_on_from_the_one_before(until: int | None, tmp_path: Path) -> None:
    whole, broken, resumed = Loop(), Loop(), Loop(network(seed=7))
    straight = whole.over(whole.run(compression=2))
    broken.over(broken.run(compression=2, checkpoint=tmp_path), until=until)
    cut(newest := tmp_path / ("level-04.pt" if until is None else "latest.pt"))
    run = resumed.over(resumed.run(compression=2, checkpoint=tmp_path))
    start = 4 * T if until is None else 2 * T
    aside = tmp_path / "damaged" / newest.name
    assert resumed.said[0] == f"cannot read {newest}: it is damaged; set aside as {aside}; going on from epoch {start}"
    assert aside.exists(), "nothing is thrown away"
    assert [epoch for epoch, _, _ in resumed.seen] == list(range(start, len(run)))
    assert_same(run.mask, straight.mask)
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


def test_a_folder_of_damaged_snapshots_is_not_written_over(tmp_path: Path) -> None:
    loop = Loop()
    loop.over(loop.run(compression=2, checkpoint=tmp_path))
    for path in tmp_path.glob("*.pt"):
        cut(path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        InputError, match=r"cannot read .*level-04.pt: it is damaged; remove the folder to start again$"
    ):
        loop.over(loop.run(compression=2, checkpoint=tmp_path))
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_snapshot_that_cannot_be_reached_now_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(file: object, **_: object) -> None:
        if isinstance(file, Path):  # a snapshot, and not what is tried out in memory before the first epoch
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    loop = Loop()
    loop.over(loop.run(compression=2, checkpoint=tmp_path))
    with monkeypatch.context() as away:
        away.setattr(torch, "load", denied)
        with pytest.raises(InputError, match=r"cannot read .*level-04.pt: Permission denied; make it readable"):
            loop.over(loop.run(compression=2, checkpoint=tmp_path))
    assert len(loop.over(loop.run(compression=2, checkpoint=tmp_path)).levels) == 5


def test_a_file_of_somebody_else_is_no_snapshot(tmp_path: Path) -> None:
    loop = Loop()
    torch.save(loop.model.state_dict(), tmp_path / "latest.pt")
    with pytest.raises(InputError, match=r"latest.pt is no snapshot that a run can go on from: it has no model"):
        loop.over(loop.run(compression=2, checkpoint=tmp_path))


def test_a_folder_written_when_rates_were_less_round_is_still_valid(tmp_path: Path) -> None:
    loop = Loop()
    loop.over(loop.run(compression=2, checkpoint=tmp_path), until=T)
    arguments = json.loads((tmp_path / "arguments.json").read_text())
    assert arguments["rate"] == 0.2
    for name in ("run", "unchecked", "checksum"):  # which that version did not write
        del arguments[name]
    (tmp_path / "arguments.json").write_text(json.dumps({**arguments, "version": 1, "rate": 1 - 0.8}))
    loop.over(loop.run(compression=2, checkpoint=tmp_path))
    assert loop.seen[-1][0] == 5 * T - 1
