"""What `import rewound` gives: every public name, from the module that has it."""

from rewound.commands.exporting import Export, export
from rewound.commands.latency import PrunedToLatency, prune_to_latency
from rewound.commands.sweeps import plan, report, results, run, work
from rewound.commands.timing import Benchmark, Size, Timing, bench
from rewound.conclusions.tables import Row
from rewound.experiments.compression import LevelReport, PrunedNetwork, prune
from rewound.experiments.executors.ray_cluster import Ray
from rewound.experiments.executors.slurm import Slurm
from rewound.experiments.plans.collection import SweepResults
from rewound.experiments.plans.outlook import SweepPlan
from rewound.experiments.sweeps.sweep import Sweep, load_sweep
from rewound.foundations.errors import Diverged, Failed, InputError
from rewound.foundations.metric import Metric
from rewound.loops.loop import Epochs, Steps, epochs, steps
from rewound.loops.optimizers import Scheduler
from rewound.loops.progress import Reached
from rewound.loops.snapshot import Stateful
from rewound.method.algorithm import Level, densities, levels
from rewound.method.flops import Profile, profile
from rewound.method.pruner import Pruner
from rewound.method.pruning.foreign import from_torch_prune, mask_of_zeros
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Schedule, Segment
from rewound.method.structure.groups import Unit, UnitGroup, Units
from rewound.method.structure.slimming import Slim, slim
from rewound.method.structure.tracing import units
from rewound.method.technique import TECHNIQUES, Facts, Gradual, Technique
from rewound.reports.writing import Report
from rewound.states.tickets.ticket import Ticket, load, save
from rewound.tasks.recipe import Batch, Position, Recipe, Scores
from rewound.tasks.resident import Part, ResidentRecipe
from rewound.tasks.training import State, begin, evaluate, train

__all__ = [
    "TECHNIQUES",
    "Batch",
    "Benchmark",
    "Diverged",
    "Epochs",
    "Export",
    "Facts",
    "Failed",
    "Gradual",
    "InputError",
    "Level",
    "LevelReport",
    "Mask",
    "Metric",
    "Part",
    "Position",
    "Profile",
    "PrunedNetwork",
    "PrunedToLatency",
    "Pruner",
    "Ray",
    "Reached",
    "Recipe",
    "Report",
    "ResidentRecipe",
    "Row",
    "Schedule",
    "Scheduler",
    "Scores",
    "Segment",
    "Size",
    "Slim",
    "Slurm",
    "State",
    "Stateful",
    "Steps",
    "Sweep",
    "SweepPlan",
    "SweepResults",
    "Technique",
    "Ticket",
    "Timing",
    "Unit",
    "UnitGroup",
    "Units",
    "begin",
    "bench",
    "densities",
    "epochs",
    "evaluate",
    "export",
    "from_torch_prune",
    "levels",
    "load",
    "load_sweep",
    "mask_of_zeros",
    "plan",
    "profile",
    "prune",
    "prune_to_latency",
    "report",
    "results",
    "run",
    "save",
    "slim",
    "steps",
    "train",
    "units",
    "work",
]
