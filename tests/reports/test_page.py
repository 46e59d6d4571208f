"""The page: everything a table says is in it, nothing in it can run or be fetched, and it stays small."""

import base64
import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paper_panels import in_bleu
from rewound.conclusions.comparison import compare
from rewound.conclusions.evidence import Evidence
from rewound.conclusions.tables import CurveRow, LayerRow, Row, Tables
from rewound.reports.charts import charts
from rewound.reports.look import looks
from rewound.reports.page import Origin, _library, as_json, details, document, story, write_page
from rewound.reports.terminal import conformance_card
from rewound.reports.writing import write_report

ORIGIN = Origin("digits", (("Rows", "9"),), "rewound run digits", "rewound show")
DENSE = [Row("digits", "", False, "", 1, None, n, 0.9, 0.9 + n / 1000, 4000, key=f"dense{n}") for n in (-1, 0, 1)]


def pruned(
    technique: str, *, iterative: bool = False, recipe: str = "digits", densities: tuple[float, ...] = (0.5, 0.1)
) -> list[Row]:
    return [
        Row(recipe, "unstructured", iterative, technique, density, t, trial, 0.9, 0.9 - trial / 1000, 1000, t)
        for density in densities
        for t in (4, 8)
        for trial in (-1, 0, 1)
    ]


ROWS = [*DENSE, *pruned("lr-rewinding"), *pruned("fine-tuning"), *pruned("fine-tuning", iterative=True)]


def told(
    rows: list[Row],
    layers: list[LayerRow] | None = None,
    curves: list[CurveRow] | None = None,
    theirs: list[Row] | None = None,
) -> Any:
    """The story of a table, as the page reads it; with another table, also what the comparison says."""
    return json.loads(as_json(story(Evidence(Tables(rows, layers or [], curves or []), theirs or []))))


