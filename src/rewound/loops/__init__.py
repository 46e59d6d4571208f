"""The algorithm around a user's own training loop: `rewound.epochs` and `rewound.steps`."""
