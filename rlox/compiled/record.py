"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "05df7c9e64dff75f 334f05016e4b854b",
    "rlox.algorithms.appo": "4c018461589a7b9a f5318cd16ee7f8fd",
    "rlox.algorithms.bc": "9fdb2fa15c848b4c 8b0803fe60cf9c2b",
    "rlox.algorithms.cql": "513db2cec62d9d0b 369542154e9e38bb",
    "rlox.algorithms.dqn": "ed792b47e03de9e3 192c8961efd51135",
    "rlox.algorithms.impala": "9805018a8558693e 16f22528cd2f0df3",
    "rlox.algorithms.iql": "be4c418c95858d1a a87965e0f872d4e6",
    "rlox.algorithms.mappo": "9ad00f124498e8b1 1c2a45e9fb9f9ad9",
    "rlox.algorithms.ppo": "11278e00ddd9dd34 03e04129a4729e77",
    "rlox.algorithms.sac": "d70f2b5bc4128404 e0422d6e88376a69",
    "rlox.algorithms.td3": "9690703e521eb9f2 31f31c7451ec8569",
    "rlox.algorithms.td3_bc": "35cbf0586c1cbbc0 b337ee5939e4bbf8",
    "rlox.checkpoint.counters": "ae6f30d460b4f18d 665460ccb762e252",
    "rlox.collectors.replay": "3e545b4e2244c89e ed24b8132b35cf4e",
    "rlox.collectors.rollout": "28a2fbd63ad00ef2 8a4034f53668d36b",
    "rlox.envs.spec": "543e441ccc2cc859 465ca42605b5fc3e",
    "rlox.multi_agent.players": "44b9b9dd68ba4e3d 2583236ed6e7bcb8",
    "rlox.nn.acting": "e8e094e63f52794c 8682c88b7ed3e84c",
    "rlox.nn.batch": "2b99644e64f69c6a 0e46e5c8fc59b6ed",
    "rlox.nn.losses": "f108995cca55f600 e31fd23c5d677398",
    "rlox.nn.modules": "a6df9daec6538e72 e00f713cf69c63a1",
    "rlox.nn.networks": "1cc4f30260e3ee10 2db014cfc82af019",
    "rlox.nn.optimizers": "105d67d6c88937db 53210d886cc62803",
    "rlox.nn.policies": "8eee5b418040e481 721f28e3c9c607dd",
    "rlox.training.backend": "e1d3631592a007d2 d881c8ee0b73aac4",
    "rlox.training.loops": "2f5bef38f8aa61e5 5a4712310233d616",
    "rlox.training.networks": "da402eab0465e824 04ed348574224ee1",
    "rlox.training.off_policy": "92314dae56e099a4 564b0368a8e94612",
    "rlox.training.offline": "9c29918266e3cc53 b472c95a51b2db53",
    "rlox.training.on_policy": "e6999f1d04b9b393 ec69ece07575293c",
    "rlox.training.replay": "0ecd720da7cdfbda 070e16836c03b849",
    "rlox.training.schedules": "b1261da85cc4a37d d18f7a3d2ab99c8c",
}
