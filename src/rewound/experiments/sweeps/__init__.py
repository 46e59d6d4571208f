"""From a declared experiment to the rows it asks for: a sweep's file, its grid, a target for each network of it."""
