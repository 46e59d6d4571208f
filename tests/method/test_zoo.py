"""Law 8 for all architectures: `make test-long`, which has the packages that they need, and prints a table."""

import os
from collections.abc import Iterator

import pytest

from architectures import ARCHITECTURES
from rewound.method.structure.tracing import units
from slim_and_masked import BOUND, Compared, compared
from zoo import ZOO, with_torchvision

pytestmark = [
    pytest.mark.skipif("REWOUND_LONG" not in os.environ, reason="run by `make test-long`"),
    pytest.mark.filterwarnings("ignore"),
]
ALL = {**ARCHITECTURES, **ZOO}
if "REWOUND_LONG" in os.environ:
    with_torchvision()  # before transformers looks for it


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, Compared]]:
    """What was compared, printed once all is."""
    rows: dict[str, Compared] = {}
    yield rows
    lines = [f"{'architecture':38}{'groups':>8}{'units':>8}{'removed':>9}{'pinned':>8}{'s':>7}  difference"]
    for name, row in rows.items():
        counts = f"{row.groups:8}{row.units:8}{row.removed:9}{row.pinned:8}{row.seconds:7.1f}"
        lines.append(f"{name:38}{counts}  {row.difference:.1e}")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print("", *lines, f"{len(rows)} architectures; pinned: dimensions that cannot shrink", sep="\n")


@pytest.mark.parametrize("name", ALL)
def test_slim_equals_masked(name: str, table: dict[str, Compared]) -> None:
    table[name] = compared(ALL[name]())
    assert table[name].difference < BOUND


# Derived by hand from the configurations in `zoo`
COUNTS = {
    # two layers: 4 heads and 20 inner units each; the pooler's 16
    "transformers bert": [4, 20, 4, 20, 16],
    "transformers llama": [4, 20, 4, 20],
    "transformers llama with shared keys": [2, 20, 2, 20],  # two query heads go with the key and value head they share
    "transformers qwen3_moe": [2, 12, 2, 12],  # and hidden units that all experts have in common
    "transformers gpt_oss": [2, 20, 2, 20],
    # encoder and decoder add one table of positions to the heads of all their layers, and the attention from one to the
    # other zeros of one shape: three kinds of heads; 20 inner units in each of four layers
    "transformers t5": [4, 4, 4, 20, 20, 20, 20],
    # heads of two encoder layers, two decoder layers and their two attentions across; four inner layers; the channels
    # between the two convolutions of the encoder
    "transformers whisper": [4] * 6 + [20] * 4 + [16],
    "transformers clip": [4, 20, 4, 20, 3, 10, 3, 10],  # text, then image
    # two stages of two layers, of 12 and 24 channels: heads, and four times the channels
    "transformers swin": [3, 48, 3, 48, 6, 96, 6, 96],
    "torchvision swin": [48, 48, 96, 96],  # its heads are pinned
    "torchvision vit": [20, 20],
    "torchvision vgg": [16, 24, 24, 32, 40],
    # the stem's 8; in each block two layers with 2 * 4 inner channels and 4 new ones; the transition's (8 + 8) / 2
    "torchvision densenet": [8, 8, 4, 8, 4, 8, 8, 4, 8, 4],
    # stem and stage 1 are one stream (the block adds its input), stages 2 to 4 one each with their shortcut: of 64,
    # 128, 256 and 512; inside each of the 3 + 4 + 6 + 3 blocks the output of its first convolution
    "torchvision resnet34": [64] * 4 + [128] * 5 + [256] * 7 + [512] * 4,
    # likewise with two inner convolutions per block and streams of four times the width; the stem is its own
    "torchvision resnet50": [64] * 7 + [128] * 8 + [256] * 13 + [512] * 7 + [1024, 2048],
}


@pytest.mark.parametrize("name", COUNTS)
def test_units_are_those_that_a_person_counts(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    assert sorted(map(len, units(model, args, kwargs))) == sorted(COUNTS[name])
