"""``rlox train -m`` and ``rlox sweep``: many runs, planned in a ledger, launched, retried, resumed and compared."""
