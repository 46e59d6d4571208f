"""`python -m rewound` is the `rewound` command."""

if __name__ == "__main__":  # worker processes import this module, too, and no more than they need
    from rewound.cli import main

    main()
