"""The libraries that are measured beside ours, and how their kernels are compiled and tuned ahead."""
