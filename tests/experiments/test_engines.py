"""An engine of one's own, whose workers run elsewhere: what a run asks of it, beside the work."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import rewound
from command_line import SWEEP
from rewound import InputError
from rewound.experiments.executors import EXECUTORS, Engine
from rewound.experiments.executors.walking import Headway
from rewound.experiments.plans.options import Options
from rewound.experiments.plans.planning import Plan
from rewound.states.storage.store import Say, Store


@dataclass(frozen=True)
class Queue:
    """An engine that notes what it is asked for, and begins nothing."""

    wait: bool = False
    is_open: bool = True
    asked: list[str] = field(default_factory=list)

    def check(self, options: Options) -> None:
        if not self.is_open:
            raise InputError("the queue is closed; come again tomorrow")

    def __call__(
        self, plan: Plan, store: Store, options: Options, *, say: Say, tick: Callable[[Headway], None]
    ) -> None:
        self.asked.append(store.name)


@pytest.fixture(autouse=True)
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(SWEEP)


def test_those_of_the_package_are_engines_and_this_machine_is_none() -> None:
    assert {name: isinstance(made(), Engine) for name, made in EXECUTORS.items()} == {
        "local": False,
        "ray": True,
        "slurm": True,
    }


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_left_is_told_unless_workers_have_just_been_asked_for(wait: bool) -> None:
    queue, said = Queue(wait), list[str]()
    rewound.run("tiny.toml", on=queue, say=said.append)
    assert queue.asked == ["rewound-store"]
    assert any("nodes are still to do; run it again to continue" in line for line in said) == wait


def test_jobs_are_not_for_it() -> None:
    with pytest.raises(InputError, match="jobs is for processes of this machine; on a cluster give workers=3 instead"):
        rewound.run("tiny.toml", on=Queue(), jobs=3)


def test_no_store_is_made_for_what_cannot_begin() -> None:
    with pytest.raises(InputError, match="the queue is closed"):
        rewound.run("tiny.toml", on=Queue(is_open=False))
    assert not Path("rewound-store").exists()
