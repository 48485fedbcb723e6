"""What the patches of other libraries share: how code is exchanged, and lists that score as if padded."""
