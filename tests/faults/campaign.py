"""A sweep under faults: processes are killed, frozen and starved, files damaged, clocks set, and nothing may change.

    python tests/faults/campaign.py                         # all kinds of faults, some 15 minutes
    python tests/faults/campaign.py --only kill --seed 7    # one kind

A round is a sweep in a store of its own. It is disturbed, then continued in peace, and checked (`checks`): its tables
are those of an undisturbed run but for seconds, nothing was published twice, no late owner wrote anything, nothing was
computed again without a line, and after `rewound gc` nothing is left but results, all of them intact. Moments are drawn
from a seed. In the end a table says what was done and what was found. Exit code 0: nothing was wrong.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from kinds import KINDS
from rounds import Ground, ground
from surroundings import Missing


def run(on: Ground, kind: str, seed: int, much: float) -> tuple[Counter[str], int, list[str]]:
    """What was done in the rounds of a kind, how many there were, and what was wrong."""
    done, faults, rounds = Counter[str](), list[str](), 0
    for this in KINDS[kind](on, random.Random(f"{kind} {seed}"), much):
        rounds += 1
        faults += [f"{this.folder.name}: {fault}" for fault in this.finish()]
        done += this.done
    return done, rounds, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, action="append", help="kinds of faults [all]")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments [0]")
    parser.add_argument("--much", type=float, default=1.0, help="a share of the usual number of faults [1]")
    parser.add_argument("--keep", type=Path, help="an empty folder for all stores and journals [a temporary one]")
    given = parser.parse_args()
    failed = False
    with ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        folder.mkdir(exist_ok=True)
        on = stack.enter_context(ground(folder))
        print("| fault | rounds | what was done | found | seconds |\n|---|---|---|---|---|", flush=True)
        for kind in given.only or KINDS:
            began = time.monotonic()
            try:
                done, rounds, faults = run(on, kind, given.seed, given.much)
            except Missing as missing:
                print(f"| {kind} | 0 | not done: {missing} | | |", flush=True)
                continue
            what = ", ".join(f"{count} {name}" for name, count in done.items())
            print(f"| {kind} | {rounds} | {what} | {len(faults)} | {time.monotonic() - began:.0f} |", flush=True)
            for fault in faults:
                print(f"    {fault}", file=sys.stderr, flush=True)
            failed |= bool(faults)
    return failed


if __name__ == "__main__":
    sys.exit(main())
