"""The figures of "Comparing Rewinding and Fine-tuning in Neural Network Pruning", one row each.

A row says which experiments a figure shows and how; its panels are whatever the table of results has of them. Names are
the figure's number and its label in the paper's source. What the paper does not have (your recipe, way of pruning or
technique) is shown in every figure it fits; so is a network that the paper shows elsewhere, where a figure would
otherwise be empty. Limits of the vertical axes and the deepest density shown are the authors' for their networks, and
the data's for others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from rewound.conclusions.findings import ABLATIONS
from rewound.conclusions.paper.networks import AGAINST_COMPRESSION, AGAINST_TIME, NETWORKS, Published
from rewound.conclusions.paper.panels import (
    Measured,
    Panel,
    best,
    drops,
    ends,
    every_time,
    full_time,
    speedup,
    speedup_on_finetuning,
)
from rewound.conclusions.tables import is_structured

Limits = Mapping[str, tuple[float, float | None]]  # by recipe; an upper one of None is the data's

_APPENDIX: Final = frozenset(  # not in the main text
    {
        ("cifar10-resnet20", "unstructured"),
        ("cifar10-resnet56", "structured-a"),
        ("cifar10-resnet110", "unstructured"),
        ("cifar10-resnet110", "structured-a"),
        ("cifar10-resnet110", "structured-b"),
        ("imagenet-resnet34", "structured-b"),
    }
)
_RESNET20: Final = frozenset({("cifar10-resnet20", "unstructured")})  # its FLOPs are published, but not in a figure

_COMPRESSION: Final[Limits] = dict.fromkeys(NETWORKS, (-3, 1)) | {"wmt16-gnmt": (-6, 1.5)}
_TIMES: Final[Limits] = {**_COMPRESSION, "imagenet-resnet50": (-5, 1), "imagenet-resnet34": (-5, 1)}
_MAIN_TIMES: Final[Limits] = {"cifar10-resnet56": (-3, 1), "imagenet-resnet50": (-6, 1), "wmt16-gnmt": (-8, 1.5)}
_MAIN_STRUCTURED: Final[Limits] = {"cifar10-resnet56": (-6, 1), "imagenet-resnet34": (-6, 1)}
_SPEEDUP: Final[Limits] = dict.fromkeys(NETWORKS, (0.1, None))
_SPEEDUP_ON_FINETUNING: Final[Limits] = dict.fromkeys(NETWORKS, (0.9, 1.3))

_DEEPEST: Final = {("wmt16-gnmt", False): 0.05, ("wmt16-gnmt", True): 0.028}
_DEEPEST_TIMES: Final = {
    ("wmt16-gnmt", False): 0.0439,
    ("wmt16-gnmt", True): 0.0439,
    ("cifar10-resnet56", True): 0.107,
}
_ONE_SHOT, _ITERATIVE = (False,), (True,)
_UNSTRUCTURED, _STRUCTURED = (False,), (True,)
_EITHER = (False, True)
_IN_FULL: Final = {
    "lr-rewinding": "Learning rate rewinding, t = T (Algorithm 1)",
    "weight-rewinding": "Weight rewinding, t ≤ 0.9T",
    "fine-tuning": "Fine-tuning, t = T",
}


@dataclass(frozen=True)
class PaperFigure:
    """One figure of the paper: which experiments it shows, and how."""

    name: str
    title: str
    panels: Callable[[Measured], Iterator[Panel]]
    iterative: tuple[bool, ...]
    structured: tuple[bool, ...] = _EITHER
    hides: tuple[str, ...] = ABLATIONS  # techniques
    leaves_out: frozenset[tuple[str, str]] = frozenset()  # of the paper's recipes and prunings
    limits: Limits = field(default_factory=lambda: _COMPRESSION)
    deepest: Mapping[tuple[str, bool], float] = field(default_factory=lambda: _DEEPEST)
    published: tuple[Published, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # of techniques, where not the usual ones
    columns: int = 2
    by_pruning: bool = False  # a column for each, as far as they go
    sheet_per_recipe: bool = False


_ROWS: Final = (
    PaperFigure(
        "figure-1-sparsity-oneshot",
        "One-shot accuracy versus parameter-efficiency",
        best,
        _ONE_SHOT,
        leaves_out=_APPENDIX,
    ),
    PaperFigure(
        "figure-2-sparsity-iterative",
        "Iterative accuracy versus parameter-efficiency",
        best,
        _ITERATIVE,
        leaves_out=_APPENDIX,
        published=AGAINST_COMPRESSION,
    ),
    PaperFigure(
        "figure-3-usability-unstructured",
        "Unstructured accuracy versus search cost: no drop, and a drop of 1% or 1 BLEU",
        drops,
        _ONE_SHOT,
        _UNSTRUCTURED,
        leaves_out=_APPENDIX,
        limits=_MAIN_TIMES,
        deepest={},
    ),
    PaperFigure(
        "figure-4-usability-structured",
        "Structured accuracy versus search cost: the mildest and the strongest pruning",
        ends,
        _ONE_SHOT,
        _STRUCTURED,
        leaves_out=_APPENDIX,
        limits=_MAIN_STRUCTURED,
        deepest={},
    ),
    PaperFigure(
        "figure-5-usability-recommendations",
        "Accuracy versus parameter-efficiency from Algorithm 1",
        full_time,
        _ITERATIVE,
        hides=(*ABLATIONS, "fine-tuning", "weight-rewinding"),
        leaves_out=_APPENDIX,
        published=AGAINST_COMPRESSION,
        labels=_IN_FULL,
    ),
    PaperFigure(
        "figure-6-app-usability-recommendations",
        "Accuracy versus parameter-efficiency from Algorithm 1 and its rivals",
        full_time,
        _ITERATIVE,
        published=AGAINST_COMPRESSION,
        labels=_IN_FULL,
    ),
    PaperFigure(
        "figure-7-app-sparsity-oneshot",
        "One-shot accuracy versus parameter-efficiency, with ablations",
        best,
        _ONE_SHOT,
        hides=(),
        published=AGAINST_COMPRESSION,
        by_pruning=True,
    ),
    PaperFigure(
        "figure-8-app-sparsity-iterative",
        "Iterative accuracy versus parameter-efficiency, all networks",
        best,
        _ITERATIVE,
        published=AGAINST_COMPRESSION,
    ),
    PaperFigure(
        "figure-9-app-usability-unstructured",
        "Unstructured accuracy versus search cost",
        every_time,
        _EITHER,
        _UNSTRUCTURED,
        hides=(),
        limits=_TIMES,
        deepest=_DEEPEST_TIMES,
        columns=4,
        sheet_per_recipe=True,
    ),
    PaperFigure(
        "figure-10-app-usability-structured",
        "Structured accuracy versus search cost",
        every_time,
        _EITHER,
        _STRUCTURED,
        hides=(),
        limits=_TIMES,
        published=AGAINST_TIME,
        columns=4,
        sheet_per_recipe=True,
    ),
    PaperFigure(
        "figure-11-flops",
        "FLOP speed-up of iterative pruning over the original network",
        speedup,
        _ITERATIVE,
        leaves_out=_RESNET20,
        limits=_SPEEDUP,
    ),
    PaperFigure(
        "figure-12-flops-speedup",
        "FLOP speed-up of iterative pruning over fine-tuning",
        speedup_on_finetuning,
        _ITERATIVE,
        leaves_out=_RESNET20,
        limits=_SPEEDUP_ON_FINETUNING,
    ),
)
FIGURES: Final = {figure.name: figure for figure in _ROWS}


def pruning_order(pruning: str) -> tuple[bool, str]:
    """Sorts unstructured pruning first, as in the paper and then in other ways; the others by name."""
    return is_structured(pruning), pruning


def panels(figure: PaperFigure, found: Iterable[Measured]) -> list[Panel]:
    """The panels of a figure, in the paper's order, as far as there are data for them."""
    fitting = [
        each
        for each in sorted(found, key=_place)
        if each.iterative in figure.iterative and is_structured(each.pruning) in figure.structured
    ]
    shown = [each for each in fitting if (each.recipe, each.pruning) not in figure.leaves_out]
    shown_panels = [panel for each in shown or fitting for panel in _panels(figure, each)]
    if figure.sheet_per_recipe:  # in pairs: one-shot and iterative, or structured-a and structured-b
        shown_panels.sort(key=lambda panel: (_place(panel.measured)[:2], panel.rank))
    return shown_panels


def _panels(figure: PaperFigure, measured: Measured) -> Iterator[Panel]:
    deepest = figure.deepest.get((measured.recipe, measured.iterative), 0.0)
    kept = measured.only(lambda technique, density: technique not in figure.hides and deepest <= density < 1)
    for panel in figure.panels(kept) if kept.cells else ():
        dots = tuple(dot for dot in figure.published if _on(dot, panel))
        yield replace(panel, published=dots, limits=figure.limits.get(measured.recipe))


def _on(dot: Published, panel: Panel) -> bool:
    same = (dot.recipe, dot.pruning, dot.iterative) == panel.measured.experiment
    return same and (panel.density is None or abs(dot.density / panel.density - 1) < 1e-3)


def _place(measured: Measured) -> tuple[int, str, bool, str, bool]:
    order = list(NETWORKS)
    rank = order.index(measured.recipe) if measured.recipe in order else len(order)
    return rank, measured.recipe, *pruning_order(measured.pruning), measured.iterative
