"""Bounds on numbers hold on other CPUs: the tests marked `numeric`, run again with other kernels and threads.

ATen's plain kernels, oneDNN's and MKL's for old processors, and two threads add up in another order than the kernels
that this machine takes by itself. A bound that holds under both is not proven, but one that holds here by luck fails.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OTHER = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "OMP_NUM_THREADS": "2",
    "OMP_WAIT_POLICY": "PASSIVE",  # beside other tests, threads that wait actively take four times as long
}


@pytest.mark.slow
def test_bounds_hold_with_the_kernels_of_another_cpu() -> None:
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "@pytest.mark.numeric" in path.read_text()]
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}
    environment = {**mine, **OTHER, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "pytest", "-q", "-m", "numeric and not cuda", "-p", "no:cov", *map(str, files)]
    assert len(files) > 5
    ran = subprocess.run(words, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    asked = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    assert subprocess.check_output(asked, env=environment, text=True).strip() in ("DEFAULT", "NO AVX")
