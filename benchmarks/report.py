"""How long a report on a large results table takes, how much memory, and how soon its page can be used.

Goals for the authors' 22,590 pruned networks on two cores: at most 15 s and 1.5 GB for tables, figures and page
together; a page below 6 MB that is interactive within 3 s in Chromium. Every number is a median of repeats with the
extremes in brackets; the browser is started anew for each. Memory is that of all processes of the report, pages that
they share counted once (proportional set sizes, sampled).

    python benchmarks/report.py published-pruned.csv.gz published-dense.csv.gz      # two minutes
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from global_pruning import machine

REPEATS = 3


def reported(results: Path, dense: Path, out: Path) -> tuple[float, float]:
    """Seconds and gigabytes of `rewound report` in a session of processes of its own."""
    command = [sys.executable, "-m", "rewound", "report", "--results", str(results), "--dense", str(dense)]
    start, most = time.perf_counter(), 0.0
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        most = max(most, sum(map(memory, session(process.pid))))
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)  # looking costs time, too
    if process.returncode:
        raise SystemExit("the report failed")
    return time.perf_counter() - start, most


def session(leader: int) -> list[Path]:
    """The folders in /proc of a session's processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == leader:
                found.append(folder)
    return found


def memory(process: Path) -> float:
    """The proportional set size of a process in gigabytes."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # it has ended
        return 0.0
    return int(found.group(1)) * 1024 / 1e9 if found else 0.0


def ready(page: Path, chromium: str) -> float:
    """Seconds from opening the page until it can be used."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(page.as_uri())
        tab.locator("html[data-ready=yes]").wait_for()
        seconds = float(tab.evaluate("performance.getEntriesByName('ready')[0].startTime")) / 1000
        browser.close()
    return seconds


def spread(values: list[float], unit: str) -> str:
    """Median and extremes."""
    return f"{median(values):.2f} {unit} [{min(values):.2f}-{max(values):.2f}]"


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="the table of pruned networks")
    parser.add_argument("dense", type=Path, help="the table of dense ones")
    results, dense = vars(parser.parse_args()).values()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "index.html"
        runs = [reported(results, dense, page.parent) for _ in range(REPEATS)]
        print(
            f"report: {spread([seconds for seconds, _ in runs], 's')}, {max(gigabytes for _, gigabytes in runs):.2f} GB"
        )
        print(f"page: {page.stat().st_size / 1e6:.2f} MB")
        if chromium := os.environ.get("REWOUND_CHROMIUM") or shutil.which("chromium"):
            print(f"interactive after: {spread([ready(page, chromium) for _ in range(REPEATS)], 's')}")
        else:
            print("interactive after: unknown, there is no Chromium; apt-get install chromium, or set REWOUND_CHROMIUM")


if __name__ == "__main__":
    main()
