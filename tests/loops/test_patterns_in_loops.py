"""N of M and blocks in a user's own loop; pruners that need what a loop does not give are refused before it begins."""

from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, lr_scheduler

import rewound
from rewound import InputError, Pruner
from training_loops import STEPS, T, network, one_step


def run_of(**options: Any) -> tuple[nn.Module, rewound.Epochs]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [2 * STEPS, 4 * STEPS])
    run = rewound.epochs(T, model, optimizer, scheduler, say=lambda _: None, **options)
    for epoch in run:
        for step in range(STEPS):
            one_step(model, optimizer, epoch, step)
            scheduler.step()
    return model, run


@pytest.mark.parametrize("options", [{}, {"compression": 2}])
def test_n_of_m_is_one_level_and_holds_while_it_trains(options: dict[str, Any]) -> None:
    model, run = run_of(pruner=Pruner(pattern="1:2"), **options)
    assert [reached.density for reached in run.levels] == [1.0, 0.5]
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            assert (weight.reshape(-1, 2) != 0).sum(1).tolist() == [1] * (weight.numel() // 2), name


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding", "gradual end=0.75 every=2"])
def test_blocks_go_together_level_by_level_and_gradually(technique: str) -> None:
    model, run = run_of(pruner=Pruner(pattern="block 1x2"), technique=technique, compression=3, retrain_epochs=4)
    assert run.mask is not None
    assert run.mask.density == pytest.approx(1 / 3, abs=0.02)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            assert set((weight.reshape(-1, 2) != 0).sum(1).tolist()) == {0, 2}, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pruner": Pruner(pattern="2:4"), "compression": 3}, "pattern '2:4' says itself how much goes; leave out"),
        ({"pruner": Pruner(rates={"*": 0.5})}, "a table of rates is for rewound.prune and sweeps"),
        ({"pruner": Pruner(rates={"*": 0.5}), "compression": 4}, "a table of rates is for rewound.prune and sweeps"),
        ({"pruner": Pruner(preset="structured-b", k=3), "compression": 4}, "preset structured-b is for the paper's"),
        ({"pruner": Pruner("taylor")}, "score 'taylor' is measured on batches, which a loop does not give"),
    ],
)
def test_what_a_loop_cannot_give_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        run_of(**options)
    assert message in str(caught.value)
