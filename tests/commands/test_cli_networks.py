"""`prune` and `inspect`: a pruned network in files, the same as by call, and what a ticket says of itself."""

import csv
import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import rewound
from command_line import Rewound, command, environment
from rewound.commands.console import console
from rewound.method.pruning.counts import counts_of
from rewound.method.pruning.cutting import kept_count
from rewound.method.pruning.mask import Mask
from rewound.tasks.recipes.digits import Digits
from sameness import assert_same
from tiny import POISON, Tiny, Watched

# Prune


def test_prune_writes_the_network(rewound_command: Rewound) -> None:
    code, out, err = rewound_command("prune", "tiny:Tiny", "--compression", 3, "--rate", 0.5, "--out", "pruned")
    assert (code, err) == (0, "")
    assert "3.00x" in out
    assert {path.name for path in Path("pruned").iterdir()} == {
        *("model.safetensors", "mask.safetensors", "ticket.safetensors"),
        *("summary.json", "levels"),
    }
    weights = load_file("pruned/model.safetensors")
    model = Tiny().model(0)
    model.load_state_dict(weights)  # the model's own keys, nothing else
    packed = load_file("pruned/mask.safetensors")
    with safe_open("pruned/mask.safetensors", framework="pt") as file:
        shapes = {name: tuple(shape) for name, shape in json.loads(file.metadata()["shapes"]).items()}
    mask = Mask.unpacked(packed, shapes)
    assert sum(tensor.numel() for tensor in packed.values()) < mask.total / 7, "bit-packed"
    assert mask.density == pytest.approx(1 / 3, abs=2 / mask.total)
    for name, kept in mask.items():
        assert weights[name][~kept].count_nonzero() == 0
    again = mask.packed()
    assert_same(again, packed)
    summary = json.loads(Path("pruned/summary.json").read_text())
    assert summary["chosen"] == 2
    assert [round(level["compression"], 9) for level in summary["levels"]] == [1, 2, 3]
    assert [level["search_epochs"] for level in summary["levels"]] == [0, 2, 4]
    ticket = rewound.load("pruned/ticket.safetensors")
    assert ticket.about == {
        "recipe": "tiny:Tiny",
        "technique": "lr-rewinding",
        "retrain_epochs": 2.0,
        "lineage": summary["levels"][2]["key"],
    }
    assert_same(ticket.state, weights)
    assert_same(ticket.mask, mask)
    scores = Tiny().evaluate(model.eval())
    assert (scores.val, scores.test) == (summary["levels"][2]["val"], summary["levels"][2]["test"])


def test_prune_by_call_and_by_command_give_the_same_numbers(rewound_command: Rewound) -> None:
    options = {"compression": 2.0, "technique": "weight-rewinding", "retrain_epochs": 1.0, "rate": 0.5, "seed": 3}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert rewound_command("prune", "tiny:Tiny", *words, "--out", "command").code == 0
    network = rewound.prune("tiny:Tiny", store="other", **options)  # type: ignore[arg-type]
    network.save("call")
    Path("file").write_text("precious")
    for folder, reason in (("file", "file is not a folder"), ("file/x", ".*/file is not a folder"), ("/proc/x", ".*")):
        with pytest.raises(rewound.InputError, match=rf"^cannot write into {folder}: {reason}.*; choose another"):
            network.save(folder)
    assert Path("file").read_text() == "precious"
    command, call = (json.loads(Path(place, "summary.json").read_text()) for place in ("command", "call"))
    assert command == call
    for name in ("model.safetensors", "mask.safetensors", "ticket.safetensors"):
        assert Path("command", name).read_bytes() == Path("call", name).read_bytes()
    by_default = rewound.prune(Tiny(), one_shot=True, compression=2, store="other")
    assert rewound_command("prune", "tiny:Tiny", "--one-shot", "--compression", 2, "--out", "default").code == 0
    summary = json.loads(Path("default/summary.json").read_text())
    assert summary["levels"] == [vars(level) for level in by_default.levels], "the defaults are the same, too"


