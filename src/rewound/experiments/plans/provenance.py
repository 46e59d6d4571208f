"""What a result was made with, apart from its history: code, libraries, device; kept with it, not hashed."""

import platform

import torch

from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Node
from rewound.foundations.names import source_digest
from rewound.states.history import own_functions
from rewound.tasks.devices import cpu_kind, device_named
from rewound.tasks.fleets.captured import capturable
from rewound.tasks.recipe import Recipe


def made_by(node: Node, options: Options) -> dict[str, str]:
    """What a result depends on, apart from its history; a run says where stored results have other values."""
    device = device_named(options.device)
    on_cpu = device.type == "cpu"
    return {
        **sources_of(node),
        **node.recipe.made_with(),
        "torch": str(torch.__version__),  # itself it would be compared as a version, which takes long
        "python": platform.python_version(),
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(device),
        **({"cpu": cpu_kind()} if on_cpu else {"step": _kind_of_step(node.recipe, device, options)}),
        **({"process count": str(options.gpus_per_run)} if options.gpus_per_run > 1 else {}),
    }


def another(name: str) -> str:
    """What something of `made_by` is called where it differs from today's.

    >>> another("decoder"), another("data")
    ('another decoder', 'other data')
    """
    return f"other {name}" if name == "data" else f"another {name}"


def sources_of(node: Node) -> dict[str, str]:
    """Digests of the files with the code of a node: its recipe's, and those of the user's own functions."""
    return {
        "source": node.recipe.source_digest(),
        **{path: source_digest(path) for path in own_functions(node.state)},
    }


def _kind_of_step(recipe: Recipe, device: torch.device, options: Options) -> str:
    """Captured and compiled steps round differently from plain ones, and draw other dropout."""
    is_plain = options.plain or options.gpus_per_run > 1
    return "plain" if is_plain or not capturable(recipe, device) else "captured"
