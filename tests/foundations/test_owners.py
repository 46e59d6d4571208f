"""Whose process a number is: containers may have the same host name and the same process numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rewound.foundations.owners
from rewound.foundations.owners import Owner, this_host, this_process
from surroundings import Missing, container

TELL = """
import json, sys
from rewound.foundations.owners import Owner, this_process
others = [Owner(*each) for each in json.loads(sys.argv[1])]
print(json.dumps([this_process(), this_process().lives(), [other.lives() for other in others]]))
"""


def told(others: list[Owner], *, own_proc: bool) -> tuple[Owner, bool | None, list[bool | None]]:
    """In a container: who the process there is, whether it takes itself to be alive, and the others."""
    try:
        words = container("pod", own_proc=own_proc)
    except Missing as missing:
        pytest.skip(str(missing))
    ran = subprocess.run(
        [*words, sys.executable, "-c", TELL, json.dumps(others)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    owner, lives, of_others = json.loads(ran.stdout)
    return Owner(*owner), lives, of_others


def test_containers_do_not_judge_each_others_processes() -> None:
    """They have the same name and the same numbers, and one is dead when the other looks."""
    one, lives, _ = told([this_process()], own_proc=True)
    assert lives is True
    other, _, seen = told([one, this_process(), Owner(one.host, one.pid + 1, "1")], own_proc=True)
    assert (other.pid, other.host.partition("/")[0]) == (one.pid, "pod")
    assert other.host != one.host
    assert seen == [None, None, None]
    assert one.lives() is None


def test_a_container_that_sees_the_hosts_processes_does_not_take_them_for_its_own() -> None:
    """There /proc/1 is the first process of the host, which lives for ever."""
    owner, lives, _ = told([], own_proc=False)
    assert owner.pid == 1
    assert lives is None
    assert owner.birth == "unknown"


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
