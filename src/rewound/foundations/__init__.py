"""What everything else stands on: errors, names, random numbers, whole files."""
