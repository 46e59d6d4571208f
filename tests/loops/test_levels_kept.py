"""Every level of an own loop is kept as a ticket, with a table to choose from afterwards."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import rewound
import rewound.loops.iteration
from rewound import InputError
from rewound.method.flops import FirstPass
from rewound.states.tickets import kept_levels
from rewound.states.tickets.kept_levels import COLUMNS
from sameness import assert_same
from training_loops import STEPS, Loop, T, made_by_the_version_before, network, one_step


@pytest.fixture(autouse=True)
def _save_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "levels" / "levels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def tickets(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "levels").glob("*.safetensors"))


def over(folder: Path, until: int | None = None, accuracy: float | None = 0.5, **options: object) -> Loop:
    loop = Loop(network(seed=0))
    run = loop.run(**{"compression": 2, "checkpoint": folder, "retrain_epochs": 1, **options})
    loop.over(run, until, None if accuracy is None else lambda run: accuracy - 0.1 * run.level)
    return loop


def test_every_level_is_a_ticket_and_a_row(tmp_path: Path) -> None:
    loop = Loop()
    states, run = {}, loop.run(compression=2, retrain_epochs=1, checkpoint=tmp_path)
    for epoch in run:
        loop.train(epoch)
        run.report(0.9 - 0.1 * run.level, metric="top-1")
        states[run.level] = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    rows = table(tmp_path)
    assert tuple(rows[0]) == COLUMNS
    assert [row["ticket"] for row in rows] == [f"{n}x.safetensors" for n in ("1.00", "1.25", "1.56", "1.95", "2.00")]
    assert tickets(tmp_path) == sorted(row["ticket"] for row in rows)
    biases = sum(p.numel() for p in loop.model.parameters() if p.ndim == 1)
    for level, row in enumerate(rows):
        path = tmp_path / "levels" / row["ticket"]
        ticket = rewound.load(path)
        assert_same(dict(ticket.state), states[level])
        assert int(row["level"]) == level
        assert float(row["compression"]) == pytest.approx(1 / run.levels[level].density)
        assert int(row["weights_kept"]) == ticket.mask.kept
        assert int(row["weights"]) == ticket.mask.total == 6 * 16 + 16 * 3
        assert int(row["parameters"]) == ticket.mask.total + biases
        network_compression = (ticket.mask.total + biases) / (ticket.mask.kept + biases)
        assert float(row["network_compression"]) == pytest.approx(network_compression)
        assert int(row["bytes"]) == path.stat().st_size
        assert int(row["flops"]) == rewound.profile(loop.model, torch.zeros(1, 6)).total(ticket.mask)
        assert (row["metric"], float(row["value"])) == ("top-1", pytest.approx(0.9 - 0.1 * level))
        assert row["returned"] == str(int(level == 4))


def test_a_chosen_level_is_loaded_into_the_model(tmp_path: Path) -> None:
    over(tmp_path)
    model = network(seed=3)
    ticket = rewound.load(tmp_path / "levels" / "1.56x.safetensors")
    ticket.into(model)
    assert all(not model.get_parameter(name)[~kept].any() for name, kept in ticket.mask.items())


def test_a_run_that_is_left_and_resumed_has_the_same_table(tmp_path: Path) -> None:
    over(tmp_path / "whole")
    for until in (2, T, T + 1, T + 2, None):
        over(tmp_path / "left", until)
    over(tmp_path / "left")  # once more, with nothing to do
    assert table(tmp_path / "left") == table(tmp_path / "whole")
    for name in tickets(tmp_path / "whole"):
        one, two = (rewound.load(tmp_path / each / "levels" / name) for each in ("whole", "left"))
        assert one.hash == two.hash


def test_a_process_killed_between_snapshot_and_ticket_loses_no_row(tmp_path: Path) -> None:
    over(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    (tmp_path / "killed" / "levels" / "2.00x.safetensors").unlink()
    (tmp_path / "killed" / "levels" / "levels.csv").write_text("half a")
    over(tmp_path / "killed")
    assert table(tmp_path / "killed") == table(tmp_path / "whole")


def test_a_larger_compression_goes_on_in_the_same_table(tmp_path: Path) -> None:
    over(tmp_path)
    over(tmp_path, compression=2.6)
    rows = table(tmp_path)
    assert [row["ticket"][:-12] for row in rows] == ["1.00x", "1.25x", "1.56x", "1.95x", "2.00x", "2.44x", "2.60x"]
    assert [row["level"] for row in rows] == ["0", "1", "2", "3", "4", "4", "5"], "the last of the shorter run stays"
    assert [row["returned"] for row in rows] == ["0"] * 6 + ["1"]


def test_two_compressions_that_look_the_same_have_more_digits(tmp_path: Path) -> None:
    over(tmp_path, compression=2, one_shot=True)
    over(tmp_path, compression=2.004, one_shot=True)
    assert set(tickets(tmp_path)) == {"1.00x.safetensors", "2.00x.safetensors", "2.004x.safetensors"}
    over(tmp_path, compression=2.004, one_shot=True)
    assert len(table(tmp_path)) == 3


def test_the_returned_level_is_marked_where_max_drop_ends_the_run(tmp_path: Path) -> None:
    loop = over(tmp_path, compression=10, max_drop=0.15)
    rows = table(tmp_path)
    assert [row["returned"] for row in rows] == ["0", "1", "0", "0"]
    assert_same(loop.model.state_dict(), dict(rewound.load(tmp_path / "levels" / "1.25x.safetensors").state))


def test_an_adopted_network_is_the_first_level(tmp_path: Path) -> None:
    loop = Loop()
    run = loop.run(compression=1.5, retrain_epochs=1, checkpoint=tmp_path, adopt=True)
    run.report(0.75)
    before = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    loop.over(run)
    rows = table(tmp_path)
    assert [row["level"] for row in rows] == ["0", "1", "2"]
    assert rows[0]["value"] == "0.75"
    assert_same(dict(rewound.load(tmp_path / "levels" / "1.00x.safetensors").state), before)
    assert [row["value"] for row in rows[1:]] == ["", ""], "nothing was reported of these"
    assert [row["metric"] for row in rows[1:]] == ["", ""]
    dense = rewound.profile(loop.model, torch.zeros(1, 6)).total()
    assert int(rows[0]["flops"]) == dense, "known since the first level was trained"
    assert int(rows[1]["flops"]) < dense


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    over(None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_stops_the_run_where_it_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over(tmp_path / "whole")
    real = kept_levels.save

    def full(state: object, mask: object, path: Path, about: object) -> None:
        raise InputError(f"cannot write ticket {path}: No space left on device") from OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(kept_levels, "save", full)
        with pytest.raises(InputError, match=r"cannot keep the level: .*1\.00x\.safetensors: No space.*; make room"):
            over(tmp_path / "left")
    assert kept_levels.save is real
    over(tmp_path / "left")
    assert table(tmp_path / "left") == table(tmp_path / "whole")


def test_a_damaged_ticket_is_set_aside_and_written_again_where_its_snapshot_is_kept(tmp_path: Path) -> None:
    over(tmp_path)
    before = table(tmp_path)
    for name in ("1.25x", "2.00x"):
        data = bytearray((path := tmp_path / "levels" / f"{name}.safetensors").read_bytes())
        data[-5] ^= 4
        path.write_bytes(data)
    again = over(tmp_path)
    assert sum("1.25x.safetensors is damaged" in line and "set aside as" in line for line in again.said) == 1
    assert [row["ticket"] for row in table(tmp_path)] == [f"{n}x.safetensors" for n in ("1.00", "1.56", "1.95", "2.00")]
    assert table(tmp_path)[-1] == before[-1]
    assert sorted(p.name for p in (tmp_path / "levels" / "set-aside").iterdir()) == [
        "1.25x.safetensors",
        "2.00x.safetensors",
    ]


def test_levels_of_another_run_are_set_aside(tmp_path: Path) -> None:
    for seed in (0, 1):  # a trainer that begins anew in the same folder
        loop = Loop(network(seed))
        loop.over(loop.run(compression=1.25, retrain_epochs=1, checkpoint=tmp_path, resume=False))
    assert len(table(tmp_path)) == 2
    assert len(list((tmp_path / "levels" / "set-aside").iterdir())) == 2
    assert sum("is a level of another run; set aside as" in line for line in loop.said) == 2


def test_tickets_that_changed_places_are_told(tmp_path: Path) -> None:
    over(tmp_path)
    before = table(tmp_path)
    one, two = (tmp_path / "levels" / f"{name}x.safetensors" for name in ("1.95", "2.00"))
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)
    again = over(tmp_path)
    assert sum(f"{one} is 2.00x.safetensors under another name; set aside as" in line for line in again.said) == 1
    assert table(tmp_path) == before, "both were written again, from their snapshots"
    assert rewound.load(two).about["level"]["ticket"] == two.name  # type: ignore[index]


def test_a_folder_of_the_version_before_gets_the_levels_that_it_still_has(tmp_path: Path) -> None:
    over(tmp_path, T + 3)
    made_by_the_version_before(tmp_path)
    shutil.rmtree(tmp_path / "levels")
    over(tmp_path)
    assert [row["level"] for row in table(tmp_path)] == ["0", "2", "3", "4"], "the first had been removed"


def test_a_network_that_no_ticket_can_hold_is_told_and_trained_all_the_same(tmp_path: Path) -> None:
    class Strange(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    model = nn.Sequential(Strange(6, 16), nn.ReLU(), nn.Linear(16, 3))
    loop = Loop(model, SGD(model.parameters(), lr=0.1))
    loop.over(loop.run(compression=1.25, retrain_epochs=1, checkpoint=tmp_path))
    assert sum("is not kept as a ticket: cannot save" in line for line in loop.said) == 2


# FLOPs


class Calls(nn.Module):
    """A model that a loop may call as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.fails = False

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("a batch that cannot be used")
        return torch.as_tensor(self.inner(x) * scale)


