"""Scores, scopes and patterns of a user's own, named `module:function`, and words that name nothing."""

import pytest
import torch
from torch import Tensor

from rewound import InputError, Mask, Pruner
from weights_to_prune import as_lists, pruned


def inverse(weight: Tensor, name: str, seed: int) -> Tensor:
    """The largest weights go first."""
    return 1 / (1 + weight.abs())


def negative(weight: Tensor, name: str, seed: int) -> Tensor:
    return -weight.abs()


def undefined(weight: Tensor, name: str, seed: int) -> Tensor:
    return weight.abs() / 0.0


def nothing(weight: Tensor, name: str, seed: int) -> None:
    return None


def relative(weight: Tensor, name: str, seed: int) -> Tensor:
    """Not a number where the whole tensor is 0."""
    return weight.abs() / weight.abs().mean()


def one_number(weight: Tensor, name: str, seed: int) -> Tensor:
    return weight.abs().sum()


def tiny(weight: Tensor, name: str, seed: int) -> Tensor:
    return weight.abs().double() * 1e-60


def huge(weight: Tensor, name: str, seed: int) -> Tensor:
    return weight.abs().double() * 1e60


def whole(weight: Tensor, name: str, seed: int) -> Tensor:
    """Numbers that differ by 1 beyond what float32 has."""
    return weight.abs().long() + 2**30


def first_and_rest(names: list[str]) -> list[list[str]]:
    return [names[:1], names[1:]]


def leaves_out(names: list[str]) -> list[list[str]]:
    return [names[:1]]


def twice(names: list[str]) -> list[list[str]]:
    return [names, names[:1]]


def invents(names: list[str]) -> list[list[str]]:
    return [[*names, "d"]]


def forgets_to_return(names: list[str]) -> None:
    return None


def not_nested(names: list[str]) -> list[int]:
    return [1, 2]


def rows(scores: Tensor) -> Tensor:
    return scores.sum(dim=1, keepdim=True)


def test_a_score_of_ones_own() -> None:
    mask = Pruner(score="test_pruner_own:inverse").prune({"w": torch.tensor([[3.0, 1.0], [-4.0, 2.0]])}, 0.4)
    assert as_lists(mask) == {"w": [[False, True], [False, True]]}


@pytest.mark.parametrize("score", ["tiny", "huge", "whole"])
@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_a_score_may_be_beyond_float32(score: str, floor: float) -> None:
    pruner = Pruner(score=f"test_pruner_own:{score}", floor=floor)
    mask = pruner.prune({"w": torch.tensor([[3.0, 1.0], [-4.0, 2.0]])}, 0.4)
    assert as_lists(mask) == {"w": [[True, False], [True, False]]}


def test_a_scope_of_ones_own() -> None:
    weights = {"a": torch.ones(2, 2), "b": torch.full((2, 2), 2.0), "c": torch.full((2, 2), 3.0)}
    pruner = Pruner(scope="test_pruner_own:first_and_rest")
    mask = pruned(pruner, weights, 0.5)
    assert [int(mask[name].sum()) for name in "abc"] == [2, 0, 4]
    assert pruner.kept(dict.fromkeys("abc", (2, 2)), 0.5) == mask.kept


@pytest.mark.parametrize(
    ("scope", "says"),
    [
        ("leaves_out", "must put each of a, b, c into exactly one group, but 'b' is in 0"),
        ("twice", "must put each of a, b, c into exactly one group, but 'a' is in 2"),
        ("invents", "must put each of a, b, c into exactly one group, but 'd' is in 1"),
        ("forgets_to_return", "must give lists of names, not None"),
        ("not_nested", r"must give lists of names, not \[1, 2\]"),
    ],
)
def test_a_scope_has_every_name_in_one_group(scope: str, says: str) -> None:
    pruner = Pruner(scope=f"test_pruner_own:{scope}")
    with pytest.raises(InputError, match=f"scope 'test_pruner_own:{scope}' {says}"):
        pruner.prune({name: torch.ones(2, 2) for name in "abc"}, 0.5)
    with pytest.raises(InputError, match=says):  # what a plan asks, before anything is trained
        pruner.kept(dict.fromkeys("abc", (2, 2)), 0.5)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_pattern_of_ones_own_level_by_level(floor: float) -> None:
    weights = {"a": torch.tensor([[1.0, 4.0], [2.0, 1.0], [3.0, 9.0]]), "b": torch.tensor([[5.0, 1.0], [0.0, 2.0]])}
    pruner = Pruner(pattern="test_pruner_own:rows", floor=floor)
    first = pruned(pruner, weights, 0.6)  # of five rows, three
    assert as_lists(first) == {"a": [[True, True], [False, False], [True, True]], "b": [[True, True], [False, False]]}
    second = pruned(pruner, weights, 0.4, first)
    assert as_lists(second) == {"a": [[False, False], [False, False], [True, True]], "b": first["b"].tolist()}
    with pytest.raises(InputError, match=r"density 0\.6 keeps 3 weights, but only 2 are left"):
        pruner.prune(weights, 0.6, second)


