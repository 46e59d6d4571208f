"""The examples run, each as a user would run it, and do what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rewound

EXAMPLES = Path(__file__).parents[1] / "examples"
LEVELS = {  # what each ends with
    "pytorch_loop": "level 8 of 8: 5.00x (density 0.2)",
    "accelerate_script": "level 5 of 5: 3.00x (density 0.3333)",
    "lightning_module": "level 5 of 5: 3.00x (density 0.3333)",
    "huggingface_bert": "level 4 of 4: 2.00x (density 0.5)",
    "huggingface_gpt2": "level 4 of 4: 2.00x (density 0.5)",
}


def ran(name: str, folder: Path) -> list[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(rewound.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",  # the tests run beside each other
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(LEVELS)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEVELS)
def test_an_example_prunes_its_network(name: str, tmp_path: Path) -> None:
    lines = ran(name, tmp_path)
    assert any(line.startswith("dense, epoch") for line in lines)
    assert any(line.startswith(LEVELS[name]) for line in lines)
    assert any("x smaller: " in line for line in lines)
    for path in tmp_path.glob("*-pruned/model.safetensors"):  # half of what may be pruned, embeddings included
        weights = [weight for weight in load_file(path).values() if weight.ndim > 1]
        left = sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)
        assert left == pytest.approx(0.5, abs=0.01)
    if name == "accelerate_script":  # run again, it loads its last state, which was the end
        assert ran(name, tmp_path)[-1] == lines[-1]