def test_prune_a_recipe_with_other_fields(rewound_command: Rewound) -> None:
    words = ("--field", "widths=[4, 6]", "--field", "batch_size=64", "--field", "nesterov=false")
    options = ("--one-shot", "--compression", 2, "--out", "pruned")
    assert rewound_command("prune", "tiny:Tiny", *words, *options).code == 0
    task = Tiny(widths=(4, 6), batch_size=64, nesterov=False)
    network = rewound.prune(task, one_shot=True, compression=2, store="other")
    summary = json.loads(Path("pruned/summary.json").read_text())
    assert summary["levels"] == [vars(level) for level in network.levels]
    counts = counts_of(network.model, network.mask)
    assert summary["network_compression"] == counts.network_compression < summary["compression"]
    about = rewound.load("pruned/ticket.safetensors").about
    assert (about["recipe"], about["fields"]) == ("tiny:Tiny", summary["fields"])
    assert Tiny.with_fields(summary["fields"]) == task
    file = "pruned/ticket.safetensors"
    code, out, err = rewound_command("inspect", file, "--recipe", "tiny:Tiny", "--field", "widths=[4,6]")
    assert (code, err) == (0, "")
    assert rows(out)["network"][3] == f"{task.profile.total(network.mask):,}"
    assert rewound_command("inspect", file, "--recipe", "tiny:Tiny").code == 2, "another network"


def test_a_compression_of_some_weights_says_of_how_many(rewound_command: Rewound) -> None:
    name, *_ = names = list(Tiny().shapes)
    sizes = {name: math.prod(shape) for name, shape in Tiny().shapes.items()}
    said = (
        f"2.00x of the pruned weights (the {sum(sizes.values()) - sizes[name]:,} selected of {sum(sizes.values()):,}), "
    )
    assert len(names) > 1
    assert said in rewound_command("prune", "tiny:Tiny", "--one-shot", "--compression", 2, "--skip", name).out
    network, total = sum(p.numel() for p in Tiny().skeleton.parameters()), sum(sizes.values())
    ratio = network / (network - total + kept_count(total, 0.5))
    whole = f"2.00x of the pruned weights, {ratio:.2f}x of the whole network\ntest"
    assert whole in rewound_command("prune", "tiny:Tiny", "--one-shot", "--compression", 2).out


def test_a_compression_of_whole_units_counts_the_weights_of_the_large_network(rewound_command: Rewound) -> None:
    """All prunable weights are selected, so that nothing is said of how many, though the slim network has fewer."""
    out = rewound_command("prune", "tiny:Tiny", "--one-shot", "--compression", 2, "--pattern", "unit", "--slim").out
    assert "x of the pruned weights, " in out
    assert "selected of" not in out


