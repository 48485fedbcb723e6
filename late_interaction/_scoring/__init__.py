"""What functions that score have in common: options, warnings, calls of operators."""
