"""The Hugging Face Hub: what is shared of a run, its card, and its way there and back.

A pulled run is files that rlox reads without running anything: safetensors, JSON, YAML and pictures.
"""
