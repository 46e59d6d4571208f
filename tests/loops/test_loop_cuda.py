"""What a run in a user's own loop can do, each once with everything on a GPU: a pruner's mask is made on the CPU."""

from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from rewound import Facts, Pruner, Schedule, Technique
from training_loops import Loop, network, redraw

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda tests/loops/test_loop_cuda.py` there"
    ),
]


def adaptive(S: Schedule, T: int, t: int, facts: Facts) -> Schedule:
    return Schedule.constant(t, S.peak * facts.norm_lost)


RULE = Technique(weights="final", lr=adaptive)
REWOUND_RULE = Technique(weights="rewound", lr=adaptive)
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "weight rewinding": {"technique": "weight-rewinding"},
    "reinitialization": {"technique": "reinitialization", "init": redraw, "retrain_epochs": 1},
    "rule": {"technique": f"{__name__}:RULE"},
    "rule, weights rewound": {"technique": f"{__name__}:REWOUND_RULE", "retrain_epochs": 3},
    "adopt": {"adopt": True},
    "adopt by a rule": {"adopt": True, "technique": f"{__name__}:RULE"},
    "random score": {"pruner": Pruner(score="random")},
    "floor": {"pruner": Pruner(scope="layer", floor=0.1)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_run_on_a_gpu_ends_pruned(options: dict[str, object], tmp_path: Path) -> None:
    model = network().cuda()
    average = AveragedModel(model)
    loop = Loop(model)
    run = loop.run(compression=1.5, checkpoint=tmp_path, also=[average], **options)
    for epoch in run:
        loop.train(epoch)
        average.update_parameters(model)
    assert run.mask is not None
    assert [level.density for level in run.levels] == [1.0, 0.8, pytest.approx(1 / 1.5)]
    for name, kept in run.mask.items():
        for weight in (model.get_parameter(name), average.module.get_parameter(name)):
            assert weight.device.type == "cuda"
            assert not weight[~kept.cuda()].any()
