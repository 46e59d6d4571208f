"""Where Triton cannot be installed (macOS), what imports it is not collected."""

from importlib.util import find_spec

collect_ignore = (
    []
    if find_spec("triton")
    else ["src/rewound/tasks/fleets/convolution_kernels.py", "tests/tasks/test_convolutions.py"]
)
