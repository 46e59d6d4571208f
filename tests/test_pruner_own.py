"""Scores and scopes of a user's own, named `module:function`, and words that name nothing."""

import pytest
import torch
from torch import Tensor

from rewound import InputError, Pruner
from weights_to_prune import as_lists, pruned


def inverse(weight: Tensor, name: str, seed: int) -> Tensor:
    """The largest weights go first."""
    return 1 / (1 + weight.abs())


def negative(weight: Tensor, name: str, seed: int) -> Tensor:
    return -weight.abs()


def one_number(weight: Tensor, name: str, seed: int) -> Tensor:
    return weight.abs().sum()


def first_and_rest(names: list[str]) -> list[list[str]]:
    return [names[:1], names[1:]]


def test_a_score_of_ones_own() -> None:
    mask = Pruner(score="test_pruner_own:inverse").prune({"w": torch.tensor([[3.0, 1.0], [-4.0, 2.0]])}, 0.4)
    assert as_lists(mask) == {"w": [[False, True], [False, True]]}


def test_a_scope_of_ones_own() -> None:
    weights = {"a": torch.ones(2, 2), "b": torch.full((2, 2), 2.0), "c": torch.full((2, 2), 3.0)}
    pruner = Pruner(scope="test_pruner_own:first_and_rest")
    mask = pruned(pruner, weights, 0.5)
    assert [int(mask[name].sum()) for name in "abc"] == [2, 0, 4]
    assert pruner.kept(dict.fromkeys("abc", (2, 2)), 0.5) == mask.kept


@pytest.mark.parametrize("score", ["negative", "one_number"])
def test_a_score_gives_one_non_negative_number_per_weight(score: str) -> None:
    with pytest.raises(
        InputError, match=f"score 'test_pruner_own:{score}' must give one number per weight of w, none below 0"
    ):
        Pruner(score=f"test_pruner_own:{score}").prune({"w": torch.ones(2, 2)}, 0.5)


@pytest.mark.parametrize("field", ["score", "scope", "pattern"])
def test_unknown_words_are_errors(field: str) -> None:
    with pytest.raises(InputError, match=f"unknown {field} 'magnitud'"):
        Pruner(**{field: "magnitud"})
    with pytest.raises(InputError, match=f"{field} 'math:pi' is a float, not a function"):
        Pruner(**{field: "math:pi"})
