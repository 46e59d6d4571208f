"""How long it takes to find the units of a network, to score them, and to make the network without them.

Of ResNet-50 (a batch of one image of 224 x 224) and BERT-base (one sequence of 64 tokens), in seconds of one core's
time, so that other programs do not count; medians of interleaved rounds with the extremes in brackets. `torch.export`
alone is the least that tracing can take. Torch-Pruning does its own tracing; it is measured where it is installed
(`pip install torch-pruning`), and is no dependency. Goals on two cores: ResNet-50 at most 5 s, BERT-base at most 10 s.

    python benchmarks/structure.py [ROUNDS]     # half a minute a round; 6 GB of memory
"""

import copy
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from rewound import Pruner, slim, units
from rewound.method.structure.examples import call_of
from rewound.method.structure.tracing import exported
from rewound.tasks.recipes.resnet import resnet50

DENSITY = 0.6


def resnet() -> tuple[nn.Module, tuple[Any, ...]]:
    return resnet50(torch.Generator().manual_seed(0)).eval(), (torch.randn(1, 3, 224, 224),)


def bert_base() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(), add_pooling_layer=False).eval(), (torch.arange(64)[None],)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def ours(model: nn.Module, example: tuple[Any, ...]) -> dict[str, float]:
    export, _ = seconds(lambda: exported(model, call_of(example)))
    tracing, groups = seconds(lambda: units(model, example))
    scoring, mask = seconds(lambda: Pruner(pattern="unit", scope="layer")(model, density=DENSITY, groups=groups))
    slimming, _ = seconds(lambda: slim(model, mask, example, groups=groups))
    parts = {"torch.export alone": export, "tracing": tracing, "scoring": scoring, "slimming": slimming}
    return {**parts, "all three": tracing + scoring + slimming}


def theirs(model: nn.Module, example: tuple[Any, ...]) -> dict[str, float]:
    try:
        import torch_pruning
    except ImportError:
        return {}
    model = copy.deepcopy(model)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]

    def pruned() -> None:
        importance = torch_pruning.importance.MagnitudeImportance(p=1)
        pruner = torch_pruning.pruner.MagnitudePruner(
            model, example, importance, pruning_ratio=0.25, ignored_layers=last
        )
        pruner.step()

    try:
        return {"Torch-Pruning": seconds(pruned)[0]}
    except Exception as error:  # whatever it raises: the comparison is for information
        print(f"Torch-Pruning: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return {}


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = {"ResNet-50": resnet, "BERT-base": bert_base}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, make in cases.items():
            model, example = make()
            for part, taken in {**ours(model, example), **theirs(model, example)}.items():
                found.setdefault((name, part), []).append(taken)
    for (name, part), times in found.items():
        print(f"{name:10} {part:20} {median(times):6.2f} s [{min(times):.2f}, {max(times):.2f}]")
    if not any(part == "Torch-Pruning" for _, part in found):
        print("Torch-Pruning is not installed, or did not run; pip install torch-pruning measures it, too.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
