"""What :mod:`late_interaction.ray` consists of."""
