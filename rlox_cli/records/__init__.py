"""What is on disk? The folders of runs, what they recorded, and the ledger of a sweep."""