def test_a_pattern_revives_no_weight_that_another_pruned() -> None:
    weights = {"w": torch.tensor([[3.0, 1.0], [4.0, 2.0], [0.0, 1.0]])}
    single = pruned(Pruner(), weights, 0.5)
    assert as_lists(single) == {"w": [[True, False], [True, True], [False, False]]}
    both = pruned(Pruner(pattern="test_pruner_own:rows"), weights, 0.6, single)
    assert as_lists(both) == as_lists(single)


@pytest.mark.parametrize("score", ["negative", "one_number", "undefined", "nothing"])
def test_a_score_gives_one_non_negative_number_per_weight(score: str) -> None:
    with pytest.raises(
        InputError, match=f"score 'test_pruner_own:{score}' must give one number per weight of w, none below 0"
    ):
        Pruner(score=f"test_pruner_own:{score}").prune({"w": torch.ones(2, 2)}, 0.5)


def test_a_score_is_blamed_neither_for_a_network_that_diverged_nor_for_what_is_pruned() -> None:
    pruner = Pruner(score="test_pruner_own:relative", scope="layer")
    with pytest.raises(InputError, match="the network has diverged"):
        pruner.prune({"w": torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])}, 0.5)
    weights = {"gone": torch.zeros(2, 2), "left": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    gone = Mask({"gone": torch.zeros(2, 2, dtype=torch.bool), "left": torch.ones(2, 2, dtype=torch.bool)})
    both = pruned(Pruner(score="test_pruner_own:relative"), weights, 0.4, gone)
    assert as_lists(both)["left"] == [[False, True], [True, True]]


@pytest.mark.parametrize("field", ["score", "scope", "pattern"])
def test_unknown_words_are_errors(field: str) -> None:
    with pytest.raises(InputError, match=f"unknown {field} 'magnitud'"):
        Pruner(**{field: "magnitud"})
    with pytest.raises(InputError, match=rf"{field} 'math:pi' must be a Python function \(.*\), not a float"):
        Pruner(**{field: "math:pi"})


CALLED: list[object] = []


def called(*given: object) -> None:
    CALLED.append(given)


def removes(path: str, ignore_errors: bool = False, onerror: object = None) -> None:
    CALLED.append(path)


def other_order(name: str, weight: Tensor, seed: int) -> Tensor:
    return weight


def unused(weight: Tensor, _name: str, _seed: int) -> Tensor:
    return weight.abs()


class Callable:
    def __init__(self, names: object) -> None:
        CALLED.append(names)


@pytest.mark.parametrize("field", ["score", "scope", "pattern"])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("os:system", "not a builtin_function_or_method"),
        ("test_pruner_own:called", r"but its parameters are \(given\); rename them if it is a"),
        ("test_pruner_own:removes", r"but its parameters are \(path, ignore_errors, onerror\)"),
        ("test_pruner_own:other_order", r"but its parameters are \(name, weight, seed\)"),
        ("test_pruner_own:Callable", "not a type"),
        ("shutil:rmtree", r"but its parameters are \(path, ignore_errors"),
    ],
)
def test_what_is_of_another_kind_is_refused_before_it_is_called(field: str, path: str, says: str) -> None:
    with pytest.raises(InputError, match=f"^{field} '{path}' must be a Python function .*{says}"):
        Pruner(**{field: path})
    assert CALLED == []


def test_parameters_may_be_marked_as_unused() -> None:
    assert Pruner(score="test_pruner_own:unused").score == "test_pruner_own:unused"
