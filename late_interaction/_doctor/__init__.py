"""The parts of :mod:`late_interaction.doctor`, some of which the benchmarks of a checkout import."""
