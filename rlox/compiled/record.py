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
    "rlox.algorithms.iql": "cba2a3f6a7151438 df94f77af4c4e94f",
    "rlox.algorithms.mappo": "44e6e7fb4d9c6618 8d404ba78236f34f",
    "rlox.algorithms.ppo": "cb768d6b3c65720e 898db68ba2f0cce4",
    "rlox.algorithms.sac": "e28a256a3d05e09f b609da37c2cec60f",
    "rlox.algorithms.td3": "862ae3793d95ec39 df4e94fbc17adf35",
    "rlox.algorithms.td3_bc": "6fae2d5a823ffc87 4a43a744f8b51436",
    "rlox.checkpoint.counters": "04f3cb732a52ad11 d6b9d2a3ed1c64a7",
    "rlox.collectors.replay": "0b3c25c9b5fc6de0 091f4a9bccdb1664",
    "rlox.collectors.rollout": "07c75157b4893af0 fd44831f19118fff",
    "rlox.envs.spec": "4848a26da6d1df6a 1179f99c216b7bcc",
    "rlox.multi_agent.players": "8c9bb5b3d4f8b4d7 70fe5bcba639843d",
    "rlox.nn.acting": "7022b9942d1bbc56 6d0099bb043baebc",
    "rlox.nn.actors": "5de32b8df2df79d6 50afab4cfbfd5465",
    "rlox.nn.batch": "c1fbd4c673642406 affdeb4c80bd2b58",
    "rlox.nn.losses": "92b913f5929b98b4 775dde49da165715",
    "rlox.nn.modules": "97ab006990f780ef ab3ab8b3e46a7a6b",
    "rlox.nn.optimizers": "e18490f7bd95ff9b 904e886a46909729",
    "rlox.nn.policies": "c99656e4f219a123 078911eb95da362d",
    "rlox.nn.value_losses": "46528063de11545d 1673880de96edb38",
    "rlox.training.backend": "466642c6dde73c31 186a81134e0c4420",
    "rlox.training.networks": "c0308ae0c22dbe75 a9577d7f7bfc528e",
    "rlox.training.off_policy": "97d5c7fe9abbde31 4b11b8c22e87f6ce",
    "rlox.training.offline": "63a66470eebb989e d282811a8d31cdb6",
    "rlox.training.on_policy": "49ffa2aadb3a3c06 ebadca6a74242d0e",
    "rlox.training.replay": "04cb7d9e95fe9ea1 fb18dbe88e9b3c31",
}