@pytest.mark.parametrize("skip", [(), ("--skip", "dense.weight")])
@pytest.mark.parametrize("pattern", ["unit", "weight"])
def test_a_run_states_one_compression_everywhere(rewound_command: Rewound, pattern: str, skip: tuple[str, ...]) -> None:
    """The lines, the summary, the table of levels and the tickets count the same weights, of the dense network, too."""
    out = rewound_command("prune", "tiny:Tiny", "--compression", 2, "--pattern", pattern, *skip, "--out", "pruned").out
    levels = json.loads(Path("pruned/summary.json").read_text())["levels"]
    with Path("pruned/levels/levels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    shapes = Tiny().shapes
    selected = sum(math.prod(shape) for name, shape in shapes.items() if name not in skip)
    assert {int(row["weights"]) for row in rows} == {selected}
    for level, row in zip(levels, rows, strict=True):
        assert float(row["compression"]) == pytest.approx(level["compression"])
        assert f"level {level['level']}: {float(row['compression']):.2f}x, " in out
        assert float(row["network_compression"]) == pytest.approx(level["network_compression"])
    last = f"{levels[-1]['compression']:.2f}x of the pruned weights"
    assert last in out
    network = f"{last}, {levels[-1]['network_compression']:.2f}x of the whole network"
    assert network in rewound_command("inspect", "pruned").out
    assert last in rewound_command("inspect", f"pruned/levels/{rows[-1]['ticket']}").out


def test_prune_leaves_a_tenth_of_the_training_in_place_when_it_rewinds_weights(tmp_path: Path) -> None:
    network = rewound.prune(Tiny(), technique="weight-rewinding", one_shot=True, compression=2, store=tmp_path)
    assert network.settings["retrain_epochs"] == 0.9 * Tiny().training_epochs


def test_prune_tells_its_levels_and_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[float, float]] = []
    options = {"one_shot": True, "compression": 2, "store": tmp_path}
    network = rewound.prune(Tiny(), **options, progress=lambda *told: seen.append(told))  # type: ignore[arg-type]
    assert re.fullmatch(
        r"level 0: 1\.00x, 1\.00x of the whole network, val .*\nlevel 1: 2\.00x, .*, val .*\n", capsys.readouterr().out
    )
    assert {total for _, total in seen} == {2 * Tiny().schedule.steps}
    assert seen == sorted(seen)
    assert seen[-1][0] == 2 * Tiny().schedule.steps
    whole = f"{counts_of(network.model, network.mask).network_compression:.2f}x of the whole network"
    assert repr(network) == f"PrunedNetwork(2.00x, {whole}, level 1 of 1, test {network.levels[1].test:.4g})"
    rewound.prune(Tiny(), **options, say=lambda line: None)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_prune_stops_within_the_drop(rewound_command: Rewound) -> None:
    code, out, err = rewound_command(
        *("prune", "tiny:Tiny", "--compression", 1000, "--rate", 0.7, "--max-drop", 0.0, "--out", "pruned")
    )
    assert (code, err) == (0, "")
    summary = json.loads(Path("pruned/summary.json").read_text())
    val = [level["val"] for level in summary["levels"]]
    chosen = summary["chosen"]
    assert chosen == len(val) - 3, "the level before the two that fell too far"
    assert val[chosen] >= val[0] > max(val[chosen + 1 :])
    assert "returned" in out
    assert summary["compression"] == summary["levels"][chosen]["compression"] < 1000
    weights = load_file("pruned/model.safetensors")
    model = Tiny().model(0)
    model.load_state_dict(weights)
    assert Tiny().evaluate(model.eval()).val == val[chosen]


