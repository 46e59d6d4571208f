"""SIGKILL at any moment loses nothing that was finished: `kill_and_continue.py` with a sweep of seconds."""

import os
import sys
from pathlib import Path

import pytest

from kill_and_continue import _table, check

SWEEP = """
recipe = "digits"
trials = [1]

[recipe-fields]
epochs = 12.0
widths = [4, 8]

[[experiment]]
technique = ["weight-rewinding", "lr-rewinding"]
retrain-epochs = 8
levels = { keep = 0.5, count = 2 }
"""

# The same command, with a draft at the end of every epoch: kills then strike while drafts are written and resumed from.
DRAFTING = (
    sys.executable,
    "-c",
    "import rewound.experiments.plans.execution as e; e.SNAPSHOT = 0.0; from rewound.cli import main; main()",
)


@pytest.mark.slow
def test_killing_and_continuing_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    (tmp_path / "tiny.toml").write_text(SWEEP)
    assert check(str(tmp_path / "tiny.toml"), kills=4, jobs=1, seed=1, folder=tmp_path, rewound=DRAFTING) == []
    store = tmp_path / "disturbed" / "store"
    assert list(store.glob("states/*/*.safetensors")) == [], "nor does it leave tensors behind"
    assert list(store.glob("drafts/*.safetensors")) == []
    assert list(store.glob("damaged/*")) == [], "and nothing was ever half written"


def test_the_comparison_sees_differences(tmp_path: Path) -> None:
    one, other, third = (tmp_path / name for name in "abc")
    one.write_text("key,seconds,test\nk,1.5,0.5\n")
    other.write_text("key,seconds,test\nk,2.5,0.5\n")
    third.write_text("key,seconds,test\nk,1.5,0.6\n")
    assert _table(one) == _table(other) != _table(third)
