"""What came of a run of checks: the scorecard, its table and the commands that reproduce a failure."""
