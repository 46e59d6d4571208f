"""Pruning to a latency: the search, with times that are made up; and one real measurement."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import rewound.commands.latency
from rewound import InputError, Pruner, prune_to_latency
from rewound.commands.timing import Benchmark, Timing

INPUTS = torch.zeros(3, 16)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


def weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.ndim > 1)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A pass takes a microsecond for each weight, twice as long from the fourth measurement on; the sizes measured."""
    measured: list[int] = []

    def bench(networks: Mapping[str, nn.Module], inputs: Any, *, backend: str, **_: object) -> Benchmark:
        measured.append(weights(networks["slim"]))
        load = 1e-6 * (2 if len(measured) > 3 else 1)
        sizes = {name: weights(model) for name, model in networks.items()}
        timings = [
            Timing(backend, name, load * size, (0, 1), sizes["dense"] / size, (0, 1)) for name, size in sizes.items()
        ]
        return Benchmark("networks", (), tuple(timings), (), f"a batch of {len(inputs[0])}")

    monkeypatch.setattr(rewound.commands.latency, "bench", bench)
    return measured


def quiet(line: str) -> None:
    pass


def test_no_more_goes_than_is_needed_whatever_else_the_machine_does(times: list[int]) -> None:
    dense, said = weights(network()), list[str]()
    found = prune_to_latency(network(), dense / 2e3, INPUTS, say=said.append)
    assert times[0] == dense
    assert 0.9 * dense / 2 < weights(found.slim.model) <= dense / 2
    assert found.milliseconds == pytest.approx(weights(found.slim.model) / 1e3)
    assert found.dense_milliseconds == pytest.approx(dense / 1e3)
    assert str(found) in said
    assert str(found).endswith("a batch of 3, eager")
    assert found.mask["0.weight"].any(1).sum() == found.slim.model[0].out_features


def test_training_goes_on_with_the_optimizer_that_there_is(times: list[int]) -> None:
    model = network()
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 16)).sum().backward()
    adam.step()
    small = prune_to_latency(model, weights(model) / 2e3, INPUTS, say=quiet).slim
    after = small.optimizer(adam)
    assert [p.shape for p in small.model.parameters()] == [slots["exp_avg"].shape for slots in after.state.values()]


def test_what_is_fast_enough_already_stays(times: list[int]) -> None:
    found = prune_to_latency(network(), 1e3, INPUTS, say=quiet)
    assert found.density == 1
    assert len(times) == 1


def test_the_nearest_latency_is_named(times: list[int]) -> None:
    with pytest.raises(InputError, match=r"0\.02 ms cannot be reached by removing units: 0\.\d+ ms are left where"):
        prune_to_latency(network(), 0.02, INPUTS, say=quiet)


@pytest.mark.parametrize("pruner", [Pruner(), Pruner(pattern="unit", rates={"0.*": 0.5})])
def test_only_units_to_a_density_make_a_network_faster(pruner: Pruner) -> None:
    with pytest.raises(InputError, match="only whole units make a network faster"):
        prune_to_latency(network(), 1, INPUTS, pruner=pruner)
    with pytest.raises(InputError, match=r"^unknown backend 'eager,onnx'; did you mean 'eager' or 'onnx'"):
        prune_to_latency(network(), 1, INPUTS, backend="eager,onnx")
    with pytest.raises(InputError, match="milliseconds must be above 0, not -1"):
        prune_to_latency(network(), -1, INPUTS)


def test_it_measures_for_real() -> None:
    found = prune_to_latency(network(), 1e4, INPUTS, seconds=0.05, threads=1, say=quiet)
    assert 0 < found.milliseconds < 1e4
    assert "1 thread" in found.where
