"""`rewound bench`: dense beside pruned beside slim, measured in turns; and which network a command is given."""

import inspect
import itertools
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rewound
from command_line import Rewound
from rewound.commands.named import batched, named_network, slim_network
from rewound.commands.runtimes import Failed, Machine, expected, machine, own_forward, prepared
from rewound.commands.timing import (
    FEWEST,
    OTHER_OUTPUTS,
    Benchmark,
    Timing,
    measured,
    no_speedup,
    slow_slim,
    variants_of,
)
from rewound.states.storage.store import Store
from rewound.tasks.recipes.digits import Digits
from sameness import assert_same
from tiny import Tiny

HERE = Machine(torch.device("cpu"), 1)
brief = partial(rewound.bench, seconds=0.05, threads=1, say=lambda line: None)


def perceptron(hidden: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4)).eval()


IMAGES = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


# What is measured


def test_single_weights_give_no_speedup_and_a_sentence_says_so() -> None:
    model = perceptron()
    found = brief(model, IMAGES, rewound.Pruner(floor=0.1)(model, density=0.25), backend="eager")
    assert [size.network for size in found.sizes] == ["dense", "pruned"]
    assert found.sizes[0].parameters == found.sizes[1].parameters == 16 * 32 + 32 + 32 * 4 + 4
    assert found.sizes[0].bytes == found.sizes[1].bytes == 4 * found.sizes[0].parameters
    assert found.flop_ratio("pruned") == pytest.approx(4, rel=0.02)
    quick = [timing(speedup=1.2, low=0.98), timing(speedup=1.04, low=1.03)]
    (sentence,) = no_speedup(quick, has_slim=False)
    assert sentence.startswith("The mask alone gives no speed-up here (1.20x eager, 1.04x eager)")
    assert no_speedup([*quick, timing(speedup=1.3, low=1.2)], has_slim=False) == [], "it was faster somewhere"


def timing(speedup: float, low: float, network: str = "pruned") -> Timing:
    return Timing("eager", network, 1.0, (1.0, 1.0), speedup, (low, 2 * speedup))


@pytest.mark.parametrize(("round_to", "uneven"), [(1, True), (8, False)])
def test_where_the_slim_network_is_no_faster_uneven_sizes_may_be_why(round_to: int, uneven: bool) -> None:
    model = perceptron(hidden=30)  # 30 is no multiple of 8, and neither are the 4 outputs, which stay
    pruner = rewound.Pruner(pattern="unit", round_to=round_to)
    variants, _ = variants_of(model, model, pruner(model, density=0.6, example_inputs=(IMAGES,)), (IMAGES,))
    slow, fast = timing(0.9, 0.89, "slim"), timing(1.3, 1.2, "slim")
    said = (
        "The slim network is not faster here (0.90x eager): it has sizes that are no multiple of 8, for which kernels "
        "may be slow; prune with round_to=8 (--round-to 8)."
    )
    assert slow_slim([timing(1.0, 0.9), fast, slow], variants) == ([said] if uneven else [])
    assert slow_slim([fast], variants) == []


def test_whole_units_give_a_slim_network() -> None:
    model = perceptron()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mask = rewound.Pruner(pattern="unit", score="l1")(model, density=0.5, example_inputs=(IMAGES,))
    found = brief(model, IMAGES, mask, backend="eager")
    dense, pruned, slim = found.sizes
    assert (slim.network, pruned.parameters) == ("slim", dense.parameters)
    assert slim.flops == pruned.flops
    assert slim.parameters < 0.6 * dense.parameters
    assert [each.network for each in found.timings] == ["dense", "pruned", "slim"]
    for each in found.timings:
        assert each.interval[0] <= each.seconds <= each.interval[1]
        assert each.speedup_interval[0] <= each.speedup <= each.speedup_interval[1]
        assert each.speedup == found.timings[0].seconds / each.seconds
    assert_same(before, model.state_dict())


def test_units_whose_own_weights_are_gone_leave_a_slim_network_too() -> None:
    model = perceptron()
    rows = torch.ones(32, 16, dtype=torch.bool)
    rows[:20] = False  # their biases, and what reads them, are not in the mask
    rows[20, 0] = False  # a single weight
    found = brief(model, IMAGES, rewound.Mask({"0.weight": rows}), backend="eager")
    assert found.sizes[-1].parameters == 12 * 16 + 12 + 12 * 4 + 4
    assert OTHER_OUTPUTS in found.remarks, "biases that are not in the mask are gone in the slim network"
    whole = rewound.Pruner(pattern="unit")(model, 0.5, example_inputs=IMAGES)
    assert OTHER_OUTPUTS not in brief(model, IMAGES, whole, backend="eager").remarks


