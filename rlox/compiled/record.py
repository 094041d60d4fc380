"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "41a431c12ca2546a 6bd74a2515d3d5ab",
    "rlox.algorithms.appo": "f666619af2ac6ba7 e5ac2e2abb4c2462",
    "rlox.algorithms.bc": "2f8a7d6e26e1da87 bd2da2dcd9ad9c7a",
    "rlox.algorithms.cql": "67ecb3fcc03570b5 887784c4d7873ca0",
    "rlox.algorithms.dqn": "9af463e6644cc022 06723da0fce4935e",
    "rlox.algorithms.impala": "295d5a3c5ff62ec1 9761dff5ef0ff6fd",
    "rlox.algorithms.iql": "cba2a3f6a7151438 df94f77af4c4e94f",
    "rlox.algorithms.mappo": "209879919bd0a978 dfe164c57b4dd1e0",
    "rlox.algorithms.ppo": "f2f5ca8a45b6ea65 77f291c535bedea5",
    "rlox.algorithms.sac": "617d74d9cbe7cbc9 bc7ccbdc26a48ce1",
    "rlox.algorithms.td3": "0c9a469d28d082dc 10b1251ac379a59b",
    "rlox.algorithms.td3_bc": "6fae2d5a823ffc87 4a43a744f8b51436",
    "rlox.checkpoint.counters": "46819873cba236b9 ba8aa8751e30bcf4",
    "rlox.collectors.replay": "3d7cf74590f37468 d8a2ffff62d47b97",
    "rlox.collectors.rollout": "50e0d46af33b2de0 f67626773f5cb4b7",
    "rlox.envs.spec": "99ff6322e937fc33 5523e447d6bff5ed",
    "rlox.multi_agent.players": "8c9bb5b3d4f8b4d7 70fe5bcba639843d",
    "rlox.nn.acting": "0d3805a9070d7a53 ee7a7448836527e9",
    "rlox.nn.actors": "674a779ea6bda049 2d424aa63161579c",
    "rlox.nn.batch": "8a467694b9b9f9a8 a9cfe93d8adeefd5",
    "rlox.nn.losses": "f92040f47f540273 a1101daad75cda14",
    "rlox.nn.modules": "faeaca5d4c50ea9a 4277f5f2f015993a",
    "rlox.nn.optimizers": "ed98ea0a9bf3affc 086e962c469b19c6",
    "rlox.nn.policies": "3bbeed6850c3dd26 942f5fd469d5d7f8",
    "rlox.nn.value_losses": "18439945d0b95565 9ab6258278b9636b",
    "rlox.training.backend": "8f98a114f8bdbec8 b6d5060fc3caf865",
    "rlox.training.off_policy": "48c96c27713e9d32 883d0798af9074e0",
    "rlox.training.offline": "08be7ffb8ebe48b9 adf737fff94503c1",
    "rlox.training.on_policy": "ceb6ade1c182e46d 3318159eb54c0430",
    "rlox.training.replay": "e93bbd4ca1d67496 a5a5b97d111fa5ec",
}
