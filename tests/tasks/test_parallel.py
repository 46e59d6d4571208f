"""One network trained by two processes: what one process trains with the whole batch, and what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rewound
from parallel_training import SAME, outcome
from small_fleets import ROUNDING

SUPPORT = Path(__file__).parents[1] / "support"
PATHS = os.pathsep.join([str(Path(rewound.__file__).parents[1]), str(SUPPORT)])
pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without distributed"),
    pytest.mark.usefixtures("one_thread", "float64"),
]
Outcomes = dict[str, dict[str, Tensor] | str]


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    """What each of two processes gets, by case."""
    return by_processes(2, tmp_path_factory.mktemp("two"))


def by_processes(count: int, folder: Path, device: str = "cpu") -> list[Outcomes]:
    program = [sys.executable, str(SUPPORT / "parallel_training.py")]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*program, str(rank), str(count), str(folder), device], env=environment)
        for rank in range(count)
    ]
    assert [process.wait(timeout=240) for process in started] == [0] * count
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)]


def tensors(outcome: dict[str, Tensor] | str) -> dict[str, Tensor]:
    assert not isinstance(outcome, str), outcome
    return outcome


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.parametrize("case", SAME)
def test_two_processes_train_what_one_does_with_the_whole_batch(case: str, by_two: list[Outcomes]) -> None:
    check_same(case, by_two)


@pytest.fixture(scope="module")
def by_four(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    return by_processes(4, tmp_path_factory.mktemp("four"))


@pytest.mark.slow
def test_a_group_of_images_spans_two_of_four_processes(by_four: list[Outcomes]) -> None:
    check_same("a group for each process", by_four)  # of two; here each has half of one


@pytest.mark.slow
def test_four_processes_train_the_same_in_one_piece_and_in_two(by_four: list[Outcomes]) -> None:
    """Law 1. Sums of four numbers, other than of two, depend on the order in which they are added."""
    whole, halves = (tensors(by_four[0][case]) for case in ("in one piece", "in halves"))
    assert [
        name for name, tensor in halves.items() if "loss" not in name and not torch.equal(tensor, whole[name])
    ] == []


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda tests/tasks/test_parallel.py` there"
)
def test_gpus_train_what_a_cpu_does(tmp_path: Path) -> None:
    found = by_processes(min(2, torch.cuda.device_count()), tmp_path, "cuda")  # by NCCL, also where there is one GPU
    for case in SAME:
        check_same(case, found)


def check_same(case: str, found: list[Outcomes]) -> None:
    expected = tensors(outcome(case))
    for name, tensor in tensors(found[0][case]).items():
        assert float((tensor - expected[name]).abs().max()) < ROUNDING, name
        assert all(torch.equal(tensor, tensors(other[case])[name]) for other in found), name
    assert tensors(found[0][case]).keys() == expected.keys()


@pytest.mark.slow
def test_a_run_that_rank_0_leaves_ends_in_all_processes_and_the_next_begins(by_two: list[Outcomes]) -> None:
    first, second = (tensors(found["abandoned"]) for found in by_two)
    assert (int(first["seen"]), int(second["seen"])) == (2, 102), "both look where rank 0 does"
    assert torch.equal(first["dense.weight"], tensors(by_two[0]["nesterov"])["dense.weight"])


@pytest.mark.slow
def test_the_longest_wait_for_data_is_told_by_all_processes(by_two: list[Outcomes]) -> None:
    """A process that waits for its data lets the others wait for it, and only rank 0 is asked."""
    assert [tensors(found["waiting for data"])["waited"].tolist() for found in by_two] == [[2.0, 2.0]] * 2
    assert tensors(outcome("waiting for data"))["waited"].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_slices_draw_their_own_dropout_as_functions_of_seed_position_and_rank(by_two: list[Outcomes]) -> None:
    whole, halves = tensors(by_two[0]["dropout"]), tensors(by_two[0]["dropout in halves"])
    assert all(torch.equal(whole[name], tensor) for name, tensor in halves.items() if "loss" not in name)
    alone = tensors(outcome("dropout"))
    assert not torch.allclose(alone["0.dense.weight"], whole["0.dense.weight"], atol=1e-6), "one mask for both slices"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "groups across processes",
            "2 processes with 12 images of a batch each do not fit groups of 8, by which layer 1 norm",
        ),
        ("odd batch", "2 processes cannot share batches of 25 equally"),
        ("indivisible", "declare divisible = True if it is"),
        ("other data", "process 1 holds another tensor 1 of the first batch than process 0"),
        ("other data later", "process 1 has data file 1, and process 0 has file 0; prepare the same data"),
        ("other state", "process 1 holds another .*weight than process 0; give all processes the same state"),
        ("own buffers", "process 1 holds another 0.seen than process 0"),
        ("diverged on rank 1", "the loss became (nan|inf)"),
    ],
)
def test_what_two_processes_cannot_do_is_an_error_in_both(case: str, words: str, by_two: list[Outcomes]) -> None:
    for found in by_two:
        text = found[case]
        assert isinstance(text, str), case
        assert re.search(words, text), text