def level_rows(folder: str) -> list[dict[str, str]]:
    with Path(folder, "levels", "levels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_prune_returns_the_last_level_whose_loss_is_no_higher(rewound_command: Rewound) -> None:
    words = ("--compression", 4, "--rate", 0.5, "--retrain-epochs", 2, "--max-drop", 0, "--out", "pruned")
    code, _, err = rewound_command("prune", "tiny:Surprised", *words)
    assert (code, err) == (0, "")
    summary = json.loads(Path("pruned/summary.json").read_text())
    losses = [level["val"] for level in summary["levels"]]
    kept = max(number for number, loss in enumerate(losses) if loss <= losses[0])
    assert (summary["chosen"], summary["metric"], summary["direction"]) == (kept, "cross-entropy", "lower")
    assert losses[1] < losses[0], "nothing to see if no level were better than the dense network"


def test_prune_keeps_every_level_to_choose_from(rewound_command: Rewound) -> None:
    code, _, err = rewound_command("prune", "tiny:Tiny", "--compression", 3, "--rate", 0.5, "--out", "pruned")
    assert (code, err) == (0, "")
    summary, rows = json.loads(Path("pruned/summary.json").read_text()), level_rows("pruned")
    assert [row["ticket"] for row in rows] == ["1.00x.safetensors", "2.00x.safetensors", "3.00x.safetensors"]
    for row, level in zip(rows, summary["levels"], strict=True):
        ticket = rewound.load(f"pruned/levels/{row['ticket']}")
        model = Tiny().model(0)
        ticket.into(model)
        assert Tiny().evaluate(model.eval()).val == level["val"] == pytest.approx(float(row["value"]))
        assert row["metric"] == "accuracy (validation)"
        assert (int(row["flops"]), int(row["level"])) == (level["flops"], level["level"])
        assert int(row["weights_kept"]) == ticket.mask.kept
        assert row["returned"] == str(int(level["level"] == summary["chosen"]))
        assert ticket.about["lineage"] == level["key"]
        assert ticket.about["recipe"] == "tiny:Tiny"
    returned, ticket = rewound.load("pruned/ticket.safetensors"), rewound.load("pruned/levels/3.00x.safetensors")
    assert returned.hash == ticket.hash


def test_prune_to_a_smaller_compression_needs_no_training(rewound_command: Rewound) -> None:
    words = ("prune", "tiny:Tiny", "--rate", 0.5, "--compression")
    assert rewound_command(*words, 4, "--out", "four").code == 0
    code, out, err = rewound_command(*words, 2, "--out", "two")  # level 1 of the run before
    assert (code, err) == (0, "")
    assert "recomputing" not in out
    assert rewound_command(*words, 2, "--store", "other", "--out", "other-two").code == 0
    for name in ("model.safetensors", "mask.safetensors", "ticket.safetensors", "levels/levels.csv"):
        assert Path("two", name).read_bytes() == Path("other-two", name).read_bytes()


@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding", "reinitialization", "fine-tuning"])
def test_prune_goes_on_to_a_larger_compression(rewound_command: Rewound, technique: str) -> None:
    words = ("prune", "tiny:Tiny", "--rate", 0.5, "--technique", technique, "--retrain-epochs", 1, "--out", "pruned")
    for compression in (3, 4, 8):  # the first ends with a smaller step, the second does not
        code, out, err = rewound_command(*words, "--compression", compression)
        assert (code, err) == (0, "")
        assert "recomputing" not in out
    assert [row["compression"] for row in level_rows("pruned")] == ["1", "2", "3", "4", "8"]
    assert [row["returned"] for row in level_rows("pruned")] == ["0", "0", "0", "0", "1"]
    assert rewound_command(*words[:-1], "anew", "--store", "other", "--compression", 8).code == 0
    assert Path("anew/ticket.safetensors").read_bytes() == Path("pruned/ticket.safetensors").read_bytes()
    assert rewound_command(*words, "--keep", "some").err == "error: keep must be 'needed' or 'all', not 'some'\n"


def test_what_prune_keeps_by_default_is_less_than_all(rewound_command: Rewound) -> None:
    words = ("prune", "tiny:Tiny", "--compression", 3, "--retrain-epochs", 1)
    assert rewound_command(*words, "--out", "needed").code == 0
    assert rewound_command(*words, "--out", "all", "--store", "other", "--keep", "all").code == 0
    needed, everything = (rewound.states.storage.store.Store(Path(root)).size() for root in ("rewound-store", "other"))
    assert 0.5 * everything < needed < 0.85 * everything, "of levels in between no optimizer state"


def test_a_search_of_another_kind_does_not_write_over_the_first(rewound_command: Rewound) -> None:
    words = ("prune", "tiny:Tiny", "--one-shot", "--retrain-epochs", 1, "--compression")
    assert rewound_command(*words, 2).code == 0
    first = Path("rewound-pruned/tiny.Tiny/ticket.safetensors").read_bytes()
    others = (("--seed", 2), ("--field", "batch_size=64"), ("--technique", "fine-tuning"), ("--score", "random"))
    for number, other in enumerate(others, start=2):
        code, out, err = rewound_command(*words, 2, *other)
        assert (code, err) == (0, "")
        assert out.endswith(f": rewound-pruned/tiny.Tiny-{number}\n")
    assert Path("rewound-pruned/tiny.Tiny/ticket.safetensors").read_bytes() == first
    assert rewound_command(*words, 3).out.endswith(": rewound-pruned/tiny.Tiny\n"), "further, it is the same search"
    assert rewound_command(*words, 3, "--seed", 2).out.endswith(": rewound-pruned/tiny.Tiny-2\n")
    code, out, err = rewound_command(*words, 2, "--seed", 3, "--out", "rewound-pruned/tiny.Tiny")
    assert (code, out) == (2, "")
    assert err == (
        "error: rewound-pruned/tiny.Tiny holds another network: it was pruned with seed 1, not 3; choose another with "
        "--out\n"
    )


def test_what_a_search_leaves_out_is_a_difference_too(rewound_command: Rewound) -> None:
    words = ("prune", "tiny:Tiny", "--one-shot", "--retrain-epochs", 1, "--compression", 2, "--pattern", "unit")
    fine_tuned = ("--technique", "fine-tuning")
    assert rewound_command(*words, "--slim", "--out", "slim").code == 0
    assert rewound_command(*words, *fine_tuned, "--final", 0.01, "--out", "tuned").code == 0
    first = {path: path.read_bytes() for path in (*Path("slim").rglob("*.*"), *Path("tuned").rglob("*.*"))}
    for others, why in (
        (("--out", "slim"), "slim holds another network: it was pruned with slim True, not without slim"),
        (
            (*fine_tuned, "--out", "tuned"),
            "tuned holds another network: it was pruned with final 0.01, not without final",
        ),
        (
            ("--slim", "--round-to", 2, "--out", "slim"),
            "slim holds another network: it was pruned without round_to, not with round_to 2",
        ),
        (
            ("--slim", "--score", "random", "--out", "slim"),
            "slim holds another network: it was pruned with score 'magnitude', not 'random'",
        ),
    ):
        assert rewound_command(*words, *others) == (2, "", f"error: {why}; choose another with --out\n")
    assert first == {path: path.read_bytes() for path in first}
    assert rewound_command(*words, "--slim").out.endswith(": rewound-pruned/tiny.Tiny\n")
    assert rewound_command(*words).out.endswith(": rewound-pruned/tiny.Tiny-2\n")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("command", ["prune", "run", "report"])
def test_a_folder_that_takes_no_files_is_told_before_the_work(rewound_command: Rewound, command: str) -> None:
    words = {"prune": ("tiny:Tiny",), "run": ("digits",), "report": ("digits",)}[command]
    code, out, err = rewound_command(command, *words, "--out", "/proc/x")
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"error: cannot write into /proc/x: /proc takes no files \(.*\); choose another folder for out\n", err
    )
    assert not Path("rewound-store").exists()


