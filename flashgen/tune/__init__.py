"""The tuner: search over feasible schedules, kept trials, and the tables that come of them."""