def test_networks_by_name_and_the_printed_table() -> None:
    found = brief({"wide": perceptron(), "narrow": perceptron(8)}, IMAGES[:1], batch=5, backend=["eager"])
    text, html = str(found), found._repr_html_()
    assert repr(found) == "Benchmark(networks: 2 timings)"
    assert "batch 5" in text
    assert "1 thread" in text
    assert re.search(r"^narrow +172 +688 +160 +4\.00x$", text, re.MULTILINE)
    assert re.search(r"^eager +narrow +[\d.]+ +[\d.]+ - [\d.]+ +[\d.]+x +[\d.]+ - [\d.]+$", text, re.MULTILINE)
    assert html.count("<table>") == 2
    assert found.timing("wide", "eager").speedup == 1
    with pytest.raises(rewound.InputError, match=r"^'slim' was not measured; measured: wide, narrow$"):
        found.flop_ratio("slim")
    with pytest.raises(rewound.InputError, match="'slim' was not measured on 'eager'; measured: wide eager, narrow"):
        found.timing("slim", "eager")


# How it is measured


def test_networks_take_turns_in_a_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that runs ever faster, as on a machine that gets busier, ratios are still right."""
    now, calls, busy = 0.0, list[int](), 1.0

    def run(number: int) -> None:
        nonlocal now, busy
        calls.append(number)
        busy *= 1.01
        now += busy * (number + 1) * 0.1

    monkeypatch.setattr("time.process_time", lambda: now)
    times = measured([partial(run, number) for number in range(3)], HERE, seconds=0.1)
    assert times.shape == (FEWEST, 3)
    rounds = list(itertools.batched(calls[-3 * FEWEST :], 3)) if hasattr(itertools, "batched") else []
    rounds = rounds or [tuple(calls[i : i + 3]) for i in range(len(calls) - 3 * FEWEST, len(calls), 3)]
    assert {tuple(sorted(each)) for each in rounds} == {(0, 1, 2)}, "each once a round"
    assert len(set(rounds)) > 1, "in changing order"
    assert (times[:, 1] / times[:, 0]).tolist() == pytest.approx([2] * FEWEST, rel=0.03), "side by side in time"


def test_a_fast_network_runs_many_times_in_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, 0

    def run() -> None:
        nonlocal now, calls
        calls, now = calls + 1, now + 1e-4

    monkeypatch.setattr("time.process_time", lambda: now)
    times = measured([run], HERE, seconds=0.2)
    assert times.mean() == pytest.approx(1e-4)
    assert calls == 2 + 200 + 200 * FEWEST


class Scaled(nn.Module):
    """Its size is a number that torch may take for one that varies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) * self.weight


def test_compiled_networks_of_one_class_do_not_recompile_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    networks = [Scaled(width) for width in range(2, 14)]  # more than torch compiles one function for
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        ready = [prepared("compiled", network, (IMAGES,), HERE) for network in networks]
        for _ in range(2):
            for network, each in zip(networks, ready, strict=True):
                assert torch.equal(each.run(), network(IMAGES))
    assert graphs["unique_graphs"] == len(networks)


def test_each_compiled_function_has_a_source_of_its_own() -> None:
    """Where it has none, torch 2.11 and 2.12 compile all of them as one function, at most eight times."""
    files = {inspect.getsourcefile(own_forward(Scaled(width))) for width in (2, 3)}
    assert len(files) == 2
    assert None not in files


def test_a_network_that_is_no_single_graph_is_not_measured_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Printing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found = brief(Printing(16, 4), IMAGES, backend="compiled,eager")
    assert [each.backend for each in found.timings] == ["eager"]
    assert found.remarks[0].startswith("compiled cannot run this network here (")


def test_a_wrong_network_is_not_measured() -> None:
    model, other = perceptron(), perceptron()
    with torch.no_grad():
        other[0].weight[0, 0] += 0.01  # type: ignore[index]
        right = expected(model, (IMAGES,))
        assert right.deviation([model(IMAGES)], "itself") < 1e-6
        exact = [each.float() for each in right.values]
        assert right.deviation(exact, "itself, in float64") < 1e-6
        for wrong in (other(IMAGES), model(IMAGES)[:, :2], torch.full_like(model(IMAGES), torch.nan)):
            with pytest.raises(Failed, match=r"onnx (differs from the network by|gives outputs of other shapes)"):
                right.deviation([wrong], "onnx")


