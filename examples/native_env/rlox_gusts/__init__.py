"""Extensions of rlox: `env` (native environments), `reward` (a native reward), `buffer` (a replay buffer)."""
