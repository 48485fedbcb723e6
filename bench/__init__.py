"""Measurements of late_interaction beside its peers: `python -m bench --help`."""