class InSinglePrecision(nn.Linear):
    """Its own code takes one type of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return super().forward(x)


class Pairs(nn.Linear):
    """Its own code compares the halves of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) % 2 == 0, "pairs of examples"
        first, second = x.chunk(2)
        return super().forward(first - second)


@pytest.mark.parametrize("kind", [InSinglePrecision, Pairs])
def test_a_network_is_measured_whatever_its_own_code_asks_of_its_inputs(kind: type[nn.Linear]) -> None:
    found = brief(kind(16, 4), IMAGES, backend="eager")
    assert [each.network for each in found.timings] == ["dense"], found.remarks
    assert found.sizes[0].flops == (None if kind is Pairs else 16 * 4)


def test_a_network_that_does_not_run_on_its_inputs_is_said_to() -> None:
    found = brief(Pairs(16, 4), IMAGES[:3], backend="eager")
    assert found.remarks == ("eager cannot run this network here (AssertionError: pairs of examples).",)
    with pytest.raises(rewound.InputError, match=r"does not run on its example inputs \(AssertionError: pairs of exam"):
        expected(Pairs(16, 4), (IMAGES[:3],))


@pytest.mark.slow
def test_torch_compiles_and_onnx_runtime_runs_what_is_measured() -> None:
    found = brief({"wide": perceptron(), "narrow": perceptron(8)}, IMAGES, backend="compiled,onnx")
    assert [(each.backend, each.network) for each in found.timings] == [
        *(("compiled", "wide"), ("compiled", "narrow")),
        *(("onnx", "wide"), ("onnx", "narrow")),
    ], found.remarks


def test_a_ticket_by_the_command(rewound_command: Rewound) -> None:
    task = Tiny()
    model = task.model(0)
    mask = rewound.Pruner(pattern="unit", score="l1")(model, density=0.4, example_inputs=task.example())
    mask.apply(model)
    rewound.save(model, mask, "ticket.safetensors", about={"recipe": "tiny:Tiny"})
    words = ("--recipe", "tiny:Tiny", "--batch", 2, "--threads", 1, "--seconds", 0.05)
    code, out, err = rewound_command("bench", "ticket.safetensors", *words, "--backend", "eager")
    assert (code, err) == (0, "")
    for network in ("dense", "pruned", "slim"):
        assert re.search(rf"^eager +{network} +[\d.]+ ", out, re.MULTILINE), out


# Which network


def test_a_recipe_a_ticket_and_a_folder(tmp_path: Path) -> None:
    assert named_network("digits").mask is None
    task = Digits(widths=(4, 8))
    model = task.model(3)
    mask = rewound.Pruner(floor=0.1)(model, density=0.3)
    mask.apply(model)
    about = {"recipe": "digits", "fields": {"widths": [4, 8]}}
    rewound.save(model, mask, tmp_path / "ticket.safetensors", about)
    for path in (tmp_path, tmp_path / "ticket.safetensors", str(tmp_path)):
        found = named_network(path)
        assert found.mask is not None
        assert_same(found.mask, mask)
        assert_same(found.model.state_dict(), model.state_dict())


def test_a_key_of_a_store(done: Path) -> None:
    store = Store(done / "rewound-store")
    masked = [key for key in sorted(store.finished()) if (kept := store.load(key)) and kept.mask is not None]
    kept = store.load(masked[0])
    assert kept is not None
    found = named_network(masked[0][:10], recipe="tiny:Tiny", store=done / "rewound-store")
    assert_same(found.model.state_dict(), kept.state.model)
    assert found.mask is not None
    with pytest.raises(rewound.InputError, match=r"made by recipe tiny:Tiny, which cannot be built from what the"):
        named_network(masked[0], store=done / "rewound-store")
    with pytest.raises(rewound.InputError, match=r"is no network of recipe tiny:Tiny with these fields: names or sh"):
        named_network(masked[0], recipe="tiny:Tiny", fields={"widths": [4, 6]}, store=done / "rewound-store")


def test_the_fields_of_a_stored_network_are_read_from_its_history(tmp_path: Path) -> None:
    task = Digits(epochs=0.5, widths=(4, 8), batch_size=32)
    network = rewound.prune(task, compression=2, one_shot=True, retrain_epochs=0.1, store=tmp_path, say=lambda _: None)
    found = named_network(network.levels[1].key, store=tmp_path)
    assert_same(found.model.state_dict(), network.model.state_dict())
    assert found.example[0].shape == (1, 1, 8, 8)