def test_prune_fits_80_columns(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 80)
    code, out, err = rewound_command("prune", "tiny:Tiny", "--rate", 0.5, "--compression", 2, "--out", "pruned")
    assert (code, err) == (0, "")
    assert re.search(r"level +density +compression +network +val +test +FLOPs +epochs", out)
    assert max(map(len, out.splitlines())) <= 80


def test_prune_that_diverges_exits_with_1(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POISON, (1, 1), 3)
    code, _, err = rewound_command("prune", "tiny:Watched", "--one-shot", "--compression", 2)
    assert code == 1
    assert err == "failed: level 1 (density 0.5): the loss became nan by step 9\n"
    with pytest.raises(rewound.Diverged) as failure:
        rewound.prune(Watched(), compression=2, one_shot=True, store="rewound-store")
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)


def test_a_level_that_diverges_is_a_drop(rewound_command: Rewound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POISON, (1, 2), 3)
    code, out, err = rewound_command("prune", "tiny:Watched", "--rate", 0.2, "--max-drop", 1, "--out", "pruned")
    assert (code, err) == (0, "")
    assert "level 2 (density 0.64): the loss became nan by step 9; the levels before it remain\n" in out
    assert re.search(r"1.25x of the pruned weights, \S+ of the whole network\ntest \S+ \(dense \S+\): pruned\n$", out)


def test_prune_leaves_a_weight_at_least(rewound_command: Rewound) -> None:
    code, _, err = rewound_command("prune", "tiny:Tiny", "--compression", 1e9)
    assert code == 2
    assert err == (
        "error: density 1e-09 (compression 1,000,000,000) leaves less than one of 1,316 weights; "
        "the largest compression is 1,316\n"
    ), "what was asked for, not the first of its levels that cannot be"


# Inspect


def write_ticket(recipe: rewound.Recipe, about: dict[str, object], path: str = "t.safetensors") -> Mask:
    model = recipe.model(1)
    mask = rewound.Pruner(floor=0.02)(model, 0.25)
    mask.apply(model)
    rewound.save(model, mask, path, about)
    return mask


def rows(out: str) -> dict[str, list[str]]:
    """The lines of a table by their first word."""
    return {words[0]: words[1:] for line in out.splitlines() if (words := line.split())}


