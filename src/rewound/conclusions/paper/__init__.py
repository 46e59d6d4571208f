"""What the paper's figures show, as numbers: which experiments, which panels, which points."""
