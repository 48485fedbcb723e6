"""What encoding in parts needs: random numbers that come again, and distributed modules that send once."""
