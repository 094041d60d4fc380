"""How does one machine play for another? ``rlox worker``, and ``rlox doctor``, which asks workers how they are."""
