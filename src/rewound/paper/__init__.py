"""What the paper's figures show, as numbers: which settings, which panels, which points."""
