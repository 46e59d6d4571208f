"""Results in the terminal: each technique at its best retraining time, and how far it compresses."""

from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from rewound.errors import InputError
from rewound.findings import Baseline, Cell, Line, Verdict, baselines, best_over_time, cells, failures, verdicts
from rewound.pages.look import looks, ratios
from rewound.results import Row


def summary_table(rows: Iterable[Row], test_images: int | None = None) -> RenderableType:
    """Every technique and compression at its best retraining time, then how far each technique compresses.

    `test_images` is the size of the test set, for the smallest difference that an accuracy can show.
    """
    rows = list(rows)
    dense, found, failed = baselines(rows), verdicts(rows), failures(rows)
    best = {(cell.line, cell.density): cell for cell in best_over_time(cells(rows))}
    settings = sorted(best.keys() | failed.keys(), key=lambda setting: (setting[0], -setting[1]))
    if not settings:
        raise InputError(f"nothing to summarise: none of the {len(rows)} rows is a retrained network")
    parts: list[RenderableType] = []
    for experiment in dict.fromkeys(line[:3] for line, _ in settings):
        mine = [setting for setting in settings if setting[0][:3] == experiment]
        lines = [Line(*experiment, name) for name in looks(line.technique for line, _ in mine)]
        any_failed = any(failed[setting] for setting in mine)
        table = _table(lines[0], dense[lines[0].recipe], any_failed)
        shown = ratios(density for _, density in mine)
        for line in lines:
            for setting in (setting for setting in mine if setting[0] == line):
                values = _texts(best.get(setting), dense[line.recipe])
                lost = [str(failed[setting] or "")] if any_failed else []
                table.add_row(line.technique, shown[setting[1]], *values, *lost)
            table.add_section()
        labels = {1 / density: label for density, label in shown.items()}
        parts += [table, *_closing({line.technique: found[line] for line in lines if line in found}, labels), ""]
    if test_images and any(baseline.metric == "accuracy" for baseline in dense.values()):
        parts.append(f"One test image is {100 / test_images:.2g} points of accuracy ({test_images:,} images).")
    return Group(*parts)


def _table(line: Line, dense: Baseline, any_failed: bool) -> Table:
    chance = f"± {dense.spread:.2f} ({dense.n} runs)" if dense.n > 1 else "(1 run: its spread is unknown, taken as 0)"
    table = Table(
        title=f"{line.recipe}, {line.pruning} pruning, {'iterative' if line.iterative else 'one-shot'}",
        caption=f"Test {dense.metric} over trials, at the retraining time t that validates best; delta in {dense.unit} "
        f"to dense {dense.mean * dense.scale:.2f} {chance}. Cost: epochs of retraining, all levels.",
        box=box.SIMPLE_HEAD,
        show_edge=False,  # with its nine columns it fits 80 characters
        pad_edge=False,
        collapse_padding=True,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("technique", overflow="fold")
    for name in ("ratio", "median", "min", "max", "delta", "t", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    if any_failed:
        table.add_column("failed", justify="right", no_wrap=True, style="red")
    return table


def _texts(cell: Cell | None, dense: Baseline) -> list[str]:
    if cell is None:
        return ["–"] * 6
    tests = [f"{value * dense.scale:.2f}" for value in (cell.median, cell.low, cell.high)]
    cost = "–" if cell.search_epochs is None else f"{cell.search_epochs:g}"
    return [*tests, f"{dense.delta(cell.median):+z.2f}", f"{cell.retrain_epochs:g}", cost]


def _closing(found: Mapping[str, Verdict], labels: Mapping[float, str]) -> list[str]:
    def ratio(compression: float | None, tried: float) -> str:
        if compression is None:
            return "none"
        return f"{'≥' if compression == tried else ''}{labels[compression]}"

    no_drop = [f"{name} {ratio(verdict.no_drop, verdict.tried)}" for name, verdict in found.items()]
    one_percent = [f"{name} {ratio(verdict.one_percent, verdict.tried)}" for name, verdict in found.items()]
    return [f"No drop up to: {', '.join(no_drop)}", f"1% drop up to: {', '.join(one_percent)}"] if found else []
