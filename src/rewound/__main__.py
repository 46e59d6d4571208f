"""`python -m rewound` is the `rewound` command."""

from rewound.cli import main

if __name__ == "__main__":  # worker processes import this module, too
    main()
