"""Data sets, each prepared once into the cache and then loaded from there."""
