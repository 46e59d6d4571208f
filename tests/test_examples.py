"""The examples run, each as a user would run it, and do what they say."""

import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rewound
from rewound import Position
from rewound.conclusions.tables import read_rows
from rewound.tasks.recipes import recipe_named

EXAMPLES = Path(__file__).parents[1] / "examples"
LEVELS = {  # what each ends with
    "pytorch_loop": "level 8 of 8: 5.00x (density 0.2)",
    "lstm_translation": "level 3 of 3: 8.00x (density 0.125)",
    "slim_loop": "level 2 of 2: 4.0",  # whole units: not exactly 4
    "accelerate_script": "level 5 of 5: 3.00x (density 0.3333)",
    "lightning_module": "level 5 of 5: 3.00x (density 0.3333)",
    "huggingface_bert": "level 4 of 4: 2.00x (density 0.5)",
    "huggingface_gpt2": "level 4 of 4: 2.00x (density 0.5)",
    "huggingface_translation": "level 2 of 2: 4.00x (density 0.25)",
}
LEARNED = {  # how the pruned network does in the end, at least
    "lstm_translation": (r"8\.00x smaller .*: (\d+\.\d)% of the sentences translated without a mistake", 80),
    "huggingface_translation": (r"4\.00x smaller .*: BLEU (\d+\.\d)", 80),
}


def python(folder: Path, *arguments: str) -> list[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(rewound.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",  # the tests run beside each other
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def ran(name: str, folder: Path) -> list[str]:
    return python(folder, str(EXAMPLES / f"{name}.py"))


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*LEVELS, "own_recipe"}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_an_example_prunes_its_network(name: str, tmp_path: Path) -> None:
    lines = ran(name, tmp_path)
    assert any(line.startswith("dense, epoch") for line in lines)
    assert any(line.startswith(LEVELS[name]) for line in lines)
    assert any(re.search(r"x smaller \(\d\.\d\dx of the whole network\)", line) for line in lines)
    for path in tmp_path.glob("*-pruned/model.safetensors"):  # embeddings included, but not Marian's constant positions
        weights = [w for name, w in load_file(path).items() if w.ndim > 1 and "embed_positions" not in name]
        left = sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)
        assert left == pytest.approx(float(LEVELS[name].partition("density ")[2].rstrip(")")), abs=0.01)
    if name in LEARNED:
        pattern, least = LEARNED[name]
        (reached,) = (float(found[1]) for line in lines if (found := re.fullmatch(pattern, line)))
        assert reached >= least
    if name == "accelerate_script":  # run again, it loads its last state, which was the end
        assert ran(name, tmp_path)[-1] == lines[-1]


# A recipe of one's own


@pytest.mark.slow
def test_the_recipe_prunes_its_network_and_the_sweep_beside_it_runs(tmp_path: Path) -> None:
    lines = ran("own_recipe", tmp_path)
    assert len(lines) == 9
    assert re.fullmatch(r"level 8: 5\.00x, 4\.\d\dx of the whole network, val 0\.9\d+, test 0\.9\d+", lines[8])
    assert rewound.load(tmp_path / "tumours-pruned" / "ticket.safetensors").mask.density == pytest.approx(0.2, abs=1e-3)
    run = ("-m", "rewound", "run", "own_sweep.toml", "--store", str(tmp_path), "--out", str(tmp_path / "report"))
    assert python(EXAMPLES, *run)[-1].startswith("open in a browser: ")
    assert len(read_rows(tmp_path / "report" / "results.csv")) == 3 + 3 * 2 * 2 * 3


def test_the_batches_of_the_recipe_obey_law_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    recipe, cpu = recipe_named("own_recipe:Tumours")(), torch.device("cpu")
    stream = recipe.batches(3, Position(2, 0), cpu)
    from_the_start = list(islice(stream, 20))
    entered = list(islice(recipe.batches(3, Position(2, 11), cpu), 9))
    for one, other in zip(from_the_start[11:], entered, strict=True):
        assert all(map(torch.equal, one, other))
    epoch = torch.cat([x for x, _ in from_the_start[:8]])
    assert len(epoch.unique(dim=0)) == 8 * 32  # nothing twice in an epoch
    for seed, prunings in ((4, 2), (3, 1)):
        other = next(recipe.batches(seed, Position(prunings, 0), cpu))
        assert not torch.equal(other[0], from_the_start[0][0])
