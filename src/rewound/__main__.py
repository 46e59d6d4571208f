"""The `rewound` command, also as `python -m rewound`."""

import signal


def main() -> None:
    """Run it; until its work begins, Ctrl-C just ends it: in an import, it would be some module's error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rewound.cli import main as command

    command()


if __name__ == "__main__":  # worker processes import this module, too, and no more than they need
    main()
