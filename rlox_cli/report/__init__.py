"""What came of runs, and what is there? Pictures, pages, comparisons, and lists of keys, environments and runs."""
