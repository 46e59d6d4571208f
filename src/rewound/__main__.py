"""The `rewound` command, also as `python -m rewound`."""

import signal


def main() -> None:
    """Run it. Until a command begins, Ctrl-C ends the process at once: an import would report it as an error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rewound.cli import main as command

    command()


if __name__ == "__main__":  # worker processes import this module, too, and no more than they need
    main()