def test_a_slim_state_of_a_store_is_in_the_large_shapes(tmp_path: Path) -> None:
    task = Digits(epochs=0.5, widths=(4, 8), batch_size=32)
    made = rewound.prune(
        task,
        compression=2,
        one_shot=True,
        retrain_epochs=0.1,
        pruner=rewound.Pruner(pattern="unit", score="l1"),
        slim=True,
        store=tmp_path,
        say=lambda _: None,
    )
    found = named_network(made.levels[1].key, store=tmp_path)
    assert found.mask is not None
    smaller = slim_network(found.model, found.mask, found.example)
    assert smaller is not None
    assert_same(smaller.model.state_dict(), made.model.state_dict())


def made_elsewhere() -> nn.Module:
    return perceptron()


def test_a_ticket_of_an_own_loop_with_what_makes_its_network(tmp_path: Path) -> None:
    model = perceptron()
    mask = rewound.Pruner(floor=0.1)(model, density=0.5)
    mask.apply(model)
    about = {"example": {"inputs": [{"tensor": ["F32", [7, 16]]}], "keywords": {}}}
    rewound.save(model, mask, tmp_path / "a.safetensors", about)
    found = named_network(tmp_path / "a.safetensors", model="test_bench:made_elsewhere")
    assert [tuple(each.shape) for each in found.example] == [(1, 16)]
    assert_same(found.model.state_dict(), model.state_dict())
    rewound.save(model, mask, tmp_path / "b.safetensors")
    with pytest.raises(rewound.InputError, match=r"b.safetensors does not say what its network takes, or more than te"):
        named_network(tmp_path / "b.safetensors", model="test_bench:made_elsewhere")
    with pytest.raises(rewound.InputError, match="model 'x:y' goes with the path of a ticket, and there is no file 'd"):
        named_network("digits", model="x:y")


