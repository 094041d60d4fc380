"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "41a431c12ca2546a 6bd74a2515d3d5ab",
    "rlox.algorithms.appo": "f666619af2ac6ba7 e5ac2e2abb4c2462",
    "rlox.algorithms.bc": "10905e6b67175b47 3ce9d7b0cfce1556",
    "rlox.algorithms.cql": "67ecb3fcc03570b5 887784c4d7873ca0",
    "rlox.algorithms.dqn": "1cdfff43ce3afebe d277d0879726754e",
    "rlox.algorithms.impala": "295d5a3c5ff62ec1 9761dff5ef0ff6fd",
    "rlox.algorithms.iql": "cba2a3f6a7151438 df94f77af4c4e94f",
    "rlox.algorithms.mappo": "7b7688db03bcbe1c ae649166d774bc2f",
    "rlox.algorithms.ppo": "f2f5ca8a45b6ea65 77f291c535bedea5",
    "rlox.algorithms.sac": "617d74d9cbe7cbc9 bc7ccbdc26a48ce1",
    "rlox.algorithms.td3": "b651b0f7f868af5d 2b9451f59d82e059",
    "rlox.algorithms.td3_bc": "6fae2d5a823ffc87 4a43a744f8b51436",
    "rlox.checkpoint.counters": "46819873cba236b9 ba8aa8751e30bcf4",
    "rlox.collectors.replay": "3d7cf74590f37468 d8a2ffff62d47b97",
    "rlox.collectors.rollout": "6780cc5fecaa24c3 f67626773f5cb4b7",
    "rlox.envs.spec": "dcdf3f63a06785b0 73e0d41d72c2fd28",
    "rlox.multi_agent.players": "8c9bb5b3d4f8b4d7 70fe5bcba639843d",
    "rlox.nn.acting": "3624f981f804fa99 637a56718b814edf",
    "rlox.nn.actors": "353cfe636d9de3bc 6bf558452f219f6e",
    "rlox.nn.batch": "6e7942a8899dc5bf a9de434242fe4f7a",
    "rlox.nn.losses": "f92040f47f540273 a1101daad75cda14",
    "rlox.nn.memory": "665f13d3fd902011 9cbf2b1e69b73060",
    "rlox.nn.modules": "faeaca5d4c50ea9a 4277f5f2f015993a",
    "rlox.nn.optimizers": "ed98ea0a9bf3affc 086e962c469b19c6",
    "rlox.nn.policies": "e2568352846d2f1d 7a8c2174a3d2c116",
    "rlox.nn.sequence_losses": "b95c718cbbc1f735 13f85a99b6c1505c",
    "rlox.nn.value_losses": "18439945d0b95565 9ab6258278b9636b",
    "rlox.training.backend": "8f98a114f8bdbec8 b6d5060fc3caf865",
    "rlox.training.off_policy": "48c96c27713e9d32 883d0798af9074e0",
    "rlox.training.offline": "556471f487c894f3 e39750e603aa0d26",
    "rlox.training.on_policy": "b1b4fc444c820749 bb630a2ab8d3e47f",
    "rlox.training.replay": "caacf914bf15ef7f a6f0b5a14b07ecd4",
}
