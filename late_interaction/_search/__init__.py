"""What searches of a corpus share: chunks on their way to a device, the best scores, groups of processes."""
