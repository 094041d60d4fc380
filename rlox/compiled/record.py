"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "3e5b8e4f883e86cc f8f315c7069632cc",
    "rlox.algorithms.appo": "76b44ccfad1bbecb 15709b56c835b541",
    "rlox.algorithms.bc": "7b6d848ebda9d255 f4de416cd0c720c2",
    "rlox.algorithms.cql": "67ecb3fcc03570b5 887784c4d7873ca0",
    "rlox.algorithms.dqn": "e78bb5a05309c592 d886fd1d9d2c2f8f",
    "rlox.algorithms.impala": "b421e74277fb2dfb 8e7fdcb31640135a",
    "rlox.algorithms.iql": "0e0499404eaa5dbe 7a489b63b37f6fd3",
    "rlox.algorithms.mappo": "44e6e7fb4d9c6618 8d404ba78236f34f",
    "rlox.algorithms.ppo": "cb768d6b3c65720e 898db68ba2f0cce4",
    "rlox.algorithms.sac": "e28a256a3d05e09f b609da37c2cec60f",
    "rlox.algorithms.td3": "91d541742fb83695 efa58a8e5487456d",
    "rlox.algorithms.td3_bc": "55b4688b3742ee5b 990f2276485267cc",
    "rlox.checkpoint.counters": "04f3cb732a52ad11 d6b9d2a3ed1c64a7",
    "rlox.collectors.replay": "0b3c25c9b5fc6de0 091f4a9bccdb1664",
    "rlox.collectors.rollout": "07c75157b4893af0 fd44831f19118fff",
    "rlox.envs.spec": "8ba8a56f1d0f1920 1179f99c216b7bcc",
    "rlox.multi_agent.players": "8c9bb5b3d4f8b4d7 70fe5bcba639843d",
    "rlox.nn.acting": "af7393a938e96ba2 c464cacd2e20890a",
    "rlox.nn.actors": "e1a6664f005b2546 7dd9e2fab33be6f3",
    "rlox.nn.batch": "2b99644e64f69c6a 0e46e5c8fc59b6ed",
    "rlox.nn.losses": "92b913f5929b98b4 775dde49da165715",
    "rlox.nn.modules": "c757f564d95d5d05 1fc57a1d37ec7348",
    "rlox.nn.networks": "001de2441a0bf62c 9366432a2792b64f",
    "rlox.nn.optimizers": "5bb7c0e469593752 fc10dc8ac96a0b97",
    "rlox.nn.policies": "7a0ecb1532ec9e1e 45de30b12da591d9",
    "rlox.nn.value_losses": "46528063de11545d 1673880de96edb38",
    "rlox.training.backend": "b6a84b81715feda6 9ffc6855a9db52df",
    "rlox.training.networks": "1a2a9923896b1391 a96604bd961ae66f",
    "rlox.training.off_policy": "7646c626f1036e15 95669352154c0dac",
    "rlox.training.offline": "63a66470eebb989e d282811a8d31cdb6",
    "rlox.training.on_policy": "49ffa2aadb3a3c06 ebadca6a74242d0e",
    "rlox.training.replay": "04cb7d9e95fe9ea1 fb18dbe88e9b3c31",
}
