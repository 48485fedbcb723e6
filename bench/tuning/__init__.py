"""What the kernels and the planner are tuned by: plans, random shapes, profiles."""
