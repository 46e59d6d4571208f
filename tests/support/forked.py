"""A script that is run several times, one after the other, by processes forked from one that has imported torch.

Importing torch takes two seconds, and a test that kills a script again and again would spend most of its time on it.
What is forked has computed nothing yet, so that each process starts as the script would.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Ended(NamedTuple):
    """How a process ended, and what it printed."""

    code: int
    out: str
    err: str


def ended(script: str, runs: Sequence[Sequence[object]], environment: Mapping[str, str] = os.environ) -> list[Ended]:
    """How the script at a path ends with each of these lists of arguments."""
    words = [sys.executable, __file__, script, json.dumps([list(map(str, each)) for each in runs])]
    ran = subprocess.run(words, env=dict(environment), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return [Ended(*each) for each in json.loads(ran.stdout)]


def _forked(script: str, arguments: list[str]) -> Ended:
    import runpy

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if not (process := os.fork()):
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            sys.argv = [script, *arguments]
            try:
                runpy.run_path(script, run_name="__main__")
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
                code = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        out.seek(0), err.seek(0)
        return Ended(code, out.read(), err.read())


if __name__ == "__main__":
    import rewound.loops.iteration  # noqa: F401

    print(json.dumps([_forked(sys.argv[1], arguments) for arguments in json.loads(sys.argv[2])]))
