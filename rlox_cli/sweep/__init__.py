"""How do many runs go? ``rlox train -m``: planned in a ledger, launched, retried, resumed, or chosen by Optuna."""
