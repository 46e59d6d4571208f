"""Accelerate needs no integration: `rewound.epochs` takes what `prepare` returns, and its states hold the run."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, lr_scheduler
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

import rewound
from rewound import Epochs, InputError, Mask, Pruner, densities

T, BATCHES = 3, 4  # epochs, and batches in each


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> Iterator[None]:
    """Accelerate's state is the process's."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@dataclass
class Script:
    """A training script as Accelerate's documentation writes it, with `for epoch in run`."""

    accumulation: int = 1
    options: dict[str, object] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.accumulation)
        x = torch.randn(16 * BATCHES, 6, generator=torch.Generator().manual_seed(1))
        data = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16, shuffle=True)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        optimizer = AdamW(model.parameters(), lr=0.01)
        steps = T * -(-BATCHES // self.accumulation)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps)
        self.model, self.optimizer, self.data, self.scheduler = self.accelerator.prepare(
            model, optimizer, data, scheduler
        )
        said: list[str] = []
        objects = (self.model, self.optimizer, self.scheduler)
        self.run: Epochs = rewound.epochs(T, *objects, **{"compression": 1.5, "say": said.append, **self.options})
        self.accelerator.register_for_checkpointing(self.run)

    def train(self, folder: Path | None = None) -> "Script":
        for epoch in self.run:
            self.data.set_epoch(epoch)  # type: ignore[attr-defined]
            for x, y in self.data:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(F.cross_entropy(self.model(x), y))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    if self.accelerator.sync_gradients:
                        self.rates.append(self.optimizer.param_groups[0]["lr"])
                        assert self.rates[-1] == self.scheduler.get_last_lr()[0]
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            if folder is not None:
                self.accelerator.save_state(str(folder / f"{epoch}"))
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.accelerator.unwrap_model(self.model).state_dict()


def assert_sparse(state: dict[str, Tensor], mask: Mask) -> None:
    for name, kept in mask.items():
        assert not state[name][~kept].any(), name
        assert int(state[name].count_nonzero()) == mask.counts[name]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_script_is_pruned_level_by_level_along_its_own_schedule(accumulation: int, tmp_path: Path) -> None:
    script = Script(accumulation).train(tmp_path)
    run = script.run
    assert [reached.density for reached in run.levels] == [1.0, *densities(1.5)]
    length = len(script.rates) // 3
    assert length == T * -(-BATCHES // accumulation)
    dense, first, second = (script.rates[level * length :][:length] for level in range(3))
    assert max(dense) == pytest.approx(0.02, rel=0.2)
    assert first == second == dense
    assert run.mask is not None
    assert run.mask.kept == Pruner().kept({"a": (16, 6), "b": (3, 16)}, 1 / 1.5)
    assert_sparse(script.weights, run.mask)
    for epoch in range(len(run)):
        saved = torch.load(tmp_path / f"{epoch}" / "custom_checkpoint_0.pkl", weights_only=True)["mask"]
        assert (saved is None) == (epoch < T)
        if saved is not None:
            mask = Mask.unpacked(saved["bits"], saved["shapes"])
            assert_sparse(load_file(tmp_path / f"{epoch}" / "model.safetensors"), mask)


def test_nothing_is_left_behind() -> None:
    script = Script().train()
    optimizer = script.optimizer.optimizer
    held = [hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")]
    parameters = [parameter._post_accumulate_grad_hooks for parameter in script.model.parameters()]
    assert not [hook for hook in (*held, *parameters, _global_optimizer_pre_hooks) if hook]
    assert script.run.mask is not None
    model = script.accelerator.unwrap_model(script.model)
    assert_sparse(copy.deepcopy(model).state_dict(), script.run.mask)
    assert_sparse(pickle.loads(pickle.dumps(model)).state_dict(), script.run.mask)


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
def test_a_resumed_script_ends_as_if_it_had_never_stopped(technique: str, tmp_path: Path) -> None:
    options = {"technique": technique, "retrain_epochs": 2, "checkpoint": tmp_path / "rewound", "resume": False}
    whole = Script(options=options).train(tmp_path)
    # In the dense run and at its end, in the first level and at its end, and when all is over.
    for epoch in (0, T - 1, T, T + 1, T + 3):
        again = Script(options=options)
        again.accelerator.load_state(str(tmp_path / f"{epoch}"))
        again.train()
        assert again.run.levels == whole.run.levels
        assert again.rates == whole.rates[(epoch + 1) * BATCHES :]
        for name, value in whole.weights.items():
            assert torch.equal(again.weights[name], value), (epoch, name)


def test_a_state_is_loaded_before_the_loop(tmp_path: Path) -> None:
    script = Script()
    for _ in script.run:
        with pytest.raises(InputError, match="load its state before the loop"):
            script.run.load_state_dict(script.run.state_dict())
        break


def test_the_scheduler_of_another_optimizer_is_named_inside_what_prepare_puts_around_it() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(6, 3)
    mine, other = (AdamW(model.parameters(), lr=0.01) for _ in range(2))
    prepared = accelerator.prepare(model, mine, lr_scheduler.StepLR(other, 1))
    with pytest.raises(InputError, match=r"StepLR drives another optimizer \(AdamW\) than the one given"):
        rewound.epochs(T, *prepared)
