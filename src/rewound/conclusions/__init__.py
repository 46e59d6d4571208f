"""From rows to conclusions, whoever wrote them: best times, ranges, rivals, and whether a table is a replica."""
