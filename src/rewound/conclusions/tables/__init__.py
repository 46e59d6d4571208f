"""The tables of an experiment: their columns, their files, and what a row of them says."""
