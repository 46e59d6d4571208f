"""The algorithm around somebody else's training loop: `rewound.epochs`, and what it records, restores and resumes."""
