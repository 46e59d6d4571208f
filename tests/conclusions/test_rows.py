"""Tables: what is written can be read, the authors' tables can be read, and a bad one says where it is bad."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewound.conclusions.paper.networks import METRICS
from rewound.conclusions.tables import (
    COLUMNS,
    CurveRow,
    LayerRow,
    Row,
    read_rows,
    write_curves,
    write_layers,
    write_rows,
)
from rewound.foundations.errors import InputError
from rewound.foundations.metric import Metric

OLD_HEADER = "recipe,pruning,iterative,technique,density,retrain_epochs,trial,val,test,flops,search_epochs,seconds,key"
HEADER = f"{OLD_HEADER},metric,unit,direction"
DENSE = Row("digits", "unstructured", False, "", 1, None, 1, 0.97, 0.96, 1000, None, 1.5, "k0")
PRUNED = Row("digits", "unstructured", True, "lr-rewinding", 0.8**3, 16, 2, 0.95, 0.94, 500, 48, 12.25, "k1")
FAILED = replace(PRUNED, trial=3, val=None, test=None, key="k2")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_what_is_no_density_or_time_is_refused() -> None:
    for density in (0.0, -0.5, 2.0, 1e-320, 1e-300, 1e-16):
        with pytest.raises(InputError, match=f"density {density:g} is outside"):
            Row("digits", "unstructured", False, "fine-tuning", density, 4, 1, 0.9, 0.9)
    with pytest.raises(InputError, match="retrain_epochs must be at least 0, not -1; give the retraining time"):
        Row("digits", "unstructured", False, "fine-tuning", 0.5, -1, 1, 0.9, 0.9)


def test_the_columns_are_the_contract() -> None:
    assert ",".join(COLUMNS) == f"{HEADER},asked_density,parameters,others,waited"


def test_what_was_asked_for_is_a_column_only_where_it_is_not_the_density(tmp_path: Path) -> None:
    units = replace(PRUNED, pruning="unit", density=0.24, asked_density=0.25)
    write_rows([DENSE, units], path := tmp_path / "results.csv")
    assert path.read_text().splitlines()[0] == f"{HEADER},asked_density"
    assert read_rows(path) == [DENSE, units]
    left = replace(PRUNED, density=0.5, parameters=123)
    write_rows([DENSE, left], path)
    assert path.read_text().splitlines()[0] == f"{HEADER},parameters"
    assert read_rows(path) == [DENSE, left]
    waited = replace(PRUNED, density=0.5, waited=1.25)
    write_rows([DENSE, waited], path)
    assert path.read_text().splitlines()[0] == f"{HEADER},waited"
    assert read_rows(path) == [DENSE, waited]
    with pytest.raises(InputError, match="asked_density 2 is outside"):
        replace(units, asked_density=2.0)


def test_the_bytes_of_a_table(tmp_path: Path) -> None:
    write_rows([FAILED, PRUNED, DENSE], tmp_path / "new" / "results.csv")
    assert (tmp_path / "new" / "results.csv").read_bytes().decode() == (
        f"{HEADER}\n"
        "digits,unstructured,0,,1,,1,0.97,0.96,1000,,1.5,k0,accuracy,fraction,higher\n"
        "digits,unstructured,1,lr-rewinding,0.512,16,2,0.95,0.94,500,48,12.25,k1,accuracy,fraction,higher\n"
        "digits,unstructured,1,lr-rewinding,0.512,16,3,,,500,48,12.25,k2,accuracy,fraction,higher\n"
    )


def test_a_table_says_what_it_holds(tmp_path: Path) -> None:
    loss = Row(
        "mine", "unstructured", True, "fine-tuning", 0.5, 4, 1, 2.5, 2.75, metric="loss", unit="nats", direction="lower"
    )
    write_rows([loss], tmp_path / "results.csv")
    assert read_rows(tmp_path / "results.csv") == [loss]
    assert loss.measured_by == Metric("loss", "nats", higher_is_better=False)


def test_a_table_that_does_not_say_it_holds_accuracies_or_what_the_reader_states(tmp_path: Path) -> None:
    before = write(tmp_path / "old.csv", f"{OLD_HEADER}\nwmt16-gnmt,unstructured,0,,1,,1,27,26,,,,k0\n")
    (row,) = read_rows(before)
    assert row.measured_by == Metric()
    (row,) = read_rows(before, METRICS)
    assert row.measured_by == Metric("BLEU", "BLEU")
    mixed = write(tmp_path / "mixed.csv", f"{HEADER}\nwmt16-gnmt,unstructured,0,,1,,1,27,26,,,,k0,,,\n")
    (row,) = read_rows(mixed, METRICS)
    assert row.measured_by == Metric("BLEU", "BLEU"), "an old table and a new one put together"
    stated = write(
        tmp_path / "new.csv", f"{HEADER}\nwmt16-gnmt,unstructured,0,,1,,1,0.27,0.26,,,,k0,chrF,fraction,higher\n"
    )
    (row,) = read_rows(stated, METRICS)
    assert row.measured_by == Metric("chrF", "fraction"), "what a table says counts"


@pytest.mark.parametrize("stated", ["loss,,lower", ",nats,lower", "loss,nats,up", "loss,nats,"])
def test_a_metric_is_stated_in_full(tmp_path: Path, stated: str) -> None:
    path = write(tmp_path / "new.csv", f"{HEADER}\ndigits,unstructured,0,,1,,1,0.27,0.26,,,,k0,{stated}\n")
    with pytest.raises(
        InputError, match=r"new\.csv, line 2: a row with metric .*; give all three, and higher or lower"
    ):
        read_rows(path)
    two = write(tmp_path / "two.csv", f"{OLD_HEADER},metric,unit\n")
    with pytest.raises(InputError, match=r"two\.csv has no column direction"):
        read_rows(two)


def test_dense_networks_that_all_stand_twice_count_once(tmp_path: Path) -> None:
    def tests(*values: float) -> list[tuple[int, float | None]]:
        lines = "".join(f"a,{value},0.9\n" for value in values)
        rows = read_rows(write(tmp_path / "dense.csv", f"recipe,test,val\nb,0.5,0.5\n{lines}"))
        return [(row.trial, row.test) for row in rows if row.recipe == "a"]

    assert tests(0.1, 0.2, 0.3, 0.1, 0.2, 0.3) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert tests(0.1, 0.1, 0.2, 0.3, 0.1, 0.1, 0.2, 0.3) == [(1, 0.1), (2, 0.1), (3, 0.2), (4, 0.3)], "two are equal"
    assert len(tests(0.1, 0.2, 0.3, 0.1, 0.2)) == 5
    assert len(tests(0.1, 0.1, 0.2, 0.2)) == 4, "it may be chance"


@pytest.mark.parametrize("name", ["results.csv", "results.csv.gz"])
def test_what_is_written_can_be_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_rows([FAILED, PRUNED, DENSE], path)
    assert read_rows(path) == [DENSE, replace(PRUNED, density=0.512), replace(FAILED, density=0.512)]
    before = path.read_bytes()
    write_rows(read_rows(path), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [name], "no draft is left behind"


@settings(deadline=None)
@given(st.permutations([DENSE, PRUNED, FAILED, replace(PRUNED, key=""), replace(PRUNED, key="", test=0.5)]))
def test_the_order_of_arrival_does_not_matter(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    folder = tmp_path_factory.mktemp("order")
    write_rows(rows, folder / "a.csv")
    write_rows(sorted(rows, key=repr), folder / "b.csv")
    assert (folder / "a.csv").read_bytes() == (folder / "b.csv").read_bytes()


def test_layers_keep_the_order_of_the_network_and_curves_that_of_time(tmp_path: Path) -> None:
    write_layers([LayerRow("b", "stem", 1, 2, 9), LayerRow("a", "z", 3, 4), LayerRow("a", "b", 5, 6)], tmp_path / "l")
    assert (tmp_path / "l").read_text() == "key,layer,kept,total,flops\na,z,3,4,\na,b,5,6,\nb,stem,1,2,9\n"
    write_curves([CurveRow("a", 20, 0.1, float("nan")), CurveRow("a", 10, 0.1, 2.5, 0.5)], tmp_path / "c")
    assert (tmp_path / "c").read_text() == "key,step,lr,loss,val\na,10,0.1,2.5,0.5\na,20,0.1,nan,\n"


def test_a_table_of_dense_networks_needs_three_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "dense.csv", "recipe,test,val,flops,note\na,0.9,0.8,10.0,x\nb,0.7,0.6,,y\na,,,,z\n")
    first, second, failed = read_rows(path)
    assert (first.recipe, first.test, first.val, first.flops, first.trial) == ("a", 0.9, 0.8, 10, 1)
    assert first.dense
    assert (first.density, first.retrain_epochs, first.iterative) == (1, None, False)
    assert (second.recipe, second.trial, second.flops) == ("b", 1, None)
    assert (failed.trial, failed.test) == (2, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("recipe,test\na,0.9\n", "no column val; its columns are recipe, test"),
        ("recipe,technique,val,test\n", "no column pruning, iterative, density, retrain_epochs, trial, flops"),
        (f"{OLD_HEADER}\na,u,0,fine-tuning,0.5,4,1,0.9,high,,,,\n", r"line 2: column test: 'high' is not a number"),
        (f"{OLD_HEADER}\na,u,0,fine-tuning,0.5,4,1,0.9,nan,,,,\n", r"line 2: column test: 'nan' is not a number"),
        (f"{OLD_HEADER}\na,u,yes,fine-tuning,0.5,4,1,0.9,0.9,,,,\n", r"line 2: column iterative: 'yes' is not 0 or 1"),
        (
            f"{OLD_HEADER}\n\na,u,0,fine-tuning,0.5,4,1.5,0.9,0.9,,,,\n",
            r"line 3: column trial: '1.5' is not a whole number",
        ),
        (f"{OLD_HEADER}\na,u,0,fine-tuning,50,4,1,0.9,0.9,,,,\n", r"line 2: density 50 is outside \[1e-15, 1\]"),
        (f"{OLD_HEADER}\na,u,0,fine-tuning,0.5,,1,0.9,0.9,,,,\n", r"line 2: .* no retrain_epochs"),
        (f"{OLD_HEADER}\na,u,0,fine-tuning,0.5,4,1\n", "line 2: not 13 fields"),
        (f"{OLD_HEADER}\na,u,0,fine-tuning,0.5,4,1,0.9,0.9,,,,,,\n", "line 2: not 13 fields"),
    ],
)
def test_a_bad_table_says_what_is_wrong_and_where(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_rows(write(tmp_path / "bad.csv", text))


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no table"):
        read_rows(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="cannot read"):
        read_rows(write(tmp_path / "text.csv.gz", "not gzip"))
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(HEADER.encode())[:-9])
    with pytest.raises(InputError, match="cannot read"):
        read_rows(cut)


def test_the_authors_tables_can_be_read(paper: Path) -> None:
    pruned, dense = (read_rows(paper / f"published-{kind}.csv.gz") for kind in ("pruned", "dense"))
    assert (len(pruned), len(dense)) == (22_590, (4 * 246 + 6 + 180) / 2 + 10), "all but GNMT's stand twice"
    assert not any(row.dense for row in pruned)
    assert all(row.dense and row.test for row in dense)