def test_operations_are_counted_in_the_first_pass_in_training_and_leave_it_as_it_is() -> None:
    model, other = Calls(), Calls()
    other.load_state_dict(model.state_dict())
    first = FirstPass(model)
    x = torch.randn(7, 6)
    model.eval()
    model(x)
    assert first.profile is None, "an evaluation may take other ways"
    model.train()
    assert torch.equal(model(x=x, scale=2.0), other(x, 2.0))
    assert first.profile is not None
    assert first.examples == 7
    assert first.profile.total() == 7 * rewound.profile(other, torch.zeros(1, 6)).total()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    model = Calls()
    first = FirstPass(model)
    model.fails = True
    with pytest.raises(RuntimeError, match="a batch that cannot be used"):
        model(torch.zeros(2, 6))
    assert first.profile is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch._C._len_torch_function_stack()


def test_flops_are_empty_where_the_loop_does_not_call_the_model_itself(tmp_path: Path) -> None:
    model = Calls()
    loop = Loop(model, SGD(model.parameters(), lr=0.1))
    for epoch in loop.run(compression=1.25, retrain_epochs=1, checkpoint=tmp_path):
        for step in range(STEPS):
            one_step(model.inner, loop.optimizer, epoch, step)
        loop.scheduler.step()
    assert [row["flops"] for row in table(tmp_path)] == ["", ""]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_compiled_model_is_not_looked_at(tmp_path: Path) -> None:
    model = torch.compile(network(), backend="eager")
    run = rewound.epochs(1, model, SGD(model.parameters(), lr=0.1), checkpoint=tmp_path, say=lambda text: None)
    next(training := iter(run))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    training.close()
