"""Performance baselines: counted figures are held to equality, timed ones against the accepted source, in one process."""
