"""How much of its fewer operations a slim network turns into speed: ResNet-56 pruned by structured-b.

The preset's filters are removed as whole units (`Units.whole`) from a ResNet-56 of random weights, and the network is
slimmed. At k = 5 six branches of the first stage are wholly gone, and the FLOPs fall 2.41 times. Beside it stands a
network that keeps filters in multiples of 8. Goal: compiled, on one thread, at batch 64, slim networks are faster by at
least 85% of the factor by which their FLOPs fall.

Networks take turns (`rewound.bench`); printed is the median of the repetitions, with the smallest and the largest.

    python benchmarks/slim_speed.py                                        # 10 minutes
    python benchmarks/slim_speed.py --device cuda --batch 64,512           # on a GPU
    python benchmarks/slim_speed.py --k 1,3,5 --backend eager              # other exponents
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

import rewound
from rewound.method.pruning.presets import removed_filters
from rewound.tasks.recipes.cifar10 import ResNet56

PRESET = "structured-b"
GOAL = 0.85
AT_ONCE = (8, 16)


@dataclass(frozen=True)
class Slimmed:
    """A network to measure, and how many times fewer FLOPs it takes."""

    model: nn.Module
    fewer_flops: float
    fewer_at_once: tuple[float, ...]
    """The same if outputs are computed by as many at once as `AT_ONCE` says."""


def flops(profile: rewound.Profile, mask: rewound.Mask, at_once: int = 1) -> float:
    """FLOPs of a pass, each layer with outputs enough to compute so many at once."""
    outputs = {name: profile.shapes[name][0] for name in profile.weights}
    return sum(
        count * -(-outputs[name] // at_once) * at_once / outputs[name] for name, count in profile.layers(mask).items()
    )


def filter_mask(model: nn.Module, removed: Mapping[str, int], multiple: int) -> rewound.Mask:
    """A mask without the filters of the smallest L1 norm; as many are left as the next multiple says."""
    masks: dict[str, Tensor] = {}
    for name, count in removed.items():
        norms = model.get_parameter(name).detach().abs().flatten(1).sum(1)
        left = min(len(norms), -(-(len(norms) - count) // multiple) * multiple)
        kept = torch.zeros_like(norms, dtype=torch.bool).index_fill_(0, norms.argsort(descending=True)[:left], True)
        masks[name] = kept.reshape(-1, 1, 1, 1).expand_as(model.get_parameter(name)).clone()
    return rewound.Mask(masks)


def networks(exponents: list[int]) -> dict[str, Slimmed]:
    """The dense network, and the slim ones by name."""
    recipe = ResNet56()
    model, example = recipe.model(0).eval(), recipe.example()
    groups, whole = rewound.units(model, example), rewound.profile(model, example)
    dense = [flops(whole, rewound.Mask({}), at_once) for at_once in (1, *AT_ONCE)]
    found = {"dense": Slimmed(model, 1.0, (1.0,) * len(AT_ONCE))}
    for k in exponents:
        removed = removed_filters(PRESET, k, recipe.shapes)
        for multiple, name in ((1, f"k={k}"), (8, f"k={k}, multiples of 8")):
            smaller = rewound.slim(model, groups.whole(filter_mask(model, removed, multiple)), example)
            counts = rewound.profile(smaller.model, example)
            fewer = [one / flops(counts, smaller.mask, at) for one, at in zip(dense, (1, *AT_ONCE), strict=True)]
            found[name] = Slimmed(smaller.for_inference(), fewer[0], tuple(fewer[1:]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--k", default="5", help="exponents of the preset, with commas between")
    parser.add_argument("--batch", default="64", help="examples of a pass, with commas between")
    parser.add_argument("--backend", default="compiled,onnx,eager")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each repetition")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    given = networks([int(word) for word in options.k.split(",")])
    for name, each in given.items():
        at_once = ", ".join(f"{f:.2f}x by {at} at once" for f, at in zip(each.fewer_at_once, AT_ONCE, strict=True))
        print(f"{name:22} {each.fewer_flops:.2f}x fewer FLOPs, {at_once}")
    for batch in (int(word) for word in options.batch.split(",")):
        images = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        for backend in options.backend.split(","):
            measured = [
                rewound.bench(
                    {name: each.model for name, each in given.items()},
                    images,
                    backend=backend,
                    device=options.device,
                    threads=options.threads,
                    seconds=options.seconds,
                    say=lambda line: None,
                )
                for _ in range(options.repeat)
            ]
            print(f"\n{backend}: {measured[0].where}", *measured[0].remarks, sep="\n")
            for name, each in given.items() if measured[0].timings else ():
                speedups = [found.timing(name, backend).speedup for found in measured]
                times = [1e3 * found.timing(name, backend).seconds for found in measured]
                share = median(speedups) / each.fewer_flops
                print(
                    f"  {name:22} {median(times):8.2f} ms  {median(speedups):.2f}x ({min(speedups):.2f} to "
                    f"{max(speedups):.2f}) of {each.fewer_flops:.2f}x fewer FLOPs: {share:.0%}"
                )
            reached = (
                min(
                    (median(f.timing(n, backend).speedup for f in measured) / e.fewer_flops for n, e in given.items()),
                    default=0.0,
                )
                if measured[0].timings
                else 0.0
            )
            if backend == "compiled" and options.device == "cpu" and batch == 64:
                print(f"  goal, {GOAL:.0%} of the FLOP ratio: {'reached' if reached >= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
