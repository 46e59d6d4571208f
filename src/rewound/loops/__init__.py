"""The algorithm around a user's own training loop: `rewound.epochs`, and what it records, restores and resumes."""
