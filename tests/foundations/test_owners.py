"""Whose process a number is: containers may have the same host name and the same process numbers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import rewound.foundations.owners
from rewound.foundations.owners import Owner, this_host, this_process
from surroundings import Missing, container

TELL = """
import json, sys
from rewound.foundations.owners import Owner, this_process
others = [Owner(*each) for each in json.loads(sys.argv[1])]
print(json.dumps([this_process(), this_process().lives(), [other.lives() for other in others]]), flush=True)
sys.stdin.read()
"""


class Told(NamedTuple):
    """What a process in a container says: who it is, and which processes live as far as it sees."""

    owner: Owner
    lives: bool | None
    others: list[bool | None]


@contextmanager
def told(*others: Owner, own_proc: bool = True) -> Iterator[Told]:
    """A process in a container, which lives until the end of the block."""
    try:
        words = container("pod", own_proc=own_proc)
    except Missing as missing:
        pytest.skip(str(missing))
    with subprocess.Popen(
        [*words, sys.executable, "-c", TELL, json.dumps(others)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        owner, lives, seen = json.loads(process.stdout.readline())
        yield Told(Owner(*owner), lives, seen)
        process.communicate("")


def test_containers_do_not_judge_each_others_processes() -> None:
    """They have the same name and the same numbers."""
    with told() as one, told(one.owner, this_process(), one.owner._replace(pid=2**20)) as other:
        assert one.lives is other.lives is True
        assert one.owner.pid == other.owner.pid
        assert {each.owner.host.partition("/")[0] for each in (one, other)} == {"pod"}
        assert other.others == [None, None, None]
        assert one.owner.lives() is None


def test_the_processes_of_a_container_that_has_ended_are_dead() -> None:
    """The system may give its name to the next one, whose processes were born later."""
    with told() as one:
        pass
    with told(one.owner) as other:
        assert other.others == [False if one.owner.host == other.owner.host else None]


def test_a_container_that_sees_the_hosts_processes_does_not_take_them_for_its_own() -> None:
    """There /proc/1 is the first process of the host, which lives for ever."""
    with told(own_proc=False) as one:
        assert one.owner.pid == 1
        assert one.owner.birth == "unknown"
        assert one.lives is None


def test_a_sandbox_that_hides_which_one_it_is_sees_no_process_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one name have the same first process, as far as they can tell."""
    monkeypatch.setattr(rewound.foundations.owners, "_PROC", tmp_path)
    this_host.cache_clear()
    here = this_host()
    this_host.cache_clear()
    elsewhere = this_host()
    this_host.cache_clear()
    assert here.partition("/")[0] == elsewhere.partition("/")[0]
    assert here != elsewhere
