"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
    "rlox.algorithms.a2c": "17670312ff2dd051 aa843b518c68e4d8",
    "rlox.algorithms.appo": "6978863034c3d203 f22b610a2c14ee4b",
    "rlox.algorithms.bc": "7b6d848ebda9d255 f4de416cd0c720c2",
    "rlox.algorithms.cql": "67ecb3fcc03570b5 887784c4d7873ca0",
    "rlox.algorithms.dqn": "e78bb5a05309c592 d886fd1d9d2c2f8f",
    "rlox.algorithms.impala": "6b27a308f89fff9b c39caad81e70cec9",
    "rlox.algorithms.iql": "cba2a3f6a7151438 df94f77af4c4e94f",
    "rlox.algorithms.mappo": "44e6e7fb4d9c6618 8d404ba78236f34f",
    "rlox.algorithms.ppo": "3779f3b6578b64ab d3411c1642b2f10c",
    "rlox.algorithms.sac": "e28a256a3d05e09f b609da37c2cec60f",
    "rlox.algorithms.td3": "862ae3793d95ec39 df4e94fbc17adf35",
    "rlox.algorithms.td3_bc": "6fae2d5a823ffc87 4a43a744f8b51436",
    "rlox.checkpoint.counters": "04f3cb732a52ad11 d6b9d2a3ed1c64a7",
    "rlox.collectors.replay": "0b3c25c9b5fc6de0 091f4a9bccdb1664",
    "rlox.collectors.rollout": "263fbeedc257e9a8 844935d9ebc14d58",
    "rlox.envs.spec": "4848a26da6d1df6a 1179f99c216b7bcc",
    "rlox.multi_agent.players": "8c9bb5b3d4f8b4d7 70fe5bcba639843d",
    "rlox.nn.acting": "5dac89367c158fb7 952cf60ba7b1de32",
    "rlox.nn.actors": "5de32b8df2df79d6 50afab4cfbfd5465",
    "rlox.nn.batch": "bd6a2f1a86549a80 da1c3764843960ba",
    "rlox.nn.losses": "92b913f5929b98b4 775dde49da165715",
    "rlox.nn.modules": "e28a93e294c2ed0d 14069631e0e25212",
    "rlox.nn.optimizers": "e18490f7bd95ff9b 904e886a46909729",
    "rlox.nn.policies": "c99656e4f219a123 078911eb95da362d",
    "rlox.nn.value_losses": "46528063de11545d 1673880de96edb38",
    "rlox.training.backend": "3bed748cae334e1c 05ef206a489e7407",
    "rlox.training.off_policy": "a89aed6ec1385096 c6ceb68d3d7cedf2",
    "rlox.training.offline": "b18182609a71f35e 835ee2098dd6e003",
    "rlox.training.on_policy": "ec8bce79c97e491f 2c9f8ee7cd40c21b",
    "rlox.training.replay": "9694cc4fdb903375 1f62e224a6736fcf",
}
