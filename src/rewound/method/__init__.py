"""The paper's method, usable alone: techniques, the algorithm, schedules, pruning, costs."""
