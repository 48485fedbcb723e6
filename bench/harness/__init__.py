"""What every measurement needs: inputs, a reference, clocks, records and their rules."""
