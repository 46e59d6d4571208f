"""Our kernels for few channels compute torch's convolutions, and compiled steps take them where they fit.

Without a GPU, Triton's interpreter runs the same kernels. It must be asked for before Triton is imported, so that these
tests run in a process of their own (`few_channels.py`).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from few_channels import compiled, differences, normalised, refused
from rewound.tasks.fleets import convolution_kernels, convolutions
from rewound.tasks.fleets.graphs import faster

SCRIPT = Path(__file__).parents[1] / "support" / "few_channels.py"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kernels", "compiled", "normalised", "refused"])
def test_by_the_interpreter(what: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, SCRIPT, what], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Triton announces what it will change
@pytest.mark.parametrize("channels", [16, 32, 64])
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_kernels_are_machine_code_of_gpus_and_need_little_of_their_memory(channels: int, capability: int) -> None:
    """Compiled without a GPU; the interpreter would run what a GPU's compiler refuses."""
    for kernel, given, numbers, warps in launched(channels):
        signature = {**given, **dict.fromkeys(numbers, "constexpr")}
        aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(given))}  # as torch's tensors are
        source = ASTSource(fn=kernel, signature=signature, constexprs=numbers, attrs=aligned)
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert code.asm["cubin"]
        assert code.metadata.shared <= 99 * 1024, "as much as the smallest of these GPUs gives a program"


def launched(channels: int) -> Iterator[tuple[object, dict[str, str], dict[str, object], int]]:
    """Each kernel for so many channels: its tensors, its numbers, and its warps."""
    image = {"HEIGHT": 32, "WIDTH": 16, "C": channels}
    tensors = {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "moments": "*fp32"}
    convolve, add = (
        {name.upper(): number for name, number in how[channels].items()}
        for how in (convolutions._CONVOLVED, convolutions._SUMMED)
    )
    warps = convolve.pop("WARPS"), add.pop("WARPS")
    rows = "ROWS" in convolve
    kernel = convolution_kernels._convolved_by_rows if rows else convolution_kernels._convolved
    for mirrored in (False, True):
        yield kernel, tensors, {**image, **convolve, "MIRRORED": mirrored, "MOMENTS": not mirrored}, warps[0]
    kernel = convolution_kernels._sums_by_rows if "ROWS" in add else convolution_kernels._sums
    yield kernel, {"x": "*bf16", "above": "*bf16", "sums": "*fp32"}, {**image, **add}, warps[1]


def test_a_cpu_compiles_as_before() -> None:
    assert faster(torch.device("cpu")) == {}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda` there")
@pytest.mark.filterwarnings("ignore")
class TestOnAGPU:
    @pytest.mark.parametrize("channels", [16, 32, 64])
    def test_kernels(self, channels: int) -> None:
        differences(channels, torch.device("cuda"), torch.bfloat16)

    def test_compiled(self) -> None:
        compiled(torch.device("cuda"), torch.bfloat16)

    def test_normalised(self) -> None:
        normalised(torch.device("cuda"), torch.bfloat16)

    def test_refused(self) -> None:
        refused(torch.device("cuda"), torch.bfloat16)