def test_inspect_a_ticket(rewound_command: Rewound) -> None:
    mask = write_ticket(Digits(), {"recipe": "digits", "lineage": ["a", 1]})
    code, out, err = rewound_command("inspect", "t.safetensors")
    assert (code, err) == (0, "")
    profile, found = Digits().profile, rows(out)
    for name, kept in mask.items():
        shape, count, of, density, flops = found[name]
        assert shape == "×".join(map(str, kept.shape))
        assert (count, of) == (f"{mask.counts[name]:,}", f"{kept.numel():,}")
        assert float(density) == pytest.approx(mask.counts[name] / kept.numel(), rel=1e-3)
        assert flops == f"{profile.layers(mask)[name]:,}"
    assert found["layers"] == ["above", "14,080", "56,320", "0.25", f"{sum(profile.layers(mask).values()):,}"]
    assert found["all"] == ["else", "parameters", "554", "554", "1", f"{profile.fixed:,}"]
    assert found["network"][:2] == ["14,634", "56,874"]  # without buffers
    assert found["network"][3] == f"{profile.total(mask):,}"
    assert found["recipe"] == ["digits"]
    assert found["lineage"] == ['["a",', "1]"]
    assert " ".join(found["compression"]) == "4.00x of the pruned weights, 3.89x of the whole network"
    assert found["hash"] == [rewound.load("t.safetensors").hash]
    assert found["size"][0] == f"{Path('t.safetensors').stat().st_size:,}"


def test_inspect_the_folder_that_prune_wrote(rewound_command: Rewound) -> None:
    words = ("--compression", 2, "--one-shot", "--retrain-epochs", 1, "--out", "pruned")
    assert rewound_command("prune", "tiny:Tiny", *words).code == 0
    code, out, err = rewound_command("inspect", "pruned")
    assert (code, err) == (0, "")
    assert out == rewound_command("inspect", "pruned/ticket.safetensors").out


def test_inspect_says_where_buffers_cannot_be_told_apart(rewound_command: Rewound) -> None:
    state = {"weight": torch.ones(10, 10), "bias": torch.ones(20)}
    mask = Mask({"weight": torch.arange(100).reshape(10, 10) < 50})
    mask_of = {**state, "weight": state["weight"].masked_fill(~mask["weight"], 0)}
    rewound.save(mask_of, mask, "t.safetensors")
    said = "2.00x of the pruned weights, 1.71x of the whole network (buffers counted, too: the file does not tell them"
    assert said in rewound_command("inspect", "t.safetensors").out


def test_inspect_with_a_recipe_of_ones_own(rewound_command: Rewound) -> None:
    mask = write_ticket(Tiny(), {})
    code, out, err = rewound_command("inspect", "t.safetensors", "--recipe", "tiny:Tiny")
    assert (code, err) == (0, "")
    assert rows(out)["network"][3] == f"{Tiny().profile.total(mask):,}"
    code, _, err = rewound_command("inspect", "t.safetensors", "--recipe", "digits")
    assert code == 2
    assert err.startswith("error: mask entry 'stem.weight' has shape (4, 1, 3, 3), but the profiled model has it with")


def test_a_slim_network_of_tied_weights_is_counted_as_the_masked_one(rewound_command: Rewound) -> None:
    words = ("prune", "tiny:Tied", "--one-shot", "--retrain-epochs", 1, "--compression", 2, "--pattern", "unit")
    shown = []
    for out, how in (("masked", ()), ("slim", ("--slim",))):
        assert rewound_command(*words, *how, "--out", out).code == 0
        code, text, err = rewound_command("inspect", out, "--recipe", "tiny:Tied")
        assert (code, err) == (0, "")
        shown.append(rows(text.partition("recipe ")[0]))
        found = rewound.bench(out, recipe="tiny:Tied", backend="eager", batch=1, seconds=0.01, say=lambda text: None)
        flops = {size.network: size.flops for size in found.sizes}
        assert flops["pruned"] == int(rows(text)["network"][3].replace(",", ""))
    assert shown[0] == shown[1]
    units = load_file("slim/model.safetensors")["one.weight"].shape[0]
    assert [int(shown[1][name][4]) for name in ("first.weight", "one.weight", "last.weight")] == [
        *(2 * 64 * units, 2 * 2 * units * units, 2 * units * 10)
    ], "two for a weight of a linear layer, and the tied one is used twice"