class Reader(HTMLParser):
    """The texts of a page's scripts, and every address in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.inside = False
        self.policy = ""
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")
        if said.get("http-equiv") == "Content-Security-Policy":
            self.policy = said["content"]
        self.addresses += [said[name] for name in ("src", "href") if name in said]

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = False


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(Evidence(Tables(ROWS)), tmp_path_factory.mktemp("page") / "index.html", ORIGIN)


def test_the_page_is_one_file_that_asks_for_nothing(page: Path) -> None:
    reader = Reader(page)
    assert [address for address in reader.addresses if not address.startswith(("data:", "#"))] == []
    assert "default-src 'none'" in reader.policy
    assert "unsafe-eval" not in reader.policy
    data, *scripts = reader.scripts
    assert json.loads(data)["commands"] == {"run": "rewound run digits", "show": "rewound show"}
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in reader.policy, "a script that the policy does not name will not run"


def test_the_same_tables_give_the_same_bytes(page: Path, tmp_path: Path) -> None:
    again = write_page(Evidence(Tables(ROWS[::-1])), tmp_path / "index.html", ORIGIN)
    assert again.read_bytes() == page.read_bytes()


def test_names_that_contain_html_stay_text(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028"
    rows = [replace(row, recipe=name, technique=row.technique and name) for row in ROWS]
    path = write_page(Evidence(Tables(rows)), tmp_path / "index.html", Origin(name))
    reader = Reader(path)
    assert len(reader.scripts) == 3, "no script was added"
    assert json.loads(reader.scripts[0])["subjects"][0]["recipe"] == name
    assert "img" not in reader.tags
    assert "alert(1)</script>" not in path.read_text()


def test_figures_without_data_are_left_out() -> None:
    (subject,) = told(ROWS)["subjects"]
    assert [figure["id"] for figure in subject["figures"]] == ["accuracy", "differences", "cost", "speed"]
    one_time = [row for row in ROWS if row.retrain_epochs != 4]
    assert "cost" not in [figure["id"] for figure in told(one_time)["subjects"][0]["figures"]]
    no_flops = [replace(row, flops=None) for row in ROWS]
    assert "speed" not in [figure["id"] for figure in told(no_flops)["subjects"][0]["figures"]]


def test_the_same_picture_is_not_shown_twice() -> None:
    def titles(rows: list[Row]) -> list[str]:
        (choice,) = told(rows)["subjects"][0]["figures"][0]["choices"]
        return [panel["title"] for panel in choice["panels"]]

    assert titles(ROWS) == ["One-shot", "Iterative", "Retrained in full, t = 8"]
    one_time = [row for row in ROWS if row.retrain_epochs != 4]
    assert titles(one_time) == ["One-shot", "Iterative, t = 8"]


def test_algorithm_1_prunes_a_fifth_a_level_and_weights_are_rewound_for_less() -> None:
    def title(keep: float, *techniques: str) -> str:
        levels = tuple(round(keep**level, 4) for level in (1, 2, 3, 4))
        rows = [row for name in techniques for row in pruned(name, iterative=True, densities=levels)]
        (choice,) = told(DENSE + rows)["subjects"][0]["figures"][0]["choices"]
        return str(choice["panels"][-1]["title"])

    assert title(0.8, "lr-rewinding", "fine-tuning") == "Algorithm 1 and its rivals, t = 8"
    both = title(0.8, "lr-rewinding", "weight-rewinding")
    assert both == "Algorithm 1 and its rivals, t = 8 (weight rewinding: 4)"
    assert title(0.5, "lr-rewinding", "weight-rewinding") == "Retrained in full, t = 8 (weight rewinding: 4)"
    assert title(0.8, "fine-tuning") == "Retrained in full, t = 8"


def test_triangles_are_explained_where_there_are_some() -> None:
    def texts(rows: list[Row]) -> dict[str, str]:
        return {figure["id"]: figure["text"] for figure in told(rows)["subjects"][0]["figures"]}

    assert not any("▼" in text for text in texts(ROWS).values())
    fallen = [replace(row, val=0.5, test=0.5) if row.technique == "fine-tuning" else row for row in ROWS]
    assert {name for name, text in texts(fallen).items() if "▼" in text} == {"accuracy", "cost"}


def test_a_compared_table_is_drawn_over_ours_from_its_own_dense_mean() -> None:
    shifted = [
        replace(row, test=(row.test or 0) - 0.1) for row in ROWS if row.retrain_epochs != 4 or row.density == 0.5
    ]
    found = told(ROWS, theirs=shifted)
    (subject,) = found["subjects"]
    settings = subject["settings"]
    for number, theirs in enumerate(settings["theirs"]):
        shared = settings["t"][number] == 8 or settings["density"][number] == 0.5
        assert theirs == (pytest.approx([0, -0.1, 0.1, 3]) if shared else None)
    accuracy, _, cost, _ = subject["figures"]
    for panel in accuracy["choices"][0]["panels"] + cost["choices"][0]["panels"]:
        assert panel["theirs"]
        assert all(settings["theirs"][number] for number in panel["theirs"])


def test_without_another_table_there_is_nothing_to_compare() -> None:
    found = told(ROWS)
    assert found["cards"] == {}
    assert found["subjects"][0]["settings"]["theirs"] is None


def test_the_card_says_what_the_terminal_says() -> None:
    worse = [replace(row, val=0.8, test=0.8) if row.density == 0.1 else row for row in ROWS]
    (card,) = told(ROWS, theirs=worse)["cards"].values()
    assert card["verdict"] == "does not conform"
    assert [line["passed"] for line in card["criteria"]] == [True, False, False, False]
    assert [(curve["cells"], curve["outside"], curve["note"]) for curve in card["curves"]] == [
        (4, 2, "beyond ±0.45")
    ] * 3
    cells = card["cells"]
    assert [inside == 0 for inside in cells["inside"]] == [ratio == "10.00×" for ratio in cells["ratio"]]
    assert {value for value, inside in zip(cells["difference"], cells["inside"], strict=True) if not inside} == {10}
    output = StringIO()
    Console(file=output, width=120).print(conformance_card(compare(ROWS, worse)))
    for criterion in card["criteria"]:
        assert all(criterion[part] in output.getvalue() for part in ("name", "n", "found", "limit"))


def test_differences_have_intervals_only_where_pairs_suffice() -> None:
    figures = {figure["id"]: figure for figure in told(ROWS)["subjects"][0]["figures"]}
    (panel,) = figures["differences"]["choices"][0]["panels"]
    assert (panel["technique"], panel["over"]) == ("lr-rewinding", ["fine-tuning"])
    assert [each[3:] for each in panel["differences"]] == [[3, True, False]] * 2, "three pairs, no interval"
    assert (panel["note"], panel["brackets"]) == (
        "Differences of mean test values, paired by their dense network; an interval needs 5 pairs.",
        "( ) least and largest difference.",
    )
    many = [replace(row, trial=row.trial + 3 * more) for row in ROWS for more in range(2)]
    figures = {figure["id"]: figure for figure in told(many)["subjects"][0]["figures"]}
    (panel,) = figures["differences"]["choices"][0]["panels"]
    assert [each[3:] for each in panel["differences"]] == [[6, True, True]] * 2
    alone = [row for row in ROWS if row.technique != "lr-rewinding"]
    assert "differences" not in [figure["id"] for figure in told(alone)["subjects"][0]["figures"]]


def test_layers_and_curves_come_with_keys() -> None:
    rows = [replace(row, key=row.key or f"key{number}") for number, row in enumerate(ROWS)]
    layers = [LayerRow(row.key, name, 5, 10) for row in rows for name in ("first", "last")]
    curves = [CurveRow(row.key, step, 0.1, math.nan if step == 9 else 0.5) for row in rows for step in range(1, 200)]
    found = told(rows, layers, curves)
    assert [figure["id"] for figure in found["subjects"][0]["figures"]][4:] == ["layers", "curves"]
    run = found["details"]["runs"][rows[-1].key]
    assert (run["layer"], run["kept"], run["total"]) == ([0, 1], [5, 5], [10, 10])
    steps, _, losses = run["curve"]
    assert len(steps) <= 60
    assert steps[-1] == 199, "the end of a curve is always there"
    assert all(loss in (0.5, None) for loss in losses), "a loss that is not a number is not known"


def test_when_there_is_no_room_the_runs_of_figures_keep_their_details() -> None:
    layers = {
        str(key): [LayerRow(str(key), f"a layer with a long name {n}", 5, 10) for n in range(200)]
        for key in range(2000)
    }
    found = details(layers, layers, {})
    assert len(as_json(found)) < 1_600_000
    assert isinstance(found["runs"], dict)
    assert list(found["runs"])[:2] == ["0", "1"]
    assert found["left_out"] == 2000 - len(found["runs"]) > 0


def test_equal_keys_are_said_to_be_the_same_runs() -> None:
    rows = [*DENSE, *pruned("lr-rewinding"), *pruned("fine-tuning")]
    keyed = [
        replace(row, key=f"{row.density} {row.trial} {row.technique if row.retrain_epochs == 8 else ''}")
        for row in rows
    ]
    (subject,) = told(keyed)["subjects"]
    settings = subject["settings"]
    for number, same in enumerate(settings["same"]):
        short = settings["t"][number] == 4
        assert (same is not None) == short, "only the times of 4 epochs share their keys"
        if same:
            (other,) = same
            assert settings["density"][other] == settings["density"][number]
            assert settings["technique"][other] != settings["technique"][number]


def test_failed_runs_stay_in_the_table_and_out_of_the_figures() -> None:
    broken = [replace(row, val=math.nan, test=math.inf) if row.density == 0.1 else row for row in ROWS]
    (subject,) = told(broken)["subjects"]
    assert subject["runs"]["test"].count(None) == sum(row.density == 0.1 for row in ROWS)
    lost = [number for number, density in enumerate(subject["settings"]["density"]) if density == 0.1]
    assert all(subject["settings"]["delta"][number] is None for number in lost)
    drawn = {
        n
        for figure in subject["figures"]
        for choice in figure["choices"]
        for p in choice["panels"]
        for n in p["settings"]
    }
    assert drawn.isdisjoint(lost)


def test_units_are_never_side_by_side() -> None:
    bleu = [replace(in_bleu(row), recipe="gnmt") for row in ROWS]
    found = told([*ROWS, *bleu])["subjects"]
    assert [(subject["recipe"], subject["unit"], subject["scale"]) for subject in found] == [
        ("digits", "points", 100),
        ("gnmt", "BLEU", 1),
    ]
    panel = found[1]["figures"][0]["choices"][0]["panels"][0]
    assert panel["params"]["drops"] == ["no drop", "1 BLEU drop"]


def test_subjects_are_in_a_persons_order() -> None:
    rows = [replace(row, recipe=f"resnet{depth}") for depth in (110, 20) for row in ROWS]
    rows += [replace(row, recipe="resnet20", pruning="structured-a") for row in ROWS if row.technique]
    rows += [replace(row, recipe="a-dense-one") for row in DENSE]
    found = [(subject["recipe"], subject["pruning"]) for subject in told(rows)["subjects"]]
    assert found == [
        ("resnet20", "unstructured"),
        ("resnet110", "unstructured"),
        ("resnet20", "structured-a"),
        ("a-dense-one", ""),
    ]


def test_an_empty_table_and_one_with_dense_networks_only_have_a_page(tmp_path: Path) -> None:
    assert told([])["subjects"] == []
    (subject,) = told(DENSE)["subjects"]
    assert subject["figures"] == []
    assert "only dense networks" in subject["sentence"]
    write_page(Evidence(Tables([])), tmp_path / "index.html", Origin("nothing"))


def test_a_panel_ends_where_every_technique_is_below_it() -> None:
    rows = [*DENSE, *pruned("lr-rewinding", densities=tuple(0.5**n for n in range(1, 9)))]
    rows = [replace(row, test=0.1) if row.density < 0.1 else row for row in rows]
    panel = told(rows)["subjects"][0]["figures"][0]["choices"][0]["panels"][0]
    assert panel["params"]["places"] == [2, 4, 8, 16], "one of the ruined compressions shows that they are"
    assert panel["note"].startswith("Beyond, to 256.00×, all are worse by more than")


def test_every_chart_is_a_vega_lite_specification() -> None:
    import vl_convert

    given = {"shown": ["mine"], "spread": True, "paper": "#fff", "muted": "#666", "band": "#eee", "zone": "#eee"}
    given |= {"across": [1, 10], "places": [2, 5], "digits": ".2f", "window": [-3, 1], "sd": 0.2, "one": 1}
    given |= {"safe": [4, 14], "ticks": 4, "compared": True, "drops": ["no drop", "1% drop"]}
    for kind, spec in charts(looks(["mine", "fine-tuning"])).items():
        whole = {**spec, "width": 300, "data": {"values": []}}
        whole["params"] = [{"name": name, "value": value} for name, value in given.items()]
        assert vl_convert.vegalite_to_vega(whole)["marks"], kind


@pytest.mark.slow
def test_25_000_rows_with_keys_layers_and_curves_stay_below_6_megabytes(tmp_path: Path) -> None:
    techniques, densities, times = [f"technique-{n}" for n in range(5)], [0.8**n for n in range(1, 26)], range(1, 41)
    settings = [(technique, d, t) for technique in techniques for d in densities for t in times]
    rows, layers, curves = list(DENSE), [], []
    for number in range(25_000):
        technique, density, t = settings[number // 5]
        value, key = 0.9 - (number * 7919 % 10007) / 1e5, hashlib.md5(str(number).encode()).hexdigest()
        setting = ("digits", "unstructured", number % 2 == 0, technique, density, t, number % 5)
        rows.append(Row(*setting, value, value - 0.0012345, 1_000_000 + number * 31, t, number / 7, key))
        if number % 10 == 0:
            layers += [LayerRow(key, f"stage{n}.weight", number % 997, 1000) for n in range(20)]
            curves += [CurveRow(key, 391 * step, 0.1, value / step) for step in range(1, 31)]
    path = write_page(Evidence(Tables(rows, layers, curves)), tmp_path / "index.html", ORIGIN)
    assert path.stat().st_size < 6_000_000


def test_without_the_library_the_report_goes_on_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # how Python marks a module that cannot be imported
    _library.cache_clear()
    said: list[str] = []
    report = write_report(Evidence(Tables(ROWS)), tmp_path, ORIGIN, say=said.append)
    assert said == [f"no {what}: vl_convert is missing; pip install 'rewound[figures]'" for what in ("page", "figures")]
    assert [path.name for path in report.files] == ["results.csv"]
    assert "Test accuracy over trials" in str(report)


def test_every_asset_is_used(page: Path) -> None:
    text = page.read_text() + document("digits", {}, live=True).decode()
    assets = Path(write_page.__code__.co_filename).parent / "assets"
    for path in assets.iterdir():
        first = next(line for line in path.read_text().splitlines() if line.strip())
        assert first in text, f"{path.name} is not part of the page"
    assert not re.search(
        r"\.innerHTML|\.outerHTML|insertAdjacentHTML|document\.write|\beval\(",
        "".join(path.read_text() for path in assets.glob("*.js")),
    ), "data may only enter the page as text"
