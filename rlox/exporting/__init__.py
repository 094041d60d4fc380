"""Policies as files that run without rlox: ONNX, TorchScript and C.

`policies` turns an agent into a `graph`, a short list of operations on one row; `onnx`, `module` (TorchScript) and `c`
write it; `runtimes` run the files, and `check` compares what they compute with the agent.
"""
