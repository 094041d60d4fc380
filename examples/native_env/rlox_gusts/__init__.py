"""Joins rlox from outside: `env` (native environments), `reward` (a native reward), `buffer` (a replay buffer)."""