@pytest.mark.parametrize("recipe", [None, "digits", "this:s", "unknown", 7, ["digits"]])
def test_inspect_imports_nothing_that_a_file_names(rewound_command: Rewound, recipe: object) -> None:
    write_ticket(Tiny(), {"recipe": recipe})
    sys.modules.pop("this", None)
    code, out, err = rewound_command("inspect", "t.safetensors")
    assert (code, err) == (0, "")
    assert rows(out)["layer"] == ["shape", "kept", "of", "density"], "no column that has nothing to say"
    assert rows(out)["network"] == ["419", "1,406", "0.298"]
    assert "FLOPs need the network: give its recipe with --recipe (and --field), or" in out
    assert "this" not in sys.modules


def test_inspect_shows_no_codes_of_a_file_to_the_terminal(rewound_command: Rewound) -> None:
    weight = torch.ones(2, 2)
    about = {"\x1b[2J": "\x1b]0;title\x07[red]\ud800\n"}
    rewound.save({"a\x1b[31m": weight}, Mask({"a\x1b[31m": weight > 0}), "t.safetensors", about)
    code, out, err = rewound_command("inspect", "t.safetensors")
    assert (code, err) == (0, "")
    assert r"a\x1b[31m" in out
    assert r"\x1b]0;title\x07[red]\ud800\n" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_inspect_prints_to_what_is_no_terminal(tmp_path: Path) -> None:
    name, weight = "encoder." * 30 + "weight", torch.ones(2, 2)
    rewound.save({name: weight}, Mask({name: weight > 0}), tmp_path / "t.safetensors", {"by": "Zoë"})
    ascii_only = {**environment(), "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    words = command("inspect", str(tmp_path / "t.safetensors"))
    done = subprocess.run(words, capture_output=True, text=True, env=ascii_only, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [name, "2x2", "4", "4", "1"] in [line.split() for line in done.stdout.splitlines()], "as grep wants it"
    assert "Zo?" in done.stdout


def test_inspect_what_is_no_ticket(rewound_command: Rewound) -> None:
    save_file({"w": torch.ones(2)}, "model.safetensors")
    code, _, err = rewound_command("inspect", "model.safetensors")
    assert code == 2
    assert err.startswith("error: model.safetensors is a safetensors file but no ticket; rewound.save writes one")
    write_ticket(Tiny(), {})
    damaged = bytearray(Path("t.safetensors").read_bytes())
    damaged[-1] ^= 1
    Path("t.safetensors").write_bytes(damaged)
    code, _, err = rewound_command("inspect", "t.safetensors")
    assert code == 2
    assert re.fullmatch(r"error: the ticket t.safetensors is damaged: .*; save it or get it again\n", err)


@pytest.mark.parametrize("slim", [(), ("--slim",)])
def test_prune_to_a_part_of_the_flops_says_what_is_left_of_the_weights(
    rewound_command: Rewound, slim: tuple[str, ...]
) -> None:
    words = ("--pattern", "unit", "--of", "flops", "--compression", 2, "--one-shot", "--out", "pruned", *slim)
    code, out, err = rewound_command("prune", "tiny:Tiny", *words)
    assert (code, err) == (0, "")
    level, dense = (json.loads(Path("pruned/summary.json").read_text())["levels"][each] for each in (1, 0))
    row = level_rows("pruned")[1]
    mask = rewound.load(f"pruned/levels/{row['ticket']}").mask
    shapes = Tiny().shapes
    left = sum(mask.counts[name] for name in shapes) / sum(mask[name].numel() for name in shapes)
    assert level["compression"] == pytest.approx(1 / left)
    assert float(row["compression"]) == pytest.approx(1 / left)
    assert level["flops"] <= 0.5 * dense["flops"]
    flops = f"{dense['flops'] / level['flops']:.2f}x of the FLOPs"
    assert f"level 1: {1 / left:.2f}x, {level['network_compression']:.2f}x of the whole network, {flops}, val" in out
