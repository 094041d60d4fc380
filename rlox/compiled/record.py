"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "0f9ea443bb6106ff 6108c823d5365e65",
    "rlox.algorithms.appo": "4c018461589a7b9a f5318cd16ee7f8fd",
    "rlox.algorithms.bc": "9fdb2fa15c848b4c 8b0803fe60cf9c2b",
    "rlox.algorithms.cql": "62984e14b3d5509c a9db20cbc4893b93",
    "rlox.algorithms.dqn": "395fecd9d332910e 26c68784b7059cbd",
    "rlox.algorithms.impala": "9805018a8558693e 16f22528cd2f0df3",
    "rlox.algorithms.iql": "ad6d4962efd91157 af5dd86aadbbd97a",
    "rlox.algorithms.mappo": "9ad00f124498e8b1 1c2a45e9fb9f9ad9",
    "rlox.algorithms.ppo": "73f5e1cf4212d0ee 8042c72f468bee87",
    "rlox.algorithms.sac": "a8af4df01fab290b a6a920730af50bcf",
    "rlox.algorithms.td3": "36ca87c6f13c5924 0103109097deeb80",
    "rlox.algorithms.td3_bc": "4c96b0ba56e09c01 e68ff565d2c28701",
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
    "rlox.training.backend": "51f0096cfa8c5565 7fca2534f6e6c1a6",
    "rlox.training.loops": "510a7cddfa6544a4 141a2889dba0432e",
    "rlox.training.networks": "4f17b6d51f4b93ef 49cfd37b5c2d2bd9",
    "rlox.training.off_policy": "272f5d85acac27aa 2f0bf86e45890d12",
    "rlox.training.offline": "dd595260a82ddce6 c796374c1582f1ed",
    "rlox.training.on_policy": "136b48588f59d0f8 bb1f3005fafbf129",
    "rlox.training.replay": "83bf2b9b4af03096 6b4765033e5cb78b",
    "rlox.training.schedules": "b1261da85cc4a37d d18f7a3d2ab99c8c",
}
