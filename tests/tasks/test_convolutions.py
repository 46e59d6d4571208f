"""Our kernels for few channels compute torch's convolutions, and compiled steps take them where they fit.

Without a GPU, Triton's interpreter runs the same kernels. It must be asked for before Triton is imported, so that these
tests run in a process of their own (`few_channels.py`).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from few_channels import compiled, differences
from rewound.tasks.fleets.convolutions import few_channels

SCRIPT = Path(__file__).parents[1] / "support" / "few_channels.py"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kernels", "compiled"])
def test_by_the_interpreter(what: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, SCRIPT, what], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cpu_compiles_as_before() -> None:
    assert few_channels(torch.device("cpu")) == {}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda` there")
@pytest.mark.filterwarnings("ignore")
class TestOnAGPU:
    @pytest.mark.parametrize("channels", [16, 32, 64])
    def test_kernels(self, channels: int) -> None:
        differences(channels, torch.device("cuda"), torch.bfloat16)

    def test_compiled(self) -> None:
        compiled(torch.device("cuda"), torch.bfloat16)
