"""How does one machine run environments for another? ``rlox worker``, and ``rlox doctor``, which checks workers."""
