"""How a name becomes a thing: the table, the import path, and the sentence for neither."""

import functools
import importlib
import linecache
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rewound import InputError
from rewound.foundations.names import imported, lookup, path_of, source_digest, unknown
from rewound.tasks.recipes import RECIPES, recipe_named
from rewound.tasks.recipes.digits import Digits

TABLE = {"fine-tuning": 1, "lr-rewinding": 2, "weight-rewinding": 3}


class NoneTheLess:
    """Importable, in spite of its name."""

    class Inner:
        """Found by its qualified name."""


def test_the_table_comes_first() -> None:
    assert lookup("technique", "lr-rewinding", TABLE) == 2
    assert lookup("thing", "math:pi", {"math:pi": 3}) == 3


def test_then_the_import_path() -> None:
    assert lookup("thing", "math:pi", TABLE) == pytest.approx(3.14159265)
    assert lookup("thing", "test_names:NoneTheLess.Inner", TABLE) is NoneTheLess.Inner


def test_an_imported_thing_may_have_to_be_of_a_kind() -> None:
    assert lookup("thing", "math:pi", TABLE, float) == pytest.approx(3.14159265)
    with pytest.raises(InputError, match=r"^thing 'math:pi' is a float, not a str; name one that is$"):
        lookup("thing", "math:pi", TABLE, str)


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(InputError) as error:
        lookup("technique", "weight-rewind", TABLE)
    assert str(error.value) == (
        "unknown technique 'weight-rewind'; did you mean 'weight-rewinding' or 'lr-rewinding'? "
        "(known: fine-tuning, lr-rewinding, weight-rewinding)"
    )


def test_a_name_like_no_other_is_told_with_all_of_them() -> None:
    assert unknown("technique", "zzz", TABLE) == (
        "unknown technique 'zzz' (known: fine-tuning, lr-rewinding, weight-rewinding)"
    )


@pytest.mark.parametrize("name", [None, 3, ["lr-rewinding"]])
def test_what_is_no_name_is_told_with_the_names(name: object) -> None:
    with pytest.raises(InputError) as error:
        lookup("technique", name, TABLE)  # type: ignore[arg-type]
    assert str(error.value) == (
        f"a technique is given by its name, not as {name!r} (known: fine-tuning, lr-rewinding, weight-rewinding)"
    )


@pytest.mark.parametrize(
    "name",
    ["no_such_module:x", "math:no_such_name", "math:", ":pi", ":", ".relative:x", "math:pi.no_such", "os.nope:x"],
)
def test_what_cannot_be_imported_is_one_sentence(name: str) -> None:
    with pytest.raises(InputError, match=f"^cannot import score '{name}': .+") as error:
        imported("score", name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "name", "remedy"),
    [
        ("import no_such_package", "x", "install no_such_package, which own_module imports$"),
        ("def x(:", "x", r"own_module.py, line 1\); correct that line$"),
        ("raise SystemExit(3)", "x", "own_module ends the process when it is imported; put what it does under if"),
        ("relative = 1", "relativ", "has no attribute 'relativ'; did you mean relative[?]$"),
        ("relative = 1", "", "with a name that is in the module$"),
    ],
)
def test_an_import_that_fails_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, remedy: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    (tmp_path / "own_module.py").write_text(f"{text}\n")
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=remedy) as error:
        imported("score", f"own_module:{name}")
    assert "\n" not in str(error.value)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)


def test_a_module_that_is_not_there_is_started_for_elsewhere_or_installed() -> None:
    with pytest.raises(InputError, match=r"No module named 'nowhere'; start in the folder that has it, or install it$"):
        imported("recipe", "nowhere.tasks:Task")


@pytest.mark.parametrize("thing", [NoneTheLess, NoneTheLess.Inner, path_of, Digits])
def test_a_path_leads_back(thing: object) -> None:
    assert imported("thing", path_of(thing)) is thing


def local_class() -> type:
    class Local:
        pass

    return Local


@pytest.mark.parametrize("thing", [lambda: 0, local_class(), functools.partial(path_of), 3, None])
def test_what_has_no_importable_name_is_told_so(thing: object) -> None:
    with pytest.raises(InputError, match="has no importable name; define it at the top level of a module"):
        path_of(thing)


def test_a_digest_is_of_the_source_that_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_while_it_runs.py"
    file.write_text("x = 1\n")
    loaded = source_digest("edited_while_it_runs:x")
    file.write_text("x = 1 + 1\n")
    assert source_digest("edited_while_it_runs") == loaded, "this process runs what was there before"
    module = importlib.reload(sys.modules["edited_while_it_runs"])
    assert module.x == 2
    assert source_digest("edited_while_it_runs") != loaded


def test_what_is_typed_into_a_notebook_has_a_digest_of_its_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = ModuleType("notebook_of_mine")  # a module without a file, as a notebook's `__main__` is
    monkeypatch.setitem(sys.modules, "notebook_of_mine", notebook)

    def digest(cell: str, path: str) -> str:
        monkeypatch.setitem(linecache.cache, "<cell>", (len(cell), None, cell.splitlines(keepends=True), "<cell>"))
        exec(compile(cell, "<cell>", "exec"), vars(notebook))
        return source_digest(f"notebook_of_mine:{path}")

    task = "class Task:\n    def loss(self):\n        return 1\n"
    assert digest(task, "Task") == digest(task, "Task") != ""
    assert digest(task, "Task") != digest(task.replace("1", "2"), "Task")
    assert digest("def score(x):\n    return x\n", "score") != digest("def score(x):\n    return -x\n", "score")
    assert digest("x = 1\n", "x") == ""


# Recipes are named in the same way


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_is_found_under_the_name_it_shows(name: str) -> None:
    assert recipe_named(name).label() == name


def test_a_recipe_by_its_import_path() -> None:
    assert recipe_named("rewound.tasks.recipes.digits:Digits") is Digits


def test_an_unknown_recipe() -> None:
    with pytest.raises(InputError, match=r"unknown recipe 'digit'; did you mean 'digits'\? .* or package.module:Class"):
        recipe_named("digit")


@pytest.mark.parametrize("name", ["math:pi", "test_names:NoneTheLess"])
def test_what_is_not_a_recipe(name: str) -> None:
    with pytest.raises(InputError, match=f"recipe '{name}' is not a subclass of rewound.Recipe"):
        recipe_named(name)
