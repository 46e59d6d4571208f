"""Imports point downwards, names say what things are, and every module has its place."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from inspect import isfunction
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import rewound

SOURCE = Path(rewound.__file__).parent

# A folder may import from its own layer and from those below. What lies beside the folders is layer 4.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("foundations", "method"),  # usable alone, with anybody's training loop
    ("tasks",),  # what is trained; Train^t(W, m, g), alone and in fleets
    ("states", "loops"),  # what a state is, and where it lives; the algorithm around somebody's own loop
    ("experiments", "conclusions"),  # from a declared experiment to tables, and from tables to conclusions
    ("reports", "integrations", "commands", "cli", "public", "__main__", "__init__"),  # who calls it, how it is shown
)
BELOW = {"torch", "numpy", *sys.stdlib_module_names}  # all that layer 0 may need


def modules() -> dict[str, Path]:
    """Every module by its dotted name below `rewound`; `__init__` is the package itself."""
    out = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return out


MODULES = modules()


def layer(module: str) -> int | None:
    return next((number for number, names in enumerate(LAYERS) if module.split(".")[0] in names), None)


def imports(module: str) -> Iterator[str]:
    """The dotted names a module imports, wherever in the file: an import inside a function points somewhere, too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; name the module in full"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(module: str) -> set[str]:
    """The modules of the package that a module imports."""
    found = set()
    for name in imports(module):
        if name == "rewound":
            found.add("__init__")
        elif name.startswith("rewound.") and (inner := name.removeprefix("rewound.")) in MODULES:
            found.add(inner)
    if "__init__" in found and not _names_of_the_package(module):
        found.discard("__init__")  # `from rewound import flops` imports a module, not what the package exports
    return found - {module}


def _names_of_the_package(module: str) -> bool:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import) and any(alias.name == "rewound" for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "rewound":
            return any(alias.name not in (*MODULES, "__version__") for alias in node.names)
    return False


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_its_place(module: str) -> None:
    assert layer(module) is not None, f"{module} is new: give it a layer in tests/test_layers.py and ARCHITECTURE.md"


def test_every_place_has_its_module() -> None:
    assert {name for names in LAYERS for name in names} == {module.split(".")[0] for module in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    mine = layer(module)
    upwards = [name for name in ours(module) if (layer(name) or 0) > (mine or 0)]
    assert not upwards, f"{module} (layer {mine}) imports {upwards} from above"


def test_there_are_no_cycles() -> None:
    """Neither among modules, nor among the folders at the top, nor among what lies beside each other in a folder."""
    modules = {module: ours(module) for module in MODULES}
    graphs: dict[str, dict[str, set[str]]] = {"": modules}
    for module, imported in modules.items():
        for name in imported:
            for depth, (one, other) in enumerate(zip(module.split("."), name.split("."), strict=False)):
                if one != other:  # two that lie beside each other in one folder
                    folder = ".".join(["rewound", *module.split(".")[:depth]])
                    graphs.setdefault(folder, {}).setdefault(one, set()).add(other)
                    break
    assert len(graphs) > 5
    for graph in graphs.values():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"they import each other in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("module", [module for module in MODULES if layer(module) == 0])
def test_layer_0_needs_only_torch_and_numpy(module: str) -> None:
    foreign = {name.split(".")[0] for name in imports(module)} - BELOW - {"rewound"}
    assert not foreign


def test_no_module_shares_its_name_with_a_public_function() -> None:
    names = {part for module in MODULES for part in module.split(".")}
    assert names.isdisjoint(rewound.__all__)
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        exported = {
            constant.value
            for node in tree.body
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
            for constant in ast.walk(node.value)
            if isinstance(constant, ast.Constant)
        }
        assert names.isdisjoint(exported), f"{module} exports the name of a module"


def test_all_that_is_exported_is_there_once() -> None:
    assert all(hasattr(rewound, name) for name in rewound.__all__)
    assert len(set(rewound.__all__)) == len(rewound.__all__)
    assert set(rewound.__all__) < set(dir(rewound))
    with pytest.raises(AttributeError, match="module 'rewound' has no attribute 'pruned'"):
        _ = rewound.pruned


def test_what_public_functions_give_can_be_named_by_who_gets_it() -> None:
    functions = [each for name in rewound.__all__ if isfunction(each := getattr(rewound, name))]
    given = [get_type_hints(function)["return"] for function in functions]
    given += [*get_type_hints(rewound.PrunedNetwork).values(), get_type_hints(rewound.train)["lr"]]
    found = {kind for hint in given for kind in classes(hint) if kind.__module__.startswith("rewound.")}
    assert {rewound.PrunedNetwork, rewound.LevelReport, rewound.Profile, rewound.Segment} < found
    assert [kind for kind in found if getattr(rewound, kind.__name__, None) is not kind] == []


def classes(hint: object) -> Iterator[type]:
    """All that a type hint names."""
    if isinstance(hint, type):
        yield hint
    for part in get_args(hint):
        yield from classes(part)


def test_public_names_are_imported_when_they_are_asked_for() -> None:
    script = (
        "import sys, rewound\n"
        "from rewound.conclusions import tables\n"
        "assert not hasattr(rewound, '__wrapped__')\n"  # as tools that look into modules ask
        "assert 'torch' not in sys.modules\n"
        "import random\n"
        "before = random.getstate()\n"
        "from rewound import *\n"
        "assert random.getstate() == before\n"  # what a script draws does not depend on when it asks
        "assert (Mask, rewound.epochs) == (rewound.method.pruning.mask.Mask, epochs)\n"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(SOURCE.parent)}, check=True)


@pytest.mark.parametrize("module", MODULES)
def test_names_say_what_things_are(module: str) -> None:
    assert {"utils", "util", "core", "base", "helpers", "helper", "common", "misc"}.isdisjoint(module.split("."))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[module].read_text())), f"{module} has no docstring"
