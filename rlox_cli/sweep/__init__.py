"""How are many runs planned, launched, retried, resumed, or chosen by Optuna? ``rlox train -m``."""
