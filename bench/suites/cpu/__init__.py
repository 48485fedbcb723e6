"""Suites of the CPU."""
