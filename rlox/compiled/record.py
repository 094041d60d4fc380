"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "41a431c12ca2546a 6bd74a2515d3d5ab",
    "rlox.algorithms.appo": "6978863034c3d203 f22b610a2c14ee4b",
    "rlox.algorithms.bc": "7b6d848ebda9d255 f4de416cd0c720c2",
    "rlox.algorithms.cql": "67ecb3fcc03570b5 887784c4d7873ca0",
    "rlox.algorithms.dqn": "6b912cea6167ccc5 82ebf65cd330001d",
    "rlox.algorithms.impala": "6b27a308f89fff9b c39caad81e70cec9",
    "rlox.algorithms.iql": "cba2a3f6a7151438 df94f77af4c4e94f",
    "rlox.algorithms.mappo": "c659e75b2f902685 eb1f14e9f3d30b17",
    "rlox.algorithms.ppo": "f2f5ca8a45b6ea65 77f291c535bedea5",
    "rlox.algorithms.sac": "617d74d9cbe7cbc9 bc7ccbdc26a48ce1",
    "rlox.algorithms.td3": "b651b0f7f868af5d 2b9451f59d82e059",
    "rlox.algorithms.td3_bc": "6fae2d5a823ffc87 4a43a744f8b51436",
    "rlox.checkpoint.counters": "46819873cba236b9 ba8aa8751e30bcf4",
    "rlox.collectors.replay": "3def3843f4668364 76b95994ee43a907",
    "rlox.collectors.rollout": "7064fbea5a29334e f18d05fa9346b69f",
    "rlox.envs.spec": "87f7f9df2b660e3b eb4c853fcdb230ec",
    "rlox.multi_agent.players": "8c9bb5b3d4f8b4d7 70fe5bcba639843d",
    "rlox.nn.acting": "68c03afd7e310ea0 86d16ca9183ab06b",
    "rlox.nn.actors": "a9b21f4f42f97bb9 9a44403e1b987158",
    "rlox.nn.batch": "d4cd8254fb66fe42 cb2abee696a3637e",
    "rlox.nn.losses": "f92040f47f540273 a1101daad75cda14",
    "rlox.nn.modules": "faeaca5d4c50ea9a 4277f5f2f015993a",
    "rlox.nn.optimizers": "ed98ea0a9bf3affc 086e962c469b19c6",
    "rlox.nn.policies": "d2ed1a86142b272a 41d95c668ad5629c",
    "rlox.nn.value_losses": "46528063de11545d 1673880de96edb38",
    "rlox.training.backend": "8f98a114f8bdbec8 b6d5060fc3caf865",
    "rlox.training.off_policy": "11cbc8df26eccd74 f45d4c9c9ca8375b",
    "rlox.training.offline": "b9d09255a638c7b1 abedaeb901be9794",
    "rlox.training.on_policy": "ceb6ade1c182e46d 3318159eb54c0430",
    "rlox.training.replay": "996e8b49e8363ad3 5e239bf15686dff9",
}
