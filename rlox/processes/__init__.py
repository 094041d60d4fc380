"""Child processes: how one is started, watched, spoken to and ended, and how exceptions come back from it."""
