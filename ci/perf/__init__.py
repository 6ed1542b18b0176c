"""Performance baselines: counted figures are held to equality, timings against the accepted source, in one process."""
