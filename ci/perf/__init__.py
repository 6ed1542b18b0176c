"""Performance baselines: counted figures held to equality, timed ones against the accepted source in the same process."""
