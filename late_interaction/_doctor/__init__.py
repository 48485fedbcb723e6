"""What the doctor and the benchmarks of a checkout share, and the parts of :mod:`late_interaction.doctor`."""