class OfGraphs(nn.Module):
    """Nodes beside a matrix of who is next to whom: no dimension is a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.last(edges @ self.first(nodes).relu())


def test_a_network_that_takes_no_batches_is_run_on_the_example_of_its_ticket(
    rewound_command: Rewound, tmp_path: Path
) -> None:
    model, example = OfGraphs(), (torch.randn(6, 4), torch.rand(6, 6))
    mask = rewound.Pruner(pattern="unit")(model, 0.5, example_inputs=example)
    mask.apply(model)
    kinds = [{"tensor": ["F32", list(each.shape)]} for each in example]
    rewound.save(model, mask, tmp_path / "a.safetensors", {"example": {"inputs": kinds, "keywords": {}}})
    file, made = tmp_path / "a.safetensors", ("--model", "test_bench:OfGraphs")
    code, out, err = rewound_command("bench", file, *made, "--backend", "eager", "--seconds", 0.05)
    assert (code, err) == (0, "")
    assert "a.safetensors: batch 6, " in out
    assert {line.split()[1] for line in out.splitlines() if line.startswith("eager ")} == {"dense", "pruned", "slim"}
    assert "it was run on inputs of the shapes that its file has" in out
    code, out, err = rewound_command("export", file, *made, "--slim", "--out", "a.pt2")
    assert (code, err) == (0, "")
    small = torch.export.load("a.pt2").module()(*example)
    assert torch.allclose(small, model(*example), atol=1e-5)


def test_a_ticket_whose_example_the_network_does_not_take_is_refused(rewound_command: Rewound, tmp_path: Path) -> None:
    model = OfGraphs()
    kinds = [{"tensor": ["F32", [6, 4]]}, {"tensor": ["F32", [5, 5]]}]
    rewound.save(model, rewound.Mask({}), tmp_path / "a.safetensors", {"example": {"inputs": kinds, "keywords": {}}})
    code, _, err = rewound_command("bench", tmp_path / "a.safetensors", "--model", "test_bench:OfGraphs")
    assert code == 2
    assert re.search(r"does not run on inputs of the types and shapes that the file has for it \(RuntimeError: .*", err)


class Single(nn.Linear):
    """Its own code takes one example alone."""

    def __init__(self) -> None:
        super().__init__(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 1, "one example"
        return super().forward(x)


def test_a_command_that_measured_nothing_fails(rewound_command: Rewound, tmp_path: Path) -> None:
    about = {"example": {"inputs": [{"tensor": ["F32", [2, 16]]}], "keywords": {}}}
    rewound.save(Single(), rewound.Mask({}), tmp_path / "a.safetensors", about)
    given = ("bench", tmp_path / "a.safetensors", "--model", "test_bench:Single", "--backend", "eager")
    code, out, err = rewound_command(*given)
    assert "eager cannot run this network here (AssertionError: one example)." in out
    assert (code, err.strip()) == (
        1,
        "failed: nothing was measured: no backend could run this network; the lines above say why",
    )
    assert rewound_command(*given, "--batch", 1, "--seconds", 0.05).code == 0


def test_a_batch_of_an_example() -> None:
    words = torch.tensor([[3, 1, 2]])
    images, tokens = batched((torch.zeros(1, 2, 5), words), 4)
    assert images.shape == (4, 2, 5)
    assert images.std() > 0.5
    assert tokens.tolist() == [[3, 1, 2]] * 4
    assert torch.equal(batched((torch.ones(1, 3),), 2)[0], torch.ones(2, 3)), "what says something stays"


# Bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch must be at least 1, not 0"),
        ({"threads": 0}, "threads must be at least 1, not 0; leave it out for torch's own"),
        ({"threads": 10**8}, "threads must be at most 1,024, not 100,000,000; give as many as there are cores"),
        ({"threads": "two"}, "threads must be a whole number, not 'two'"),
        ({"seconds": 0}, "seconds must be above 0, not 0"),
        ({"seconds": math.nan}, "seconds must be above 0, not nan"),
        ({"backend": "onxx"}, r"unknown backend 'onxx'; did you mean 'onnx'\? \(known: compiled, eager, onnx\)"),
        ({"backend": "eager,eager"}, "must name each of eager, compiled, onnx at most once"),
        ({"backend": []}, "at most once, and one at least"),
        ({"batch": 3}, "example_inputs has 8 examples, and batch is 3; give one example, or no batch"),
        ({"example_inputs": None}, "example_inputs must be what the network takes, tensors with a batch, not None"),
        ({"example_inputs": 3}, "tensors with a batch, not 3; for a network that takes anything else, give a module"),
        ({"example_inputs": ({"x": 1},)}, "tensors with a batch, not {'x': 1}; for a network that takes anything else"),
        ({"mask": {"0.weight": 1}}, r"mask must be of type Mask, .*rewound.bench\(network, example_inputs, mask\)"),
        ({"network": 5}, "network must be of type Module, not 5; give a module, the path of a ticket, a key or a"),
        ({"network": {"a": 5}}, "several networks are given as modules by name"),
        ({"network": {"a": nn.Identity()}, "mask": rewound.Mask({})}, "a mask goes with one network"),
        (
            {"recipe": "digits", "fields": {"epochs": 1}},
            "as a module, so that recipe, fields would build another; leave",
        ),
        ({"network": "digits"}, "'digits' has inputs and a mask of its own; leave out example_inputs and mask"),
    ],
)
def test_bad_calls(options: dict[str, object], says: str) -> None:
    given = {"network": perceptron(), "example_inputs": IMAGES, "backend": "eager", **options}
    with pytest.raises(rewound.InputError, match=says):
        brief(**given)  # type: ignore[arg-type]


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        rewound.InputError,
        match=r"backend onnx needs onnx and onnxscript and onnxruntime, not installed here; pip install 'rewound\[onn",
    ):
        brief(perceptron(), IMAGES, backend="onnx")


def test_the_threads_of_torch_are_as_before() -> None:
    before = torch.get_num_threads()
    brief(perceptron(), IMAGES, backend="eager", threads=before + 1)
    assert torch.get_num_threads() == before
    assert machine().threads == before


def test_a_ticket_of_another_recipe(tmp_path: Path) -> None:
    model = perceptron()
    rewound.save(model, rewound.Pruner()(model, density=1.0), tmp_path / "own.safetensors")
    with pytest.raises(rewound.InputError, match=r"own.safetensors does not name its recipe; give the recipe that bui"):
        named_network(tmp_path / "own.safetensors")
    with pytest.raises(rewound.InputError, match=r"without its recipe; leave out model, or recipe and fields"):
        named_network(tmp_path / "own.safetensors", recipe="digits", model="networks:made")
    with pytest.raises(rewound.InputError, match=r"is no network of recipe digits \(this ticket is for another model"):
        named_network(tmp_path / "own.safetensors", recipe="digits")
    rewound.save(model, rewound.Mask({}), tmp_path / "named.safetensors", about={"recipe": "os:remove"})
    with pytest.raises(rewound.InputError, match="names the recipe 'os:remove', which does not come with rewound"):
        named_network(tmp_path / "named.safetensors")


def test_a_benchmark_without_timings_is_printed_too() -> None:
    assert str(Benchmark("x", (), (), ("compiled cannot run it.",), "batch 1")).startswith("x: batch 1")
